"""A layer's split products over two GPUs, rows on their way meanwhile: python -m benchmarks.parallel.bench_async_tp

The 27B's sizes (hidden 5120, width 17408, 24 query and 4 key heads of 256), tp 2, bf16, forward and backward. An MLP is
models.qwen3_5.layers.MLP; attention is its products without the core, which is the same in all. Three ways: `pieces`,
compiled with Inductor's micro-pipeline over symmetric memory (distributed.enable_async_tensor_parallel); `compiled`,
the same without it; `eager`, which is the default: NCCL, and sums in float32. NVLink multicast stays as the machine
has it: off.

Predicted before the first run. A rank's MLP of T rows does 18 * T * 5120 * 8704 FLOPs forward and backward and sends
two gathers and two sums of T/2 rows of 10 KiB each way: at T = 16384, 13.1 TFLOP, 20 ms at 660 TFLOP/s, and 4 * 84 MB,
1.2 ms at 280 GB/s. Hiding all of it gains 6 % at most; attention does 6 * T * 5120 * 10240 (q with its gate, k, v, o
of one rank: 6144 + 1024 + 3072), 5.2 TFLOP, 7.8 ms beside the same 1.2 ms: 15 %. Pieces of half the rows cost the
products 1 to 3 %, and eager's float32 sum 0.1 ms: pieces 1.02 of compiled for the MLP, 1.08 for attention; eager 0.98
of compiled. At T = 4096 launches of pieces show: pieces no faster.
"""

import functools

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from automodel_c import ops
from automodel_c.models.qwen3_5.layers import MLP
from automodel_c.parallel import TensorParallel, tensor
from benchmarks.parallel.pairs import main, seconds

HIDDEN, WIDTH, HEADS, KEY_HEADS, DIM = 5120, 17408, 24, 4, 256
ROWS = (4096, 16384)
WAYS = ("pieces", "compiled", "eager")
BF16 = torch.bfloat16


def drawn(seed, *shape):
    """The same on both ranks."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.float32)


def weights_of(what):
    """Whole weights [made, taken], the last of which ranks split by its columns."""
    if what == "mlp":
        shapes = ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
    else:
        query, key = HEADS * DIM, KEY_HEADS * DIM
        shapes = ((2 * query, HIDDEN), (key, HIDDEN), (key, HIDDEN), (HIDDEN, query))
    return [drawn(i, *shape) / shape[1] ** 0.5 for i, shape in enumerate(shapes)]


def mlp(x, weights, tp, asynchronous):
    module = MLP.__new__(MLP)
    torch.nn.Module.__init__(module)
    module.tp, module.asynchronous = tp, asynchronous
    for name, weight in zip(("gate_proj", "up_proj", "down_proj"), weights, strict=True):
        linear = torch.nn.Module()
        linear.weight = weight
        setattr(module, name, linear)
    return module(x)


def attention(x, weights, tp, asynchronous):
    q, k, v = tp.products(x, weights[:3], asynchronous)
    q, gate = q.unflatten(-1, (-1, 2 * DIM)).chunk(2, dim=-1)
    groups = q.shape[1] * DIM // k.shape[-1]
    core = q + (k + v).unflatten(-1, (-1, DIM)).repeat_interleave(groups, 1)  # in the core's place
    return tp.product(ops.sigmoid_gate(core, gate).flatten(1), weights[3], asynchronous)


BLOCKS = {"mlp": mlp, "attention": attention}


@functools.cache
def without_pieces(function):
    return torch.compile(function, options={"_micro_pipeline_tp": False}, dynamic=False)


@functools.cache
def in_pieces(function):
    return torch.compile(function, options={"_micro_pipeline_tp": True}, dynamic=False)


def step(what, way, x, weights, dout, tp):
    """Outputs and gradients."""
    tensor.compiled = without_pieces if way == "compiled" else in_pieces
    leaves = [x, *weights]
    for leaf in leaves:
        leaf.grad = None
    out = BLOCKS[what](x, weights, tp, way in WAYS[:2])
    out.backward(dout)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def error(found, exact):
    return float((found.float() - exact.float()).norm() / exact.float().norm())


def gated(what, rows, tp, own, whole):
    """Errors of all ways beside one GPU's bf16, against its float32: at most twice as large. {way: the largest}."""
    exact = step(what, "eager", *whole(torch.float32), TensorParallel())
    plain = step(what, "eager", *whole(BF16), TensorParallel())
    dims = [0, 0, *[0] * (len(exact) - 3), 1]
    exact, plain = ([tp.own(v, dim) for v, dim in zip(of, dims, strict=True)] for of in (exact, plain))
    limits, worst = [2 * error(p, e) for p, e in zip(plain, exact, strict=True)], {}
    del plain
    for way in WAYS:
        errors = [error(f, e) for f, e in zip(step(what, way, *own, tp), exact, strict=True)]
        assert all(e <= limit for e, limit in zip(errors, limits, strict=True)), (what, rows, way, errors, limits)
        worst[way] = max(e / limit for e, limit in zip(errors, limits, strict=True))
    return worst


def fused(what, own, tp):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(what, "pieces", *own, tp)
    return sum(event.count for event in profile.key_averages() if event.key.startswith("fused_"))


def rows_of(what, rows, tp):
    weights, x, dout = weights_of(what), drawn(8, rows, HIDDEN), drawn(9, rows, HIDDEN) / rows

    def whole(dtype):
        cast = [v.to(dtype, copy=True) for v in (x, dout, *weights)]
        return cast[0].requires_grad_(), [w.requires_grad_() for w in cast[2:]], cast[1]

    parts = [*(tp.own(w) for w in weights[:-1]), tp.own(weights[-1], 1)]
    ours, *parts, up = (v.to(BF16).contiguous() for v in (tp.own(x), *parts, tp.own(dout)))
    own = ours.requires_grad_(), [w.requires_grad_() for w in parts], up
    worst, count = gated(what, rows, tp, own, whole), fused(what, own, tp)
    assert count == 4, f"{what}: {count} collectives are fused, 4 are needed"
    found = seconds({way: lambda way=way: step(what, way, *own, tp) for way in WAYS}, rounds=12)
    return {"what": f"{what}, forward and backward", "rows": rows, **{f"{w}_ms": s * 1e3 for w, s in found.items()},
            "compiled_by_pieces": found["compiled"] / found["pieces"], "eager_by_pieces": found["eager"]
            / found["pieces"], "eager_by_compiled": found["eager"] / found["compiled"], "fused": count,
            **{f"{way}_of_limit": of for way, of in worst.items()}}  # fmt: skip


def rows():
    tp = TensorParallel(init_device_mesh("cuda", (2,), mesh_dim_names=("tp",))["tp"])
    tp.send_in_pieces()
    assert dist.get_world_size() == 2
    for count in reversed(ROWS):
        for what in BLOCKS:
            yield rows_of(what, count, tp)


if __name__ == "__main__":
    main("async_tp", rows)
