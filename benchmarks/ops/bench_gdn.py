"""The gated delta rule, forward and backward, beside transformers' fallback: python -m benchmarks.ops.bench_gdn.

One document of 2,048 tokens with 8 key and 8 value heads of 128; the same tokens as a pack of eight uneven documents;
and 200 documents of 5 to 40 tokens with 4 heads, 16 x 32. A chunk of 64 tokens and a head of 128 x 128 costs 8.4 MFLOP
forward (three products with the state at 2.1, four triangles and a solve at 0.5) and 22.8 backward, of which 5.2
compute states and V' again: 8.0 GFLOP for the first case.

Bar, two threads: 25 times faster than transformers' fallback on the one document (3.3 s in the table of peers).

What was expected, written before the first run: blocks of 12 x 32 keep 60 % of a 175 GFLOP/s core, as in attention, so
80 ms of CPU time on one thread, 40 to 60 ms on two.

What came, in CPU time on one thread of a busy Sapphire Rapids class core: 97 to 152 ms for the one document in fp32
(8.0 GFLOP at 50 to 80 GFLOP/s), 100 ms in bf16, 97 ms with 2 key heads, 106 ms for the pack, 15 ms for the tiny
documents. The bar's ratio is missed: once its first call is past, the fallback takes 725 to 970 ms on one thread,
6 to 9 times ours; for the tiny documents it takes 66 to 72 times ours.

On a Zen 4 core, one thread, CPU time: ours 127 ms, the fallback 650 to 760 ms, 790 in its first call. A loop of fused
multiply-adds makes 116 GFLOP/s there and torch's product of 1,024 x 1,024 matrices 85, so the floor of 8.0 GFLOP is 69
ms and ours is at 54 % of it. 25 times would be 30 ms: less than half the floor, so that no kernel of this algorithm
gets there against a fallback that runs undisturbed. On two quiet cores: 67 ms against 274, 4.1 times.

When the fallback takes seconds, CPU time of forward and backward in one process, one thread unless told: gates uniform
538 ms, all 0 533, all -90 583, from 0 to -90 502, as FlashQLA publishes them 577: nothing is slow about denormals;
deterministic algorithms 574; the sum's gradient 459; anomaly mode 1,276; transformers' way for exports, the inverse by
forward substitution, 521 (forward alone 101, by the triangular solver 161). On two cores that others use too: 4 threads
589, 8 threads 690, 16 threads 940, but 2 threads 4,705, and 13 s on the clock. Only as many threads as cores does it:
with more, OpenMP's idle threads sleep at once; with as many they spin, each of the fallback's hundreds of loops waits
for a thread that has no core, and the spinning takes the core from somebody else. So the 3.3 s are the default number
of threads beside another process that computes, a second rank say. `one-fp32-shared` is that case, the others the quiet
one. Ours is two parallel loops, one forward and one backward: 476 ms on the clock against 35.6 s in the same rounds, 75
times, at load 12. The token-by-token fallback takes 119 s of CPU time.

Tried, not taken up: chunks of 32 tokens (forward 29.6 to 26.2 ms, with backward 127 to 120); with blocks of 8 rows in
place of two of 4 besides (26 and 121); states kept every 256 tokens (123, for four times their memory).
"""

import contextlib
import dataclasses
import itertools
import subprocess
import sys

import numpy as np
import torch

import automodel_c as amc
from automodel_c.reference.gdn import closed_form
from benchmarks.harness import Case, main
from benchmarks.ops.gates import forward_backward
from benchmarks.peers import Peer, needs_module, version_of
from tests.numerics import assert_as_good_as

NAMES = ("o", "dq", "dk", "dv", "dg", "dbeta")


def fallback(q, k, v, g, beta, docs):
    """transformers' torch_chunk_gated_delta_rule, document by document."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    pieces = [
        torch_chunk_gated_delta_rule(*(x[a:b][None] for x in (q, k, v, g, beta)), use_qk_l2norm_in_kernel=True)[0][0]
        for a, b in docs
    ]
    return torch.cat(pieces)


def gate_of(inputs, upstream, docs):
    """The error rule: truth is the closed form in float64, the fallback the twin."""
    wide = [x.double() for x in inputs]

    def gate(outcomes):
        truth = forward_backward(lambda *x: closed_form(*x, docs), wide, [upstream.double()])()
        rows = zip(NAMES, outcomes["ours"], outcomes["transformers"], truth, strict=True)
        return {name: assert_as_good_as(x, plain, true, name=name) for name, x, plain, true in rows}

    return gate


def cases(lengths, heads, dims, dtype):
    torch.manual_seed(0)
    (hk, hv), (dk, dv), tokens = heads, dims, sum(lengths)
    docs = list(itertools.pairwise(np.cumsum([0, *lengths]).tolist()))
    inputs = [torch.randn(tokens, h, d).to(dtype) for h, d in ((hk, dk), (hk, dk), (hv, dv))]
    inputs += [-torch.rand(tokens, hv), torch.rand(tokens, hv).to(dtype)]
    upstream = torch.randn(tokens, hv, dv).to(dtype)
    pack = amc.Pack(cu_seqlens=[0, *(end for _, end in docs)])
    yield Case(
        op="gated_delta_rule",
        direction="fwd+bwd",
        shape=f"{tokens} tokens {len(docs)} docs h{hk}/{hv} d{dk}x{dv}",
        dtype=str(dtype).removeprefix("torch."),
        ours=forward_backward(lambda *x: amc.ops.gated_delta_rule(*x, pack=pack)[0], inputs, [upstream]),
        gate=gate_of(inputs, upstream, docs),
        inputs=inputs,
        peers=[
            Peer(
                "transformers",
                version_of("transformers"),
                lambda given: forward_backward(lambda *x: fallback(*x, docs), given, [upstream]),
                needs_module("transformers"),
            )
        ],
    )


@contextlib.contextmanager
def neighbour():
    """Another process that computes on every core: what a second rank or a colleague is."""
    code = "import torch\na = torch.randn(512, 512)\nwhile True: a @ a"
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def beside_a_neighbour(*arguments):
    with neighbour():
        for case in cases(*arguments):
            yield dataclasses.replace(case, shape=f"{case.shape}, cores shared")


ONE, PACK = [2048], [901, 17, 512, 300, 1, 200, 100, 17]
TINY = np.random.default_rng(0).integers(5, 41, 200).tolist()
CASES = {
    "one-fp32": lambda: cases(ONE, (8, 8), (128, 128), torch.float32),
    "one-fp32-shared": lambda: beside_a_neighbour(ONE, (8, 8), (128, 128), torch.float32),
    "one-bf16": lambda: cases(ONE, (8, 8), (128, 128), torch.bfloat16),
    "pack-fp32": lambda: cases(PACK, (8, 8), (128, 128), torch.float32),
    "groups-fp32": lambda: cases(ONE, (2, 8), (128, 128), torch.float32),
    "tiny-fp32": lambda: cases(TINY, (4, 4), (16, 32), torch.float32),
}

if __name__ == "__main__":
    main("gdn", CASES, budget_s=5)
