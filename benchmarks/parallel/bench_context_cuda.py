"""Attention and the gated delta rule over two GPUs beside one: python -m benchmarks.parallel.bench_context_cuda

Predicted before the first run (two H200s, bf16), speed over one GPU with the same kernels on the same pack. Attention,
64K, 32 heads over 2 of 256, one document: one GPU takes 96 and 400 ms. Balanced rows: 64 MiB of keys and values and
some 8,200 query rows of 16 KiB (and back) at 250 GB/s, 1.4 ms beside 49 ms forward: 1.90; backward with twice the bytes
beside 202 ms: 1.95. Rows that stay home: 1.33. The round-robin layout, all keys exchanged, 0.6 ms: 1.93. Heavy-tailed
documents: less work, so that the same bytes weigh more: 1.8 forward, 1.85 with backward. Gated delta rule, 128K in one
document, 16 heads over 64 of 128: with two ranks no document goes through one, so rank 1 waits for rank 0's state:
forward 1.0 at most (the recurrence is serial and rank 1 starts when rank 0 ends), less one exchange; backward 1.0
likewise; heavy-tailed the same, as some document straddles. Pipelining is not there.

Found (two H200s): attention of one document 1.93 forward and 1.91 backward with balanced rows, 1.99 and 1.98 in the
round-robin layout; heavy-tailed documents 1.60 and 1.74 (81 MiB sent beside 4.4 ms of work). Gated delta rule, one
document, 0.88 and 0.95: as predicted, one rank waits for the other; heavy-tailed 1.50 and 1.81.

Predicted for states and rows that are sent early and waited for late. Gated delta rule, one document: 1.0 ms of
preparing and 1.5 of the chain of chunks on rank 0, then the chain on rank 1, which has prepared: 4.25 of 5.1 ms, 1.20.
The chain takes as long for one head as for all 64, so that groups of heads would gain nothing. Backward: rank 1 makes
the gradient of its first state alone, 3.1 ms of a pass of 8.7, then both run a whole pass: 11.9 of 18.2 ms, 1.53.
Heavy-tailed: 1.95 and 1.95, nobody waits. Attention, heavy-tailed: rows at home are not copied any more, and all
but what goes home last travels under work: 1.82 and 1.88; one document with balanced rows 1.95 and 1.94.

Found: gated delta rule, one document, 1.26 and 1.46, heavy-tailed 1.59 and 1.87; attention, heavy-tailed, 1.87 and
1.79. One document with balanced rows fell to 1.38 and 1.59: what fits is that a rank that has nothing at home waits for
its keys behind all that was begun, query rows among it that the other rank takes only when its own half is done. So
halves are taken only where every rank has enough at home, and one document goes as before: that row is of the run
before.
"""

import numpy as np
import torch
import torch.distributed as dist

import automodel_c as amc
from automodel_c import Pack
from automodel_c.parallel import ContextParallel, Prices, wire
from benchmarks.parallel.pairs import main, seconds

PRICES = Prices({"bfloat16": 3.0e-14, "float32": 3.0e-13}, 5e-12, 4e-5, "predicted for two H200s")
WIDE = {"rounds": 7, "lead": 20_000_000}


def heavy_tailed(tokens):
    lengths, rng = [], np.random.default_rng(7)
    while sum(lengths) < tokens:
        lengths.append(int(min(rng.pareto(1.1) * 100 + 16, tokens // 2, tokens - sum(lengths))))
    return lengths


PACKS = {"one": lambda tokens: [tokens], "heavy-tailed": heavy_tailed}


def compared(function, alone, whole, cp, plan):
    """Times over two ranks and on one, forward and both passes; AssertionError where results differ by more than bf16
    does. function(local tensors), alone(whole tensors) -> out."""
    *inputs, dout = whole
    local = [cp.shard(x, plan).requires_grad_() for x in inputs]
    local_dout = cp.shard(dout, plan)
    wholes = [x.detach().requires_grad_() for x in inputs] if dist.get_rank() == 0 else None

    def forward():
        with torch.no_grad():
            function(*local)

    def both():
        return torch.autograd.grad(function(*local), local, local_dout)

    def one_forward():
        with torch.no_grad():
            alone(*wholes)

    def one_both():
        return torch.autograd.grad(alone(*wholes), wholes, dout)

    found = [cp.gather(x.detach(), plan) for x in (function(*local), *both())]
    before = wire.sent
    forward()
    sent = wire.sent - before
    if dist.get_rank() == 0:
        for a, b in zip(found, (alone(*wholes).detach(), *one_both()), strict=True):
            error = float((a.float() - b.float()).norm() / b.float().norm())
            assert error < 1e-2, f"relative error {error}"
    del found
    torch.cuda.empty_cache()
    times = seconds({"forward": forward, "both": both}, **WIDE)
    ones = seconds({"forward": one_forward, "both": one_both}, alone=True, **WIDE)
    return {
        **{f"{name}_ms": s * 1e3 for name, s in times.items()},
        **{f"one_{name}_ms": s * 1e3 for name, s in ones.items()},
        "forward_speedup": ones["forward"] / times["forward"], "both_speedup": ones["both"] / times["both"],
        "backward_speedup": (ones["both"] - ones["forward"]) / (times["both"] - times["forward"]),
        "sent_MiB": sent / 2**20,
    }  # fmt: skip


def randn(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def attention(name, layout, scheme, tokens=65_536):
    cp, lengths = ContextParallel(dist.group.WORLD), PACKS[name](tokens)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    plan = cp.plan(cu_seqlens=offsets, layout=layout, scheme=scheme, prices=PRICES)
    pack = Pack(cu_seqlens=offsets, device="cuda")
    torch.manual_seed(1)
    whole = [randn(tokens, n, 256) for n in (32, 2, 2, 32)]
    row = compared(
        lambda q, k, v: amc.parallel.attention(q, k, v, plan), lambda q, k, v: amc.ops.attention(q, k, v, pack=pack),
        whole, cp, plan,
    )  # fmt: skip
    return {"what": "attention 32/2 x 256, 64K", "pack": name, "layout": layout, "scheme": scheme, **row}


def delta_rule(name, tokens=131_072):
    cp, lengths = ContextParallel(dist.group.WORLD), PACKS[name](tokens)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    plan, pack = cp.plan(cu_seqlens=offsets), Pack(cu_seqlens=offsets, device="cuda")
    torch.manual_seed(1)
    gates = -torch.rand(tokens, 64, device="cuda") * 0.1
    whole = [randn(tokens, 16, 128), randn(tokens, 16, 128), randn(tokens, 64, 128), gates,
             torch.rand(tokens, 64, device="cuda").to(torch.bfloat16), randn(tokens, 64, 128)]  # fmt: skip
    row = compared(
        lambda *x: amc.parallel.gated_delta_rule(*x, plan), lambda *x: amc.ops.gated_delta_rule(*x, pack=pack)[0],
        whole, cp, plan,
    )  # fmt: skip
    return {"what": "gated delta rule 16/64 x 128, 128K", "pack": name, **row}


def rows():
    yield delta_rule("one")
    yield delta_rule("heavy-tailed")
    yield attention("heavy-tailed", "contiguous", "balanced")
    yield attention("heavy-tailed", "contiguous", "auto")
    yield attention("one", "contiguous", "balanced")
    yield attention("one", "round_robin", "home")


if __name__ == "__main__":
    main("context_cuda", rows)
