"""FusedAdamW and clip_grad_norm_ on one GPU, beside torch's and apex's: python -m benchmarks.ops.bench_adam_cuda.

10^9 parameters in 400 tensors whose sizes spread over four decades, and 20,000 small ones with empties between them.

  f32        float32 parameters and gradients: 28 bytes an element
  master     bfloat16 parameters and gradients, float32 masters and moments: 28 bytes
  remainder  the same with 16-bit remainders for masters: 26 bytes
  norm       the global norm of float32 gradients, below the limit: 4 bytes
  small      20,000 float32 tensors, gradients are new tensors every step: wall time of a step, host and device
  graph      the same step replayed from a CUDA graph: the host's time

A time is the median of CUDA events (small: of the wall, graph: of the host) over rounds that run ours, the peers, a
copy of as many bytes and ours again in random order; `copy` is the copy's time over ours. torch with a bfloat16 model
keeps float32 parameters and copies them (34 bytes); the peers' bytes are not ours, their times are what is compared.

The gate before any time: after two steps every 40th tensor, by the error rule against float64 with the plain float32
formula as the twin; the norm within 1e-6.

Bars: f32 and master at least 0.93 of the copy, the norm 0.93 of what reading alone reaches; small at most 8 ms a step,
graph at most 0.3 ms. Written before the first run: kernels with one element a thread and pow in every block ran at
0.70 of the copy in a step of the decoder's slice (torch's fused 0.83). Four elements a thread and tensor and the first
loads under way while pow runs should give 0.93; the norm 0.95; small some 40 ms, as the CPU's host part takes (80,000
tensors through DLPack at 0.6 us), which misses its bar.

What came: 0.90, 0.95 and 0.94 of the copy for f32, master and remainder; small 42.9 ms, graph 0.008. The norm's kernel
0.96 of what reading reaches, all of clip_grad_norm_ 0.87: its scaling kernel then had a block for every 8,192 elements,
which all leave at once where the factor is 1; it has few since, not timed. Dealing the sum's chunks to the blocks in
turn or giving each a run of its own: 0.964 and 0.959 ms, the same.
"""

import argparse
import random
import statistics
import sys
import time
from pathlib import Path

import torch

from automodel_c.optim import FusedAdamW, clip_grad_norm_
from automodel_c.reference import adam as reference
from benchmarks.harness import in_words, statistics_of, write_gpu_rows
from benchmarks.ops.bench_attention_cuda import HEAD_START, measure
from tests.numerics import assert_as_good_as

JSON = Path(__file__).parents[1] / "results/h200/adam.json"
HYPER = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
BF16, F32 = torch.bfloat16, torch.float32
BARS = {"f32": 0.93, "master": 0.93}


def sizes_of(total, n=400):
    """`n` sizes that sum to about `total`, their logarithms even over four decades."""
    spread = random.Random(1)
    weights = [10 ** spread.uniform(0, 4) for _ in range(n)]
    return [max(1, int(w / sum(weights) * total)) for w in weights]


def small_sizes(n=20_000, most=65_536):
    spread = random.Random(2)
    return [0 if i % 97 == 5 else spread.randint(1, most) for i in range(n)]


class Inputs:
    """Starting values and gradients; each optimizer gets its own copy."""

    def __init__(self, sizes, grad=F32):
        torch.manual_seed(0)
        self.start = [torch.randn(n, device="cuda") for n in sizes]
        self.grads = [torch.randn(n, device="cuda").to(grad) for n in sizes]

    def params(self, dtype=F32):
        params = [x.to(dtype, copy=True).requires_grad_() for x in self.start]
        for p, g in zip(params, self.grads, strict=True):
            p.grad = g.to(dtype)
        return params


def ours(inputs, dtype, **options):
    optimizer = FusedAdamW(inputs.params(dtype), **HYPER, **options)
    return optimizer, optimizer.step


def torch_fused(inputs, dtype, **options):
    params = inputs.params()
    optimizer = torch.optim.AdamW(params, fused=True, **HYPER)
    if dtype == F32:
        return optimizer, optimizer.step
    low, high = [p.detach().to(dtype) for p in params], [p.detach() for p in params]

    def step():
        optimizer.step()
        torch._foreach_copy_(low, high)

    return optimizer, step


