"""Packed attention on one GPU beside FlashAttention-3 and cuDNN: python -m benchmarks.ops.bench_attention_cuda.

bf16, causal but for frames. A time is the median of CUDA events over rounds that run ours, the peers and ours again in
random order; inputs are larger than L2. The work counted is 4 area Hq D forward and 2.5 times that backward, area = sum
of L (L + 1) / 2, of L L for frames; the floor is that at 790 TFLOP/s, what a large matrix product reaches on an H200.

The gate before any time: `ours` on sampled tokens by the error rule against float64, a peer within 5 % of it.

Written before the first run of the Hopper kernel: 0.95 times FA3, whose tiles are the same size, lost at the edges of
tiles. What came at head dim 256 on one H200, FA3's time over ours; the card's power limits both:
  first version                               0.95 to 1.0; tensor cores busy 84 % of the cycles (Nsight Compute)
  descriptors in uniform registers            1.0; busy 92 %: the products follow one another without a gap
  no turns between the two warpgroups         1.02 from 1.0
  one key head after the other                1.01 on 32K (the keys of one head fit in L2), nothing elsewhere
  four chains of maxima and sums for two      nothing at 256; at head dim 128 0.945 to 0.97, with 176 keys a block for
                                              128; turns lost there too (602 and 631 TFLOP/s on 32K)
Head dims 64, 72 and 128 have a kernel of their own, attention_fwd_stream_sm90.cuh: three warpgroups at products hide
what the elements wait for. Head dim 128: 1.05 of FA3 on 8K and 32K, 1.16 on uneven documents, from 0.97, 0.97 and 1.01
in the same run; head dim 64: 1.20 of cuDNN on 8K, from 0.91. 128K at head dim 256, whose keys fit in no L2, is a draw.
The plain kernels run in float32 without tensor cores: 0.01 of a peer.

Head dim 72, frames of the vision tower, not causal: 80 columns in scores, 72 in P V, of 128 in shared memory. Forward
377 TFLOP/s on frames of 1,024 tokens, 526 on 4,096, 497 on 256 to 4,096, from 329, 385 and 377 in the same run: 1.69,
1.43 and 1.83 of the faster of SDPA and varlen; frames of 256, which tiles of 192 rows do not fill, run in tiles of 128:
208, 1.39. Backward, attention_bwd_narrow_sm90.cuh, 93 on 256, 214 on 1,024, 305 on 4,096 and 279: 1.05, 1.42, 1.24 and
1.60; head dim 64 275, 0.69 of cuDNN.

The backward pass on Hopper, predicted at 0.84 of FA3 on 8K (seven products where FA3 has five, each at 0.7 of the
rate); the same bits every time, which FA3's are not. TFLOP/s at head dim 256 on 8K, 32K, and the hundred documents:
  two passes, a product issued when the last is done     314, 412, 277
  the next product issued behind the last                301, 396, 269; kept, since it needs no more registers
  a block takes its next tile late, not with this one    445, 435, 304 (the longest tile no longer has a second one;
                                                         the forward pass gained 1 to 5 % by it)
  dk and dv by three stages of 48 rows, not two of 64    416, 429, 290: the copies' latency was not what it waits for
  two key tiles in a cluster, rows sent to both at once  348, 362, 237: a tile waited for the other's stores too; 480,
                                                         448, 320 with arrivals that order none, 483, 444, 337 without
                                                         pairs in the same run; 447 for 426 on 128K: kept where
                                                         many rows see a key (`pairs_pay`)
dq runs at 790 TFLOP/s on 8K, dk and dv at 525 to 550: that pass is the one to change. Keeping K's and V's columns as
left operands in registers would take 28 of 288 KiB off shared memory; beyond 16 of 256 columns the 232 registers spill,
and so they do with P handed over in 16 bits: compiled, not timed.

What bounds a backward pass at head dim 256 is shared memory, counted in KiB for 64 keys and 64 rows at 128 bytes a
cycle: FA3 (80 keys, dQ by way of shared memory) 515, 4,120 cycles beside 2,560 of its five products; these two passes
288 + 192, 3,840 beside 3,584. Tried for `deterministic=False` and not delivered, five products over a pair of key tiles
that swap dS through distributed shared memory, dQ of 128 keys reduced on chip and added to memory in 16-byte
reductions (8 bytes a score): counted 328, 2,624 cycles, predicted 1.2 to 1.35 of FA3. Its one run gave no number: the
gate, of 64 tokens first, did not return in 8 seconds. By reading: 32 and 240 registers a warpgroup are more than the
168 a thread that a block of 384 starts with, so the last `setmaxnreg` waits for ever. As compiled, with 40 and 232 its
products run one at a time, with 24 and 240 the loading roles spill 12 bytes. The same with its sums in the order of the
tiles, to repeat, is compiled alone. FA3 itself says "Deterministic backward not supported for hdim 256". Beside it in
that run, other work on the device, FA3 below what it can (results/h200/attention_bwd_variants.json), TFLOP/s on 8K,
32K, the hundred and 4 of 8K: two passes 462, 463, 337, 444; FA3 412, 446, 194, 389.
"""

