"""Rows copied and added by tables on a GPU: the bits of the CPU's."""

import pytest
import torch

from automodel_c import _amcore
from tests.cuda import device
from tests.ops.test_comm import in_rank_order
from tests.ops.test_exchange import ALL, MOVES, RUNS, copy_by, flat, flat_runs, random_moves, sum_by, values

pytestmark = pytest.mark.cuda

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
# elements of a row: words of every size, one to many a thread, none
WIDTHS = [0, 1, 3, 8, 15, 16, 24, 129, 1024, 3072, 5000]


def bits(x):
    return x.contiguous().view(torch.uint8).cpu()


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", ALL, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_copy(guarded, seed, dtype, width, reverse):
    x, out = values(10, width, dtype).cuda(), guarded((12, width), dtype, "cuda")
    want = out.cpu()
    _amcore.exchange_copy(want, x.cpu(), flat(MOVES, reverse), reverse=reverse, runs=False)
    copy_by(out, x, flat(MOVES, reverse), reverse)
    assert torch.equal(bits(out), bits(want))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("columns", [slice(0, 7), slice(1, 8), slice(0, 8), slice(2, 6)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, F32, torch.int64], ids=str)
def test_copy_of_runs_out_of_wider_rows(guarded, seed, dtype, columns, reverse):
    x, wide = values(30, 8, dtype).cuda()[:, columns], guarded((26, 8), dtype, "cuda")
    want = wide.cpu()
    _amcore.exchange_copy(want[:, columns], x.cpu(), flat_runs(RUNS, reverse), reverse=reverse, runs=True)
    copy_by(wide[:, columns], x, flat_runs(RUNS, reverse), reverse, runs=True)
    assert torch.equal(bits(wide), bits(want))


def test_copy_of_many_moves(guarded, seed, rng):
    for rows in (1, 255, 256, 257, 40_000):
        order = torch.from_numpy(rng.permutation(rows))
        moves = torch.stack([order, torch.arange(rows), torch.ones_like(order)], 1).flatten()
        x, out = torch.randn(rows, 3, 5, device="cuda"), guarded((rows, 3, 5), F32, "cuda")
        copy_by(out, x, moves)
        assert torch.equal(out, x[order.cuda()])


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [F32, BF16, F64], ids=str)
@pytest.mark.parametrize("reverse", [False, True])
def test_sum(guarded, seed, rng, dtype, width, reverse):
    x, own = (torch.randn(n, width).to(dtype) for n in (29, 23))
    lists = flat(random_moves(rng, 9, 29, 40), reverse), flat(random_moves(rng, 3, 23, 40), reverse)
    want, out = torch.empty(40, width, dtype=dtype), guarded((40, width), dtype, "cuda")
    _amcore.exchange_sum(want, x, own, *lists, own_after=4, reverse=reverse, runs=False)
    sum_by(out, x.cuda(), own.cuda(), *lists, 4, reverse)
    assert torch.equal(bits(out), bits(want))


@pytest.mark.parametrize("columns", [slice(0, 32), slice(1, 33), slice(0, 33)], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16, F64], ids=str)
def test_sum_of_runs_out_of_wider_rows(guarded, seed, dtype, columns):
    x, own = (torch.randn(n, 40).to(dtype) for n in (200, 90))
    moves = [(4, 3, 2, 20, 9, 4), (0, 0, 5, 7, 5, 10), (11, 70, 9, 1, 0, 0), (2, 15, 3, 4, 0, 16)]
    lists = flat_runs(moves), flat_runs([(1, 1, 3, 9, 7, 8), (80, 60, 4, 2, 1, 5)])
    want, out = guarded((90, 40), dtype), guarded((90, 40), dtype, "cuda")
    sources = x[:, columns], own[:, columns]
    _amcore.exchange_sum(want[:, columns], *sources, *lists, own_after=2, reverse=False, runs=True)
    sum_by(out[:, columns], x.cuda()[:, columns], own.cuda()[:, columns], *lists, 2, runs=True)
    assert torch.equal(bits(out), bits(want))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_sum_of_odd_numbers(guarded, dtype):
    odd = [float("inf"), float("-inf"), float("nan"), 1e-40, -1e-40, -0.0, 0.0, 3e38, 1 + 2**-8, 1 + 3 * 2**-8, 1.0]
    x = torch.tensor([[a, b] for a in odd for b in odd]).T.contiguous().to(dtype)
    for moves in ([0, 0, 1], [0, 0, 1, 1, 0, 1]):
        want, out = torch.empty(1, x.shape[1], dtype=dtype), guarded((1, x.shape[1]), dtype, "cuda")
        _amcore.exchange_sum(want, x, x[:0], moves, [], own_after=0, reverse=False, runs=False)
        sum_by(out, x.cuda(), x[:0].cuda(), moves, [], 0)
        assert device.same_bits([out.cpu()], [want])
        real = ~want.isnan()
        assert torch.equal(bits(out.cpu()[real]), bits(want[real])), "zeros keep their sign"


