"""Two ranks on GPUs: outputs and gradients are those of one rank, bytes the plan's, and failures are raised on both.

By NCCL with a GPU each, where there are two; and by gloo, through the host, with both ranks on one GPU, which runs
everything but NCCL.
"""

import pytest
import torch

from automodel_c import docs_from_ids, ops
from automodel_c.reference.gdn import gated_delta_rule as reference
from tests.cuda import parallel_worker as worker
from tests.models import cp_worker, ep_worker, packs
from tests.models.test_qwen3_5_cp import SEEDS, label_count, plain, total, trained, truth  # noqa: F401 (fixtures)
from tests.numerics import assert_as_good_as, pool
from tests.ops.test_exchange import ALL
from tests.parallel import context_worker, gdn_worker, test_context_conv, test_context_gdn, test_experts
from tests.parallel import test_context_parallel as attention
from tests.parallel import test_disagreements as disagreements
from tests.parallel import test_fsdp_hooks as fsdp
from tests.ranks import RankPool, RanksFailed

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("plain_memory")]

BF16, F32 = torch.bfloat16, torch.float32
WAYS = {"nccl": "nccl", "gloo and nccl": "cpu:gloo,cuda:nccl", "through the host": "gloo"}


def pool_of(way):
    if way != "through the host" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs: NCCL takes no two ranks on one")
    return RankPool(2, WAYS[way], "cuda")


@pytest.fixture(scope="module", params=["nccl", "through the host"])
def pair(request):
    pool = pool_of(request.param)
    yield pool
    pool.close()


@pytest.fixture
def by_nccl():
    pool = pool_of("nccl")
    yield pool
    pool.close()


@pytest.mark.parametrize("way", WAYS)
def test_rows_and_their_gradients_have_the_cpus_bits(seed, way):
    pool = pool_of(way)
    try:
        assert pool.run(worker.rows_and_gradients, [F32, BF16, torch.float64], seed) == [[True] * 3] * 2
        assert pool.run(worker.any_dtype, ALL) == [[True] * len(ALL)] * 2
    finally:
        pool.close()


def test_the_host_does_not_wait_for_the_device(by_nccl):
    assert by_nccl.run(worker.host_goes_on) == [True] * 2


@pytest.mark.parametrize("layout", attention.LAYOUTS)
@pytest.mark.parametrize("scheme", attention.SCHEMES)
def test_attention(pair, layout, scheme):
    cases = [(ids, True) for ids in context_worker.PACKS.values()] + [(context_worker.PACKS["uneven"], False)]
    found = pair.run(context_worker.run_all, cases, layout=layout, scheme=scheme, poison=True, timeout=120)
    for (ids, causal), results in zip(cases, zip(*found, strict=True), strict=True):
        attention.check(results, ids, causal=causal)
        attention.check_bytes(results)


@pytest.mark.parametrize("dim", [128, 256])
@pytest.mark.parametrize("scheme", ["home", "balanced", "heads"])
def test_attention_of_real_heads(pair, scheme, dim):
    ids = [1] * 300 + [2] * 40 + [0] * 7 + [3] * 450
    options = {"dtype": BF16, "heads": (8, 2), "dim": dim}
    results = pair.run(context_worker.run, ids, scheme=scheme, **options)
    attention.check(results, ids, **options)
    attention.check_bytes(results)


@pytest.mark.parametrize("layout", attention.LAYOUTS)
def test_gated_delta_rule(pair, layout):
    for ids in gdn_worker.PACKS.values():
        results = pair.run(gdn_worker.run, ids, layout=layout)
        test_context_gdn.check(results, ids)
        test_context_gdn.check_bytes(results)


def test_gated_delta_rule_of_real_heads(pair):
    """As exact as one GPU, of all draws together."""
    ids, drawn, draws = [1] * 150 + [2] * 500 + [0] * 5 + [3] * 61, {"heads": (2, 4), "dims": (128, 128)}, []
    docs = docs_from_ids(ids)
    for seed in range(6):
        mine, other = (found for found, *_ in pair.run(gdn_worker.run, ids, BF16, seed=seed, **drawn))
        assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))
        whole = gdn_worker.inputs(len(ids), BF16, seed=seed, **drawn)
        alone = test_context_gdn.gradients(one_gpu, [x.detach().cuda() for x in whole], docs, {})
        exact = test_context_gdn.gradients(reference, [x.detach().double() for x in whole], docs, {})
        draws.append([mine, [x.cpu() for x in alone], exact])
    for i, name in enumerate(test_context_gdn.NAMES):
        assert_as_good_as(*pool([[part[i] for part in draw] for draw in draws]), name=name)


def one_gpu(q, k, v, g, beta, docs):
    ids = torch.zeros(len(q), dtype=torch.int64)
    for n, (start, stop) in enumerate(docs):
        ids[start:stop] = n + 1
    return ops.gated_delta_rule(q, k, v, g, beta, doc_ids=ids)


@pytest.mark.parametrize("layout", attention.LAYOUTS)
def test_convolution(pair, layout):
    for ids in gdn_worker.PACKS.values():
        results = pair.run(test_context_conv.run, ids, layout=layout)
        test_context_conv.check(results, ids)