import argparse
import itertools
import random
import sys
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from automodel_c import Pack, _amcore
from automodel_c.ops.attention import attention
from benchmarks.harness import in_words, statistics_of, write_gpu_rows
from benchmarks.peers import version_of
from tests.numerics import assert_as_good_as

FLOPS = 790e12
HEAD_START = 1_000_000  # cycles that the device waits before a sample, so that the host is ahead of it
SAMPLED = 24  # tokens that the gate looks at
JSON = Path(__file__).parents[1] / "results/h200/attention.json"


def heavy_tailed(total, seed=0):
    """Lengths of a pack: many short documents, a few that make most of the tokens."""
    rng, lengths = random.Random(seed), []
    while total > 0:
        lengths.append(min(total, max(64, int(rng.lognormvariate(6.2, 1.3)))))
        total -= lengths[-1]
    return lengths


HUNDRED = [64 + 37 * i * i % 937 for i in range(100)]
SHAPES = {  # name: lengths, query heads, key heads, head dim, passes
    "8K": ([8192], 32, 2, 256, ("fwd", "bwd")),
    "32K": ([32768], 32, 2, 256, ("fwd", "bwd")),
    "128K": ([131072], 32, 2, 256, ("fwd", "bwd")),
    "4x8K": ([8192] * 4, 32, 2, 256, ("fwd", "bwd")),
    "32K-heavy": (heavy_tailed(32768), 32, 2, 256, ("fwd", "bwd")),
    "hundred": (HUNDRED, 32, 2, 256, ("fwd", "bwd")),
    "8K-d128": ([8192], 32, 8, 128, ("fwd", "bwd")),
    "32K-d128": ([32768], 32, 8, 128, ("fwd", "bwd")),
    "32K-heavy-d128": (heavy_tailed(32768), 32, 8, 128, ("fwd", "bwd")),
    "8K-d64": ([8192], 32, 8, 64, ("fwd", "bwd")),
    "frames-256-d72": ([256] * 64, 16, 16, 72, ("fwd", "bwd")),
    "frames-d72": ([1024] * 16, 16, 16, 72, ("fwd", "bwd")),
    "frames-4K-d72": ([4096] * 4, 16, 16, 72, ("fwd", "bwd")),
    "frames-uneven-d72": ([256, 4096, 576, 1024, 2304, 256, 1024, 3136, 400, 2048], 16, 16, 72, ("fwd", "bwd")),
}


class Inputs:
    """Random tensors of one shape and their documents."""

    def __init__(self, lengths, heads, key_heads, dim, backward):
        self.causal = dim != 72  # the vision tower's, a frame a document
        shapes = (heads, key_heads, key_heads)
        made = [torch.randn(sum(lengths), n, dim, device="cuda", dtype=torch.bfloat16) for n in shapes]
        self.q, self.k, self.v = (x.requires_grad_(backward) for x in made)
        self.lengths, self.ends = lengths, list(itertools.accumulate(lengths))
        self.pack = Pack(cu_seqlens=[0, *self.ends], device="cuda")
        self.cu = torch.tensor([0, *self.ends], dtype=torch.int32, device="cuda")
        self.flops = 4 * heads * dim * sum(n * (n + 1) / 2 if self.causal else n * n for n in lengths)


def ours(x):
    return attention(x.q, x.k, x.v, pack=x.pack, causal=x.causal)


def fa3(x):
    from flash_attn_interface import flash_attn_varlen_func

    longest = max(x.lengths)
    made = flash_attn_varlen_func(x.q, x.k, x.v, x.cu, x.cu, longest, longest, causal=True)
    return made[0] if isinstance(made, tuple) else made


def sdpa(x):
    """torch's, frame by frame, in the way that it chooses."""
    parts = []
    for start, end in itertools.pairwise([0, *x.ends]):
        q, k, v = (t[None, start:end].transpose(1, 2) for t in (x.q, x.k, x.v))
        parts.append(torch.nn.functional.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1))
    return torch.cat(parts)