def apex(inputs, dtype, **options):
    """apex's kernels; they take no empty tensor without harm, so that these are left out."""
    import amp_adam_peer as peer

    params = [p.detach() for p in inputs.params()]
    grads = [g.to(dtype) for g in inputs.grads]
    kept = [i for i, p in enumerate(params) if p.numel()]
    params, grads = [params[i] for i in kept], [grads[i] for i in kept]
    m, v = [torch.zeros_like(p) for p in params], [torch.zeros_like(p) for p in params]
    skip, count = torch.zeros(1, dtype=torch.int32, device="cuda"), [0]
    numbers = (HYPER["lr"], *HYPER["betas"], HYPER["eps"])
    if dtype == F32:

        def step():
            count[0] += 1
            peer.multi_tensor_adam(65536, skip, [grads, params, m, v], *numbers, count[0], 1, 1, HYPER["weight_decay"])

        return None, step
    low = [p.to(dtype) for p in params]
    lr, scale = torch.tensor([HYPER["lr"]], device="cuda"), torch.ones(1, device="cuda")
    steps = torch.zeros(1, dtype=torch.int32, device="cuda")

    def step():
        steps.add_(1)
        lists = [grads, low, m, v, params]
        peer.multi_tensor_adam_capturable_master(
            65536, skip, lists, lr, *HYPER["betas"], HYPER["eps"], steps, 1, 1, HYPER["weight_decay"], scale
        )

    return None, step


def gate(inputs, optimizer):
    """Two steps of ours on every 40th tensor against float64: the numbers of the rule."""
    params = optimizer.param_groups[0]["params"]
    for _ in range(2):
        optimizer.step()
    found, naive, truth = [], [], []
    numbers = {"lr": HYPER["lr"], "beta1": HYPER["betas"][0], "beta2": HYPER["betas"][1], "eps": HYPER["eps"],
               "weight_decay": HYPER["weight_decay"]}  # fmt: skip
    for p, start, grad in list(zip(params, inputs.start, inputs.grads, strict=True))[::40]:
        state = optimizer.state[p]
        found.append(state.get("master_param", p).detach())
        if found[-1].dtype == torch.int16:
            found[-1] = reference.master_of(p, found[-1])
        first = start.to(p.dtype)
        for made, dtype in ((naive, F32), (truth, torch.float64)):
            x, m, v = first.to(dtype), torch.zeros_like(first, dtype=dtype), torch.zeros_like(first, dtype=dtype)
            for step in (1, 2):
                x, m, v = reference.adamw(x, m, v, grad, step, **numbers, dtype=dtype)
            made.append(x)
    parts = [torch.cat(tensors) for tensors in (found, naive, truth)]
    return assert_as_good_as(*parts, name="parameters after two steps", dtype=F32)