def mover(n, rng, rows=700):
    """run(x, own): a copy and a sum, by tables that are on the device."""
    moves = torch.tensor(flat(random_moves(rng, n, rows, rows)))
    sizes = {"rows_x": rows, "rows_out": rows, "reverse": False, "runs": False}
    table = _amcore.exchange_table(torch.tensor([5, 0, rows - 5]), **sizes)
    index = _amcore.exchange_index(moves, torch.tensor([0, 1, 9]), own_after=n // 2, rows_own=rows, **sizes)
    rows_of_table, table, index = int(table[-1, 0]), torch.from_numpy(table).cuda(), torch.from_numpy(index).cuda()

    def run(x, own):
        copied, added = torch.zeros_like(x), torch.empty_like(x)
        _amcore.exchange_copy_by(copied, x, table, rows=rows_of_table)
        _amcore.exchange_sum_by(added, x, own, index)
        return [copied, added]

    return run


def drawn(rows=700):
    return [torch.randn(rows, 96, device="cuda") for _ in range(2)]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_the_current_stream_no_wait_and_capture(seed, rng, plain_memory):
    run = mover(8, rng)
    device.assert_goes_to_the_current_stream(run, drawn())
    device.assert_does_not_wait(run, drawn())
    device.assert_can_be_captured(run, drawn(), drawn())


def test_numbers_out_of_reach_are_left_out(guarded):
    out, x = torch.zeros(3, 2, device="cuda"), torch.ones(3, 2, device="cuda")
    far = [[0, -1, 0, 1, 1, 0, 0], [1, 0, 3, 1, 1, 0, 0], [2, 0, 0, 0, 0, 0, 0]]
    _amcore.exchange_copy_by(out, x, torch.tensor(far).cuda(), rows=2)
    assert not out.any()
    _amcore.exchange_sum_by(out, x, x, torch.tensor([4, 5, 6, 90, 3, -4, 0]).cuda())
    assert out.tolist() == [[0, 0], [0, 0], [1, 1]]


def test_more_than_2_to_the_31_elements(rng):
    """Rows past the 32-bit mark."""
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of free GPU memory")
    rows, width = (1 << 31) // 3072 + 1000, 3072
    x = torch.empty(rows, width, dtype=BF16, device="cuda")
    x[-5:] = torch.randn(5, width, device="cuda").to(BF16)
    out = torch.zeros(rows, width, dtype=BF16, device="cuda")
    copy_by(out, x, [rows - 5, rows - 3, 3])
    assert torch.equal(out[-3:], x[-5:-2]) and not out[-4].any()
    made = torch.empty(2, width, dtype=BF16, device="cuda")
    sum_by(made, x, x[:0], [rows - 5, 0, 2, rows - 2, 1, 1], [], 0)
    assert torch.equal(made[1], (x[-4].float() + x[-2].float()).to(BF16))


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("n", [0, 1, 15, 256, 4096, 16_385])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("out_dtype", [F32, BF16], ids=str)
def test_reduce_parts(guarded, seed, dtype, out_dtype, ranks, n):
    parts, out = torch.randn(ranks, n).to(dtype), guarded(n, out_dtype, "cuda")
    _amcore.comm_reduce_parts(out, parts.cuda(), scale=1 / ranks)
    assert torch.equal(out.cpu(), in_rank_order(parts, 1 / ranks, out_dtype))


def test_reduce_parts_that_start_anywhere(guarded, seed):
    parts = torch.randn(3, 520)
    for begin, end in ((0, 520), (1, 520), (4, 516), (3, 11)):
        out = guarded(600, F32, "cuda")[begin:end]
        _amcore.comm_reduce_parts(out, parts.cuda()[:, begin:end], scale=0.3)
        assert torch.equal(out.cpu(), in_rank_order(parts[:, begin:end], 0.3, F32))
