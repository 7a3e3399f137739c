"""The loss over a head whose words ranks share: one rank's, by the error rule against float64."""

import pytest
import torch

from automodel_c.reference import loss as reference
from tests.numerics import assert_as_good_as, pool
from tests.ops.test_loss import naive_linear, run
from tests.parallel import vocab_worker as worker

F32, BF16 = torch.float32, torch.bfloat16
DTYPES = pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
WAYS = pytest.mark.parametrize("by_rows", [False, True], ids=["labelled-rows", "all-rows"])
RANKS = pytest.mark.parametrize("count", [1, 2, 4], ids="{}-ranks".format)
SHAPES = [
    pytest.param(8, 12, 4, None, id="even"),
    pytest.param(24, 1101, 33, None, id="uneven"),
    pytest.param(4, 3, 5, None, id="fewer-words-than-ranks"),
    pytest.param(16, 2050, 8, "one rank", id="labels-of-one-rank"),
    pytest.param(12, 515, 16, "all", id="all-labelled"),
]


def joined(results):
    """[rank][draw][part] -> [draw][whole part]: losses added, gradients laid end to end."""
    return [
        [
            torch.stack([r[0] for r in of_ranks]).sum(),
            *(torch.cat(parts) for parts in list(zip(*of_ranks, strict=True))[1:]),
        ]
        for of_ranks in zip(*results, strict=True)
    ]


def judge(name, found, draws, **options):
    naive = pool([run(naive_linear, d[:2], d[2], **options) for d in draws])
    wide = [([x.double() for x in d[:2]], d[2]) for d in draws]
    truth = pool([run(reference.linear_cross_entropy, *d, **options) for d in wide])
    for part, (a, b, c) in enumerate(zip(pool(found), naive, truth, strict=True)):
        assert_as_good_as(a, b, c.double(), name=f"{name}[{part}]")


@RANKS
@DTYPES
@WAYS
@pytest.mark.parametrize(("rows", "vocab", "size", "labelled"), SHAPES)
def test_loss_and_gradients_are_one_ranks(rank_pools, seed, count, rows, vocab, size, labelled, by_rows, dtype):
    draws = [worker.problem(seed + i, rows, vocab, size, dtype, labelled) for i in range(6)]
    pool_ = rank_pools(count)
    judge("own count", joined(pool_.run(worker.step, draws, by_rows)), draws)
    options = {"upstream": 0.7, "num_label_tokens": 1000}
    judge("global count", joined(pool_.run(worker.step, draws, by_rows, **options)), draws, **options)


@RANKS
@WAYS
def test_no_label_gives_zero(rank_pools, seed, count, by_rows):
    draws = [worker.problem(seed, 8, 12, 4, F32, "none")]
    for found in rank_pools(count).run(worker.step, draws, by_rows):
        assert all((x == 0).all() for x in found[0])


@WAYS
def test_a_rank_without_labels(rank_pools, seed, by_rows):
    """Its loss is 0, the gradient of its words is all rows'; ignored rows may hold NaN."""
    hidden, weight, labels = worker.problem(seed, 8, 12, 4, F32, "all")
    labels[4:] = -100
    clean = joined(rank_pools(2).run(worker.step, [(hidden, weight, labels)], by_rows))
    hidden[4:] = torch.nan
    results = rank_pools(2).run(worker.step, [(hidden, weight, labels)], by_rows)
    assert results[1][0][0] == 0 and (results[1][0][1] == 0).all() and (results[1][0][2] != 0).any()
    for a, b in zip(joined(results)[0], clean[0], strict=True):
        assert torch.equal(a, b)


@WAYS
@pytest.mark.parametrize("needs", [(True, False), (False, True), (False, False)], ids=["hidden", "weight", "none"])
def test_frozen_weight_or_hidden(rank_pools, seed, by_rows, needs):
    draws = [worker.problem(seed, 12, 515, 8, BF16)]
    both = joined(rank_pools(2).run(worker.step, draws, by_rows))[0]
    one = joined(rank_pools(2).run(worker.step, draws, by_rows, needs=needs))[0]
    expected = [both[0], *(g for g, need in zip(both[1:], needs, strict=True) if need)]
    assert all(map(torch.equal, one, expected)) and len(one) == len(expected)


@pytest.mark.parametrize("count", [2, 4])
def test_again_and_what_travels(rank_pools, seed, count):
    """The same bits a second time and without a graph; a second derivative is refused; on the wire are rows, labels,
    12 bytes a row and peer, and hidden's gradient once, in float32."""
    rows, size = 12, 16
    drawn = worker.problem(seed, rows, 515, size, BF16, "all")
    for first, second, said, sent in rank_pools(count).run(worker.again, drawn):
        assert all(map(torch.equal, first, second))
        assert said == "linear_cross_entropy_backward: a second derivative is not implemented"
        own, others = rows // count, count - 1
        assert sent == others * (own * (2 * size + 8) + 12 * rows + own * 4 * size)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"vocab_size": 14}, "weight has 6 words; rank 1 of 2 holds 7 of 14"),
        ({"weight": torch.zeros(5, 4)}, "weight has 5 words; rank 1 of 2 holds 6 of 12"),
        ({"labels": torch.zeros(3, dtype=torch.int64)}, "labels has 3 elements for 4 rows"),
        ({"hidden": torch.zeros(4)}, "hidden has 1 axes, 2 are needed"),
        ({"labels": None}, "argument 'labels' must be a torch tensor"),
        ({"labels": torch.full((4,), 12)}, r"labels[4] is 12, neither in [0, 12)"),
        ({"hidden": torch.zeros(4, 4, dtype=torch.bfloat16)}, "ranks disagree"),
        ({"hidden": torch.zeros(5, 4), "labels": torch.zeros(5, dtype=torch.int64)}, "ranks disagree"),
        ({"hidden": torch.zeros(4, 4, requires_grad=True)}, "ranks disagree"),
        ({"ignore_index": -1}, "ranks disagree"),
    ],
    ids=str,
)
def test_a_bad_argument_of_one_rank_is_raised_on_all(rank_pools, change, words):
    found = rank_pools(2).run(worker.refused, change)
    assert all(said is not None and words in said for said in found), found
    rank_pools(2).close()  # connections were cut


def test_words_of_ranks(rank_pools):
    assert rank_pools(4).run(worker.words_of, 10) == [(0, 3), (3, 3), (6, 2), (8, 2)]