def copy_of(nbytes):
    block = torch.empty(nbytes // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(block)
    return lambda: target.copy_(block)


def steps_row(name, bytes_each, dtype, **options):
    inputs = Inputs(sizes_of(1e9), dtype)
    total = sum(g.numel() for g in inputs.grads)
    optimizer, step = ours(inputs, dtype, **options)
    numbers = gate(inputs, optimizer)
    calls, missing, held = {"ours": step}, {}, []
    for peer, make in (("torch", torch_fused), ("apex", apex)):
        try:
            kept, call = make(inputs, dtype)
            call()
        except ImportError as error:
            missing[peer] = str(error)
            continue
        held.append(kept)
        calls[peer] = call
    calls["copy"] = copy_of(bytes_each * total)
    return shown(name, bytes_each * total, calls, numbers, missing, BARS.get(name))


def norm_row():
    params = Inputs(sizes_of(1e9)).params()
    total = sum(p.numel() for p in params)
    found, truth = (
        clip_grad_norm_(params, 1e9),
        torch.stack([p.grad.double().square().sum() for p in params]).sum().sqrt(),
    )
    assert abs(float(found) / float(truth) - 1) < 1e-6, (float(found), float(truth))
    flat = torch.cat([p.grad for p in params])
    calls = {
        "ours": lambda: clip_grad_norm_(params, 1e9),
        "torch": lambda: torch.nn.utils.get_total_norm([p.grad for p in params]),
        "reading": lambda: flat.view(-1)[: flat.numel() // 4096 * 4096].view(-1, 4096).amax(),
        "copy": copy_of(4 * total),
    }
    return shown("norm", 4 * total, calls, {"norm": float(found)}, {}, None, 20 * HEAD_START)


def shown(name, traffic, calls, numbers, missing, bar, head_start=HEAD_START):
    """One row of the table, printed and returned. head_start: as long as the host takes for a call."""
    stats = {key: statistics_of(seconds) for key, seconds in measure(calls, head_start=head_start).items()}
    mine = stats["ours"]["ms_median"]
    ratio = {key: stats[key]["ms_median"] / mine for key in calls if key not in ("ours", "copy")}
    share = stats["copy"]["ms_median"] / mine
    parts = [f"{name:10s} ours {in_words(mine)} {traffic / mine * 1e-6:.0f} GB/s   copy {share:.3f}"]
    parts += [f"{key} {in_words(stats[key]['ms_median'])} ({value:.2f}x)" for key, value in ratio.items()]
    parts += [f"self {stats['self']['ms_median'] / mine:.3f}"] + [f"bar {bar}"] * (bar is not None)
    print("   ".join(parts), *(f"   ({key}: {why})" for key, why in missing.items()), flush=True)
    return {
        "op": name, "bytes": traffic, "ours": stats["ours"], "copy": stats["copy"], "copy_share": share, "ratio": ratio,
        "peers": {key: stats[key] for key in ratio}, "missing": missing, "gate": numbers,
        "self_ratio": stats["self"]["ms_median"] / mine, "bar": bar,
    }  # fmt: skip


def wall_ms(call, before, synchronize=True, rounds=9):
    """Median wall time of `call`, each after `before`."""
    times = []
    for _ in range(rounds):
        before()
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        if synchronize:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times)


def small_rows():
    inputs = Inputs(small_sizes())
    optimizer, step = ours(inputs, F32)
    numbers = gate(inputs, optimizer)
    rows, found = [], {}
    for name, (held, call) in {"ours": (optimizer, step), "torch": torch_fused(inputs, F32)}.items():
        params = held.param_groups[0]["params"]

        def fresh(params=params):
            for p, g in zip(params, inputs.grads, strict=True):
                p.grad = g.clone()

        found[name] = wall_ms(call, fresh)
    ratio = found["torch"] / found["ours"]
    print(
        f"small      ours {found['ours']:.2f} ms   torch {found['torch']:.2f} ms ({ratio:.2f}x)   bar 8.00 ms",
        flush=True,
    )
    rows.append({"op": "small", "tensors": len(inputs.start), "ms": found, "gate": numbers, "bar_ms": 8.0})
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        step()
    host, whole = wall_ms(graph.replay, lambda: None, False), wall_ms(graph.replay, lambda: None)
    print(f"graph      host {host:.3f} ms, whole {whole:.2f} ms   bar 0.30 ms of the host", flush=True)
    rows.append({"op": "graph", "tensors": len(inputs.start), "ms": {"host": host, "whole": whole}, "bar_ms": 0.3})
    return rows


ROWS = {
    "f32": lambda: [steps_row("f32", 28, F32)],
    "master": lambda: [steps_row("master", 28, BF16)],
    "remainder": lambda: [steps_row("remainder", 26, BF16, master_weights="remainder")],
    "norm": lambda: [norm_row()],
    "small": small_rows,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--row", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--json", help="write here; a whole green run goes to benchmarks/results/h200 by itself")
    parser.add_argument("--commit", help="what was measured, where there is no git")
    options = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        print("bench_adam_cuda: needs a Hopper GPU, none is visible to torch")
        return 0
    rows, failures = [], []
    for name in options.row:
        try:
            rows += ROWS[name]()
        except Exception as error:
            failures.append(f"{name}: {type(error).__name__}: {error}")
        torch.cuda.empty_cache()
    if options.json or (options.row == list(ROWS) and not failures):
        write_gpu_rows(options.json or JSON, rows, options.commit, ("apex",))
    for failure in failures:
        print(f"failed: {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