@pytest.mark.parametrize("skewed", [False, True], ids=["even", "skewed"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
def test_experts_over_ranks(pair, seed, dtype, skewed):
    results = pair.run(test_experts.over_ranks, 90, dtype, seed, skewed)
    test_experts.check_whole(results, 90, dtype, seed, skewed)


@pytest.mark.parametrize("name", cp_worker.MODELS)
def test_the_model_over_a_pack(pair, truth, plain, name):  # noqa: F811
    """By the error rule, as over ranks on the CPU; the twin is on the CPU too."""
    cases = [(name, seed, pack) for pack in cp_worker.PACKS for seed in SEEDS]
    results = pair.run(cp_worker.parts, cases, timeout=180)
    found = [trained(name, total([values for values, _ in ranks])) for ranks in zip(*results, strict=True)]
    naive, exact = ([trained(name, of(*case)) for case in cases] for of in (plain, truth))
    packs.compare(found, naive, exact, f"{name} on two GPUs")


def test_recomputation_changes_no_bit_and_moves_no_rows(pair):
    for planned, sent in pair.run(cp_worker.bits, "experts", "mixed", "clips", timeout=120):
        assert all(forward == planned and backward > 0 for forward, backward in sent)


def test_experts_keep_their_choice_under_recomputation(by_nccl):
    for layout in ((2, 1), (1, 2)):
        by_nccl.run(ep_worker.bits, layout, 2, "mixed", "clips", timeout=120)


def test_the_model_with_real_heads(pair):
    """Loss and gradients in bf16 over two ranks are as near to one rank's float32 as one rank's in bf16."""
    parts = pair.run(worker.real, BF16, "cp", timeout=120)
    alone, exact = (pair.run(worker.real, dtype, None, timeout=120)[0] for dtype in (BF16, F32))
    found = {key: sum(part[key].double() for part in parts).to(alone[key].dtype) for key in alone}
    packs.compare([found], [alone], [{key: x.double() for key, x in exact.items()}], "real heads")


@pytest.mark.parametrize("layout", [((2, 1), 2), ((1, 2), 2)], ids=["dp 2, ep 2", "cp 2, ep 2"])
def test_the_model_over_experts(by_nccl, truth, plain, layout):  # noqa: F811
    """Sharded by FSDP2, by the error rule."""
    chosen = ("text", "clips", "tiny", "padding")
    seeds = range(3)
    results = by_nccl.run(ep_worker.steps, seeds, *layout, chosen, label_count(chosen), timeout=180)
    naive, exact = ([of("experts", seed, *chosen) for seed in seeds] for of in (plain, truth))
    packs.compare([values for values, _ in results[0]], naive, exact, "experts on two GPUs")


def test_frames_over_ranks(pair):
    for differences in pair.run(worker.tower):
        assert max(differences) < 1e-5


@pytest.mark.parametrize("wire", [None, BF16], ids=["fp32", "bf16wire"])
def test_fsdp_hooks(by_nccl, wire):
    for scaling in ("mean", "sum"):
        by_nccl.run(fsdp.check_gradients, scaling, wire)


DIFFERENT = [
    "attention: dtype", "attention: fewer query heads", "plan: documents", "plan: no exchange", "delta rule: dims",
    "delta rule: beta", "convolution: width", "gather: width", "gather: dtype", "argument, no exchange",
]  # fmt: skip


def test_sums_through_windows(by_nccl):
    for same in by_nccl.run(worker.sums, [F32, BF16], [0, 1, 1000, 4099, (1 << 23) + 64, 50_000_001], timeout=120):
        assert same == [True] * 24


def test_long_messages(by_nccl):
    assert by_nccl.run(worker.long_messages, [1, 4097, 16 << 20, (100 << 20) + 3]) == [True, True]


@pytest.mark.parametrize("windows", ["0", "1"])
def test_rows_with_and_without_windows(windows, seed):
    pool = pool_of("nccl")
    try:
        pool.run(worker.use_windows, windows)
        assert pool.run(worker.rows_and_gradients, [F32, BF16], seed) == [[True] * 2] * 2
        assert pool.run(worker.has_windows) == [windows == "1"] * 2
    finally:
        pool.close()


def test_a_rank_that_differs_is_named_by_both(by_nccl):
    found = by_nccl.run(worker.outcomes, DIFFERENT, 1, timeout=240)
    wrong = [
        (name, rank, *answer)
        for name, answers in zip(DIFFERENT, zip(*found, strict=True), strict=True)
        for rank, answer in enumerate(answers)
        if not disagreements.good(disagreements.CASES[name].words, rank, 1, *answer)
    ]
    assert not wrong, "\n".join(str(each) for each in wrong)


def test_a_rank_that_raises_is_named(by_nccl):
    (peer, took), (own, _) = by_nccl.run(worker.dies, "raises", timeout=60, grace=40)
    assert peer == "RankFailure: rank 1 failed: ValueError: no more data" and took < 20
    assert own == "ValueError: no more data"


def test_a_rank_that_is_killed_is_named(by_nccl):
    with pytest.raises(RanksFailed) as failed:
        by_nccl.run(worker.dies, "killed", timeout=90, grace=40)
    assert failed.value.reports.keys() == {1} and "exit code -9" in failed.value.reports[1]
    text, took = failed.value.results[0]
    assert text == "RankFailure: rank 1 failed: stopped without a message (killed?)" and took < 30


def test_communicators(by_nccl):
    for words in by_nccl.run(worker.communicators):
        assert "there is no communicator" in words


def test_beside_torchs_own_communicators(by_nccl):
    assert min(by_nccl.run(worker.stress, 5.0, timeout=60)) > 16