def varlen(x):
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn(x.q, x.k, x.v, x.cu, x.cu, max(x.lengths), max(x.lengths))


def cudnn(x):
    batch = len(x.lengths)
    q, k, v = (t.view(batch, -1, *t.shape[1:]).transpose(1, 2) for t in (x.q, x.k, x.v))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        made = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=x.causal, enable_gqa=True)
    return made.transpose(1, 2).flatten(0, 1)


def peers_of(x):
    """{name: (version, function)} and the reasons for those that are missing."""
    found, missing = {}, {}
    if not x.causal:
        found["sdpa"], found["varlen"] = (version_of("torch"), sdpa), (version_of("torch"), varlen)
    try:
        import flash_attn_interface  # noqa: F401
    except ImportError as error:
        missing["fa3"] = str(error)
    else:
        if x.causal:
            found["fa3"] = (version_of("flash_attn_3") or version_of("flash-attn-3"), fa3)
        else:
            missing["fa3"] = "built for other head dims"
    if len(set(x.lengths)) == 1:
        found["cudnn"] = (str(torch.backends.cudnn.version()), cudnn)
    else:
        missing["cudnn"] = "documents of different lengths"
    return found, missing


def sampled_rows(x):
    """Tokens spread over the pack, the first and the last of some documents among them."""
    rows = {0, x.ends[0] - 1, x.ends[-1] - 1, *random.Random(0).sample(range(x.ends[-1]), SAMPLED)}
    return sorted(rows)


def by_formula(x, rows, dtype):
    """out [rows, Hq, D]: products in `dtype`, softmax in at least float32, as the eager model has it."""
    results = []
    group = x.q.shape[1] // x.k.shape[1]
    for t in rows:
        start, end = max([0, *(end for end in x.ends if end <= t)]), min(end for end in x.ends if end > t)
        k, v = (y.detach()[start : t + 1 if x.causal else end].to(dtype).transpose(0, 1) for y in (x.k, x.v))
        q = x.q.detach()[t].to(dtype).view(-1, group, x.q.shape[2])
        scores = torch.matmul(q, k.transpose(1, 2)) * x.q.shape[2] ** -0.5
        weights = torch.softmax(scores, -1, dtype=max(dtype, torch.float32, key=lambda d: d.itemsize)).to(dtype)
        results.append(torch.matmul(weights, v).reshape(x.q.shape[1:]))
    return torch.stack(results)


def gate(x, calls):
    """AssertionError for a wrong result; the numbers of the error rule."""
    rows = sampled_rows(x)
    truth, naive = by_formula(x, rows, torch.float64), by_formula(x, rows, torch.bfloat16)
    for name, call in calls.items():
        made = call().detach()[rows]
        if name == "ours":
            numbers = assert_as_good_as(made, naive, truth, name="out")
        assert (made - truth).norm() <= 0.05 * truth.norm(), f"{name} computes something else"
    return numbers


def gate_backward(x, calls):
    """The gradients: a small pack with the same heads by the error rule, and at full size ours beside every peer."""
    heads, dim = x.q.shape[1], x.q.shape[2]
    small = Inputs([700, 1, 330], heads, x.k.shape[1], dim, False)
    dout = torch.randn_like(small.q)
    wide = [t.double() for t in (small.q, small.k, small.v, dout)]
    made = gradients(
        lambda q, k, v: attention(q, k, v, pack=small.pack, causal=x.causal), small.q, small.k, small.v, dout
    )
    naive, truth = (gradients(eager_of(small), *t) for t in ((small.q, small.k, small.v, dout), wide))
    numbers = {n: assert_as_good_as(*t, name=n) for n, *t in zip(("dq", "dk", "dv"), made, naive, truth, strict=True)}
    dout, whole = torch.randn_like(x.q), {}
    for name, call in calls.items():
        whole[name] = torch.autograd.grad(call(), (x.q, x.k, x.v), dout)
    for name, found in whole.items():
        for a, b in zip(found, whole["ours"], strict=True):
            assert (a.float() - b.float()).norm() <= 0.02 * b.float().norm(), f"{name} has other gradients"
    return numbers


def gradients(function, *inputs):
    q, k, v = (t.detach().requires_grad_() for t in inputs[:3])
    return torch.autograd.grad(function(q, k, v), (q, k, v), inputs[3])


