"""frame_partition, docs_from_ids and Pack against brute force and the published cuts."""

import copy
import itertools
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from automodel_c import Pack, docs_from_ids, frame_partition
from automodel_c.reference import partition as reference
from tests.core.producers import Producer
from tests.strategies import doc_ids, frame_costs, packed_docs

FORMS = {
    "list": list,
    "tuple": tuple,
    "numpy-int64": lambda x: np.array(x, dtype=np.int64),
    "numpy-int32": lambda x: np.array(x, dtype=np.int32),
    "numpy-strided": lambda x: np.repeat(np.array(x, dtype=np.int64), 2)[::2],
    "tensor-int64": lambda x: torch.tensor(x, dtype=torch.int64),
    "tensor-int32": lambda x: torch.tensor(x, dtype=torch.int32),
    "tensor-strided": lambda x: torch.tensor(x, dtype=torch.int64).repeat_interleave(2)[::2],
    "producer": lambda x: Producer(x),
    "old-producer": lambda x: Producer(x, versioned=False, style="bare"),
}
any_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
METHODS = pytest.mark.parametrize("method", ["minimax", "bisect"])


def cut(patches, world, **options):
    cuts = frame_partition(patches, world, **options)
    return None if cuts is None else cuts.tolist()


@pytest.mark.parametrize(
    ("patches", "world", "alpha", "cuts"),
    [
        ([1024] * 4 + [112] * 400, 8, 0, [0, 1, 2, 3, 36, 128, 220, 312, 404]),
        ([1024] * 4 + [112] * 400, 8, 3456, [0, 13, 69, 125, 181, 236, 292, 348, 404]),
        ([3, 4, 5], 2, 0, [0, 2, 3]),
        ([7] * 4, 2, 0, [0, 2, 4]),
        ([7] * 6, 3, 0, [0, 2, 4, 6]),
        ([7] * 8, 4, 0, [0, 2, 4, 6, 8]),
        ([1, 1, 2], 2, 0, [0, 2, 3]),
        ([5], 1, 0, [0, 1]),
        ([5, 5], 2, 9, [0, 1, 2]),
    ],
)
def test_bisect_published_cuts(patches, world, alpha, cuts):
    assert cut(patches, world, alpha=alpha, method="bisect") == cuts


@METHODS
@pytest.mark.parametrize(("n", "world"), [(0, 1), (1, 2), (3, 4), (3, 2**40), (0, 2**62)])
def test_fewer_frames_than_ranks_is_none(method, n, world):
    assert frame_partition([4] * n, world, method=method) is None


@METHODS
@given(patches=frame_costs(), world=st.integers(1, 9), alpha=st.sampled_from([0, 1, 3456]))
def test_cuts_are_sound(method, patches, world, alpha):
    cuts = cut(patches, world, alpha=alpha, method=method)
    if len(patches) < world:
        assert cuts is None
        return
    assert cuts[0] == 0 and cuts[-1] == len(patches) and len(cuts) == world + 1
    assert all(start < end for start, end in itertools.pairwise(cuts))


@given(patches=frame_costs(max_frames=10), world=st.integers(1, 6), alpha=st.sampled_from([0, 1, 3456]))
def test_minimax_equals_brute_force(patches, world, alpha):
    cuts = cut(patches, world, alpha=alpha)
    least = reference.least_largest_cost(patches, world, alpha)
    assert (None if cuts is None else max(reference.part_costs(patches, cuts, alpha))) == least


@given(patches=frame_costs(), world=st.integers(1, 9), alpha=st.sampled_from([0, 1, 3456]))
def test_bisect_equals_reference(patches, world, alpha):
    assert cut(patches, world, alpha=alpha, method="bisect") == reference.bisect_cuts(patches, world, alpha)


@given(patches=frame_costs(max_frames=40), world=st.integers(1, 9))
def test_minimax_is_never_worse_than_bisect(patches, world):
    minimax, bisect = cut(patches, world), cut(patches, world, method="bisect")
    if minimax is not None:
        assert max(reference.part_costs(patches, minimax, 0)) <= max(reference.part_costs(patches, bisect, 0))


@METHODS
def test_equal_costs_and_zero_patches(method):
    assert cut([9] * 12, 4, method=method) == [0, 3, 6, 9, 12]
    for patches in ([0] * 5, [0, 0, 3, 0, 0]):
        cuts = cut(patches, 3, alpha=2**62, method=method) if not any(patches) else cut(patches, 3, method=method)
        assert cuts[0] == 0 and cuts[-1] == 5 and len(set(cuts)) == 4