def eager_of(x):
    """Attention of a small pack document by document, products in the inputs' dtype, softmax in at least float32."""

    def function(q, k, v):
        group, parts = q.shape[1] // k.shape[1], []
        for start, end in itertools.pairwise([0, *x.ends]):
            q1, k1, v1 = (t[start:end].transpose(0, 1) for t in (q, k, v))
            k1, v1 = (t.repeat_interleave(group, 0) for t in (k1, v1))
            hidden = torch.ones(end - start, end - start, dtype=torch.bool, device=q.device).triu(1)
            scores = q1 @ k1.transpose(1, 2) * q.shape[2] ** -0.5
            scores = scores.masked_fill(hidden, float("-inf")) if x.causal else scores
            wide = max(q.dtype, torch.float32, key=lambda d: d.itemsize)
            parts.append((torch.softmax(scores, -1, dtype=wide).to(q.dtype) @ v1).transpose(0, 1))
        return torch.cat(parts)

    return function


def sample(call, head_start=HEAD_START):
    """Seconds of a call on the device."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(head_start)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3


def measure(calls, most=31, head_start=HEAD_START):
    """{name: seconds in each round}, 'self' being ours once more."""
    calls = {**calls, "self": calls["ours"]}
    once = max(sample(call, head_start) for call in calls.values() for _ in range(2))
    rounds = max(5, min(most, int(2.5 / once / len(calls))))
    times, order = {name: [] for name in calls}, list(calls)
    for _ in range(rounds):
        random.shuffle(order)
        for name in order:
            calls[name]()
            times[name].append(sample(calls[name], head_start))
    return times


def backward_of(call):
    """The backward pass alone: its graph is kept."""
    out = call()
    dout = torch.randn_like(out)
    return lambda: out.backward(dout, retain_graph=True)


def row(name, direction):
    """One row of the table, printed and returned."""
    lengths, heads, key_heads, dim, _ = SHAPES[name]
    x = Inputs(lengths, heads, key_heads, dim, direction == "bwd")
    found, missing = peers_of(x)
    calls = {"ours": lambda: ours(x), **{key: lambda f=f: f(x) for key, (_, f) in found.items()}}
    numbers = gate_backward(x, calls) if direction == "bwd" else gate(x, calls)
    kernels = _amcore.attention_row(
        x.q.detach(),
        x.k.detach(),
        x.v.detach(),
        x.pack.docs.ravel().tolist(),
        causal=x.causal,
        backward=direction == "bwd",
    )
    flops = x.flops * (2.5 if direction == "bwd" else 1.0)
    if direction == "bwd":
        calls = {key: backward_of(call) for key, call in calls.items()}
    stats = {key: statistics_of(seconds) for key, seconds in measure(calls).items()}
    rate = {key: flops / stat["ms_median"] * 1e-9 for key, stat in stats.items()}
    mine = stats["ours"]["ms_median"]
    parts = [f"attention_{direction} {name} d{dim} h{heads}/{key_heads} [{kernels}]"]
    parts += [f"ours {in_words(mine)} {rate['ours']:.0f} TF"]
    for key in found:
        other = stats[key]["ms_median"]
        parts.append(f"{key} {in_words(other)} {rate[key]:.0f} TF ({other / mine:.3f}x)")
    parts += [f"floor {flops / FLOPS * 1e3 / mine:.0%}", f"self {stats['self']['ms_median'] / mine:.3f}"]
    print("   ".join(parts), *(f"   ({key}: {why})" for key, why in missing.items()), flush=True)
    return {
        "op": "attention", "pass": direction, "shape": name, "documents": len(lengths), "tokens": sum(lengths),
        "heads": heads, "key_heads": key_heads, "dim": dim, "dtype": "bfloat16", "kernels": kernels, "tflops": rate,
        "ours": stats["ours"], "peers": {key: {"version": found[key][0], **stats[key]} for key in found},
        "ratio": {key: stats[key]["ms_median"] / mine for key in found},
        "self_ratio": stats["self"]["ms_median"] / mine,
        "floor_share": flops / FLOPS * 1e3 / mine, "gate": numbers,
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--json", help="write here; a whole green run goes to benchmarks/results/h200 by itself")
    parser.add_argument("--commit", help="what was measured, where there is no git")
    options = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        print("bench_attention_cuda: needs a Hopper GPU, none is visible to torch")
        return 0
    torch.manual_seed(0)
    rows = [row(name, direction) for name in options.shape for direction in SHAPES[name][4]]
    if options.json or options.shape == list(SHAPES):
        write_gpu_rows(options.json or JSON, rows, options.commit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