def test_minimax_near_two_to_the_63():
    """The check of a bound added it to a running cost, which overflowed above 2^62."""
    side = 1_518_500_249  # four frames of side * side cost just under 2^63
    assert 4 * side * side < 2**63 <= 4 * (side + 1) ** 2
    patches = [side, side, side, side]
    assert cut(patches, 2) == [0, 2, 4]
    assert cut([1, side, side, 1], 2) == [0, 2, 4]
    assert cut(patches, 3) in ([0, 2, 3, 4], [0, 1, 3, 4], [0, 1, 2, 4])


@METHODS
@pytest.mark.parametrize(
    ("patches", "alpha"),
    [
        ([3_037_000_500], 0),
        ([1_518_500_250] * 4, 0),
        ([1], 2**63 - 1),
        ([2], 2**62 - 2),
        ([2**63 - 1], 0),
        ([1, 1], 2**62),
    ],
)
def test_costs_of_two_to_the_63_are_refused(method, patches, alpha):
    with pytest.raises(ValueError, match=r"frame_partition: \d+ frames of up to \d+ patches .* may cost 2\^63 or more"):
        frame_partition(patches, 1, alpha=alpha, method=method)


@METHODS
@pytest.mark.parametrize(
    ("patches", "alpha"), [([3_037_000_499], 0), ([1_518_500_249] * 4, 0), ([1], 2**63 - 2), ([2], 2**62 - 3)]
)
def test_costs_below_two_to_the_63_are_cut(method, patches, alpha):
    assert cut(patches, 1, alpha=alpha, method=method) == [0, len(patches)]


@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        (([1, 2], 0), {}, ValueError, "frame_partition: world is 0, at least 1 is needed"),
        (([1, 2], -3), {}, ValueError, "frame_partition: world is -3, at least 1 is needed"),
        (([1, 2], 1), {"alpha": -1}, ValueError, "frame_partition: alpha is -1, it must not be negative"),
        (([1, -2], 1), {}, ValueError, r"frame_partition: patches\[1\] is -2, it must not be negative"),
        (([1, 2], 1), {"method": "best"}, ValueError, "method is 'best', one of minimax, bisect is needed"),
        (([1, 2], 2**63), {}, ValueError, "argument 'world' does not fit in 64 bits"),
        (([1, 2**63], 1), {}, ValueError, "argument 'patches' does not fit in 64 bits at 1"),
        (([1, 2.0], 1), {}, TypeError, "argument 'patches' holds something other than integers at 1"),
        (([1, True], 1), {}, TypeError, "argument 'patches' holds something other than integers at 1"),
        (([1, 2], 1.0), {}, TypeError, "argument 'world' must be an int, not float"),
        (([1, 2], True), {}, TypeError, "argument 'world' must be an int, not bool"),
        (([1, 2], 1), {"alpha": "3"}, TypeError, "argument 'alpha' must be an int, not str"),
        ((torch.tensor([1.0]), 1), {}, TypeError, "argument 'patches' must be int32 or int64, not float32"),
        ((np.array([1], np.uint8), 1), {}, TypeError, "argument 'patches' must be int32 or int64, not uint8"),
        ((np.array([[1]]), 1), {}, ValueError, "argument 'patches' must have one axis, not 2"),
        ((3, 1), {}, TypeError, "argument 'patches' must be a tensor"),
    ],
)
def test_frame_partition_errors(arguments, options, error, words):
    with pytest.raises(error, match=words):
        frame_partition(*arguments, **options)


@any_form
def test_frame_partition_takes_any_form(form):
    cuts = frame_partition(form([3, 4, 5, 1]), 2)
    assert cuts.dtype == np.int64 and cuts.tolist() == [0, 2, 4]


@given(ids=doc_ids(100))
def test_docs_from_ids_equals_reference(ids):
    docs = docs_from_ids(ids)
    assert docs.dtype == np.int64 and docs.shape == (len(docs), 2)
    assert [tuple(row) for row in docs.tolist()] == reference.docs_from_ids(ids)
    covered = sorted(i for start, end in docs.tolist() for i in range(start, end))
    assert covered == [i for i, number in enumerate(ids) if number != 0]


@any_form
@pytest.mark.parametrize(
    ("ids", "docs"),
    [
        ([1, 1, 2], [[0, 2], [2, 3]]),
        ([0, 0, 7, 0, 7, 7, 0], [[2, 3], [4, 6]]),
        ([1, 2, 1], [[0, 1], [1, 2], [2, 3]]),
        ([-1, -1, 0, 5], [[0, 2], [3, 4]]),
        ([0, 0], []),
        ([], []),
    ],
    ids=str,
)
def test_docs_from_ids(form, ids, docs):
    found = docs_from_ids(form(ids))
    assert found.shape == (len(docs), 2) and found.tolist() == docs


@given(pack=packed_docs(80))
def test_pack_of_offsets(pack):
    made = Pack(cu_seqlens=pack.cu_seqlens)
    assert made.lengths.tolist() == pack.lengths and len(made) == len(pack.lengths)
    assert made.end == pack.cu_seqlens[-1] == made.num_real and made.tokens is None
    assert made.max_length == max(pack.lengths, default=0)
    made.check_tokens(pack.tokens)


@given(ids=doc_ids(60))
def test_pack_of_ids(ids):
    made = Pack(doc_ids=ids)
    assert made.tokens == len(ids) and made.num_real == sum(number != 0 for number in ids)
    made.check_tokens(len(ids))
    with pytest.raises(ValueError, match=f"y has {len(ids) + 1} tokens, the pack's doc_ids have {len(ids)}"):
        made.check_tokens(len(ids) + 1, "y")


@any_form
def test_pack_takes_any_form(form):
    assert Pack(cu_seqlens=form([0, 2, 2, 5])).docs.tolist() == [[0, 2], [2, 2], [2, 5]]
    assert Pack(doc_ids=form([3, 3, 0, 4])).docs.tolist() == [[0, 2], [3, 4]]


@pytest.mark.parametrize("make", [np.array, torch.tensor, list], ids=["numpy", "tensor", "list"])
def test_pack_copies_at_the_call(make):
    offsets, ids = make([0, 2, 5]), make([1, 1, 2])
    packs = Pack(cu_seqlens=offsets), Pack(doc_ids=ids)
    offsets[1], ids[0] = 4, 9
    assert packs[0].docs.tolist() == [[0, 2], [2, 5]] and packs[1].docs.tolist() == [[0, 2], [2, 3]]
    with pytest.raises(ValueError, match="read-only"):
        packs[0].docs[0, 0] = 1


def test_copies_of_a_pack_are_read_only():
    pack = Pack(doc_ids=[1, 1, 0, 2])
    for twin in (copy.deepcopy(pack), pickle.loads(pickle.dumps(pack))):
        assert twin.docs.tolist() == pack.docs.tolist() and twin.tokens == 4
        with pytest.raises(ValueError, match="read-only"):
            twin.docs[0, 0] = 3


def test_pack_says_what_it_is():
    assert repr(Pack(cu_seqlens=[0, 2, 5])) == "Pack(2 documents, 5 real tokens, token axis >= 5)"
    assert repr(Pack(doc_ids=[1, 0])) == "Pack(1 documents, 1 real tokens, token axis 2)"
    assert Pack(cu_seqlens=[0], device="cpu").device_docs is None


@pytest.mark.parametrize(
    ("given_as", "error", "words"),
    [
        ({}, ValueError, "give exactly one of cu_seqlens and doc_ids"),
        ({"cu_seqlens": [0, 1], "doc_ids": [1]}, ValueError, "give exactly one of cu_seqlens and doc_ids"),
        ({"cu_seqlens": []}, ValueError, "cu_seqlens is empty, it starts with 0"),
        ({"cu_seqlens": [1, 2]}, ValueError, r"cu_seqlens\[0\] is 1, not 0"),
        ({"cu_seqlens": [0, 3, 2]}, ValueError, r"cu_seqlens\[2\] is 2, less than the 3 before it"),
        ({"cu_seqlens": [0, 1.0]}, TypeError, "'cu_seqlens' holds something other than integers at 1"),
        ({"cu_seqlens": torch.tensor([0.0, 1.0])}, TypeError, "'cu_seqlens' must be int32 or int64, not float32"),
        ({"cu_seqlens": torch.tensor([0, 1], dtype=torch.int16)}, TypeError, "must be int32 or int64, not int16"),
        ({"doc_ids": torch.tensor([True])}, TypeError, "must be int32 or int64, not bool"),
        ({"doc_ids": np.array([[1]])}, ValueError, "must have one axis, not 2"),
        ({"doc_ids": "11"}, TypeError, "must be a tensor"),
    ],
    ids=str,
)
def test_pack_errors(given_as, error, words):
    with pytest.raises(error, match=words):
        Pack(**given_as)


def test_check_tokens_of_offsets():
    pack = Pack(cu_seqlens=[0, 4])
    pack.check_tokens(4)
    pack.check_tokens(9)
    with pytest.raises(ValueError, match="q has 3 tokens, the pack ends at 4"):
        pack.check_tokens(3, "q")
