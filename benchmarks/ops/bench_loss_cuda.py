"""Cross-entropy on one GPU, on logits and fused with its linear layer: python -m benchmarks.ops.bench_loss_cuda.

8,192 tokens by 3,072 by 248,320 words, bf16. A time is the median of CUDA events over rounds that run ours, the peers
and ours again in random order. `extra` is the most that torch's allocator held during one forward and backward beyond
what was there before and the two gradients.

  linear fast   at most 1 GiB beyond the gradients, weight's in float32 (`weight.grad_dtype`): the bar is 55 ms
  linear lean   at most 0.3 GiB: the bar is 68 ms
  linear bf16   as fast, weight's gradient in bf16, which is half the memory to keep logits in
  logits        forward, and backward alone, beside a copy of as many bytes: read once, written once

The gate before any time: the loss, and 256 rows of each gradient by the error rule against float64 with torch's bf16
product and float32 softmax as the plain twin; a peer within 5 % of float64.

Written before the first run. Three products are 6 T V H = 37.5 TFLOP, 47.5 ms at 790 TFLOP/s. Beside them the logits
are written by the first, read for their statistics (0.95 ms at 4.28 TB/s), read and written as their gradient (1.9 ms).
  - Blocks of tokens, all of the vocabulary at once: 2,048 rows are 0.95 GiB, and dW is added to in float32 four times:
    21 GB of traffic in products of depth 2,048, and a lean row would be 64 passes over W and dW. Not written.
  - Chunks of the vocabulary, logits made twice: 63.3 + 2.9 ms; a lean row, no fast one.
  - Chunks of the vocabulary, logits kept in the memory that dW will take: 2 H = 6,144 of 8,192 rows when dW is float32.
    The other 2,048 made again, 3.9 ms: 54.5 ms with 0.3 GiB. With 1 GiB most of these are kept too: 51.5 ms; with dW in
    bf16 half as much fits: 57 ms. dW is one product over all rows: one rounding, no addition. Written.
Tails of waves (1,536 blocks of 128 x 256 over 132 multiprocessors) are some 3 %; launches, 31 chunks of 8, are hidden.

What came. The products alone run at 790 to 815 TFLOP/s for a moment and at 720 once the card is at its power limit, in
which every contestant is timed: 52 ms of products, and the bar of 55 ms is missed. Fast, lean and bf16 of two versions:
  logits kept by row in three parts, a block a row for statistics    62.5, 63.6, 68.9 ms beside torch's 61.5; the
                                                                     statistics of a chunk ran at half of the copy rate
  two parts, whole chunks kept, a warp a row, the gradient's logits  61.8, 64.8, 67.7 ms beside torch's 62.8; the
  asked for before its scale is known                                gradient on logits 0.96 of the copy from 0.89
One step of the first version after a pause: 52.3 ms of kernels, 47.4 products, 2.5 gradient, 2.0 statistics.
Where the time goes, each product alone for a second: 691 W, 1.46 to 1.55 GHz and 645 to 675 TFLOP/s at any width of a
chunk (the one that adds 619 at 4,096 columns, 672 at 16,896), so that three products take 57 ms at the card's power
limit before anything else: no arrangement of these products meets the bar there. Tried beside 61.7 ms at 8,192 columns:
8,448, which fills every wave, 61.3; 16,896 61.4; 4,096 62.8; statistics and gradients on a second stream beside the
products, of either priority, 62.2 to 62.6.
"""

import argparse
import functools
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

from automodel_c import ops
from benchmarks.harness import in_words, statistics_of, write_gpu_rows
from benchmarks.ops.bench_attention_cuda import measure
from tests.numerics import assert_as_good_as

JSON = Path(__file__).parents[1] / "results/h200/loss.json"
TOKENS, SIZE, VOCAB = 8192, 3072, 248_320
PEAK = 790e12
SAMPLED = 256
BF16, F32 = torch.bfloat16, torch.float32
BARS = {"fast": (55.0, 1024), "lean": (68.0, 307)}


def plain(x, w, y):
    return F.cross_entropy(F.linear(x, w).float(), y)


def narrow(x, w, y):
    return F.cross_entropy(F.linear(x, w), y)


def liger(x, w, y):
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss()(w, x, y)


class Layer:
    """Inputs of the layer, what torch makes of them in float64 at sampled rows, and the contestants."""

    def __init__(self):
        self.x = torch.randn(TOKENS, SIZE, dtype=BF16, device="cuda").requires_grad_()
        self.w = (torch.randn(VOCAB, SIZE, dtype=BF16, device="cuda") * SIZE**-0.5).requires_grad_()
        self.y = torch.randint(0, VOCAB, (TOKENS,), device="cuda")
        self.wide = self.w.detach().clone().requires_grad_()
        self.wide.grad_dtype = F32
        self.rows = torch.linspace(0, TOKENS - 1, SAMPLED, device="cuda").long()
        self.words = torch.cat([self.y[:SAMPLED], torch.linspace(0, VOCAB - 1, SAMPLED, device="cuda").long()])

    def calls(self, wanted):
        def bf16(function):
            return lambda: self.step(function, self.w)

        def mine(weight, mebibytes):
            function = functools.partial(ops.linear_cross_entropy, extra_bytes=mebibytes << 20)
            return lambda: self.step(function, weight)

        made = {"ours": mine(self.wide, 1024), "lean": mine(self.wide, 307), "bf16": mine(self.w, 1024)}
        peers = {"compile": lambda: bf16(torch.compile(plain, dynamic=False)), "torch": lambda: bf16(narrow)}
        peers |= {"liger": lambda: bf16(liger)}
        return made | {name: make() for name, make in peers.items() if name in wanted}

    def step(self, function, weight):
        self.x.grad = weight.grad = None
        loss = function(self.x, weight, self.y)
        loss.backward()
        return loss.detach()

    def sampled(self, call):
        loss = call()
        weight = self.w if self.wide.grad is None else self.wide
        parts = [loss.float(), self.x.grad[self.rows].float(), weight.grad[self.words].float()]
        self.x.grad = self.w.grad = self.wide.grad = None
        return parts

    def truth(self, block=1024):
        """In float64, some rows at a time."""
        w, total = self.w.detach().double(), 0.0
        dx = torch.empty(TOKENS, SIZE, dtype=torch.float64, device="cuda")
        dw = torch.zeros(len(self.words), SIZE, dtype=torch.float64, device="cuda")
        for start in range(0, TOKENS, block):
            x, y = self.x.detach()[start : start + block].double(), self.y[start : start + block]
            logits = x @ w.T
            total = total + F.cross_entropy(logits, y, reduction="sum")
            logits = torch.softmax(logits, 1)
            logits[torch.arange(len(y), device="cuda"), y] -= 1.0
            dx[start : start + block] = logits @ w / TOKENS
            dw += logits[:, self.words].T @ x / TOKENS
            del logits
        return [total / TOKENS, dx[self.rows], dw]


def gate(layer, calls):
    """The numbers of the rule, and the names of peers that compute something else."""
    truth, twin = layer.truth(), layer.sampled(lambda: layer.step(plain, layer.w))
    numbers, wrong = {}, []
    for name, call in calls.items():
        made = layer.sampled(call)
        if name in ("ours", "lean", "bf16"):
            numbers[name] = [
                assert_as_good_as(a, b, c, name=f"{name} part {i}", dtype=BF16 if i else F32)
                for i, (a, b, c) in enumerate(zip(made, twin, truth, strict=True))
            ]
        elif any((a - c).norm() > 0.05 * c.norm() for a, c in zip(made, truth, strict=True)):
            wrong.append(name)
    return numbers, wrong


def extra_memory(layer, call):
    layer.x.grad = layer.w.grad = layer.wide.grad = None
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    outputs = sum(x.grad.nbytes for x in (layer.x, layer.w, layer.wide) if x.grad is not None)
    peak = torch.cuda.max_memory_allocated() - before - outputs
    layer.x.grad = layer.w.grad = layer.wide.grad = None
    return peak


def linear_rows(wanted, failures):
    layer = Layer()
    calls, missing = layer.calls(wanted), {}
    for name in list(calls):
        try:
            calls[name]()
        except Exception as error:
            if name in ("ours", "lean", "bf16"):
                raise
            missing[name] = f"{type(error).__name__}: {str(error)[:80]}"
            del calls[name]
    numbers, wrong = gate(layer, calls)
    for name in wrong:
        missing[name] = "computes something else"
        del calls[name]
    torch.cuda.empty_cache()
    extra = {name: extra_memory(layer, call) for name, call in calls.items()}
    stats = {name: statistics_of(seconds) for name, seconds in measure(calls).items()}
    floor = 6 * TOKENS * SIZE * VOCAB / PEAK * 1e3
    peers = [name for name in calls if name not in ("ours", "lean", "bf16")]
    rows = []
    for name, label in (("ours", "fast"), ("lean", "lean"), ("bf16", "bf16")):
        mine = stats[name]["ms_median"]
        bar, most = BARS.get(label, (None, None))
        parts = [f"linear {label}".ljust(13), f"ours {in_words(mine)}  extra {extra[name] >> 20} MiB"]
        parts += [
            f"{peer} {in_words(stats[peer]['ms_median'])} ({stats[peer]['ms_median'] / mine:.2f}x)" for peer in peers
        ]
        parts += [f"floor {floor / mine:.0%}", f"self {stats['self']['ms_median'] / stats['ours']['ms_median']:.3f}"]
        parts += [f"bar {bar} ms, {most} MiB"] if bar else []
        print("   ".join(parts), flush=True)
        if bar and (mine > bar or extra[name] > most << 20):
            failures.append(f"linear {label}: {in_words(mine)}, {extra[name] >> 20} MiB; bar {bar} ms, {most} MiB")
        rows.append({
            "op": "linear_cross_entropy", "pass": "fwd+bwd", "row": label, "shape": [TOKENS, SIZE, VOCAB],
            "dtype": "bfloat16", "ours": stats[name], "extra_bytes": extra[name], "floor_share": floor / mine,
            "peers": {peer: {**stats[peer], "extra_bytes": extra[peer]} for peer in peers},
            "ratio": {peer: stats[peer]["ms_median"] / mine for peer in peers},
            "self_ratio": stats["self"]["ms_median"] / stats["ours"]["ms_median"], "gate": numbers[name],
        })  # fmt: skip
    print("   ".join(f"{name} extra {extra[name] >> 20} MiB" for name in peers), missing or "", flush=True)
    return rows


def gate_logits(logits, labels):
    rows = torch.linspace(0, len(logits) - 1, 32, device="cuda").long()
    x = logits.detach()[rows]
    values = []
    for function, wide in (
        (ops.cross_entropy, x),
        (lambda a, y: F.cross_entropy(a.float(), y), x),
        (F.cross_entropy, x.double()),
    ):
        leaf = wide.clone().requires_grad_()
        loss = function(leaf, labels[rows])
        values.append([loss.detach(), torch.autograd.grad(loss, leaf)[0]])
    return [assert_as_good_as(a, b, c.double(), name="logits") for a, b, c in zip(*values, strict=True)]


def logits_rows(dtype, tokens, wanted):
    logits = torch.randn(tokens, VOCAB, dtype=dtype, device="cuda").requires_grad_()
    labels = torch.randint(0, VOCAB, (tokens,), device="cuda")
    numbers = gate_logits(logits, labels)
    ours = lambda x: ops.cross_entropy(x, labels)  # noqa: E731
    eager = lambda x: F.cross_entropy(x.float(), labels)  # noqa: E731
    functions = {"ours": ours}
    functions |= {"compile": torch.compile(eager, dynamic=False)} if "compile" in wanted else {}
    rows = []
    for direction in ("fwd", "bwd"):
        calls, traffic = {}, logits.nbytes * (1 if direction == "fwd" else 2)
        for name, function in functions.items():
            if direction == "fwd":
                calls[name] = lambda f=function: f(logits.detach())
            else:
                loss = function(logits)
                calls[name] = lambda v=loss: torch.autograd.grad(v, logits, retain_graph=True)
        block = torch.empty(traffic // 2, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(block)
        calls["copy"] = lambda a=target, b=block: a.copy_(b)
        stats = {name: statistics_of(seconds) for name, seconds in measure(calls).items()}
        mine = stats["ours"]["ms_median"]
        ratio = {name: stats[name]["ms_median"] / mine for name in calls if name not in ("ours", "copy")}
        kind = str(dtype).removeprefix("torch.")
        parts = [
            f"logits {tokens} {kind} {direction}".ljust(26),
            f"ours {in_words(mine)} {traffic / mine * 1e-6:.0f} GB/s",
        ]
        parts += [f"copy {stats['copy']['ms_median'] / mine:.3f}"]
        parts += [f"{name} {in_words(stats[name]['ms_median'])} ({value:.2f}x)" for name, value in ratio.items()]
        print("   ".join([*parts, f"self {stats['self']['ms_median'] / mine:.3f}"]), flush=True)
        rows.append({
            "op": "cross_entropy", "pass": direction, "shape": [tokens, VOCAB], "dtype": kind, "bytes": traffic,
            "ours": stats["ours"], "copy": stats["copy"], "copy_share": stats["copy"]["ms_median"] / mine,
            "peers": {name: stats[name] for name in ratio}, "ratio": ratio, "gate": numbers,
            "self_ratio": stats["self"]["ms_median"] / mine,
        })  # fmt: skip
        del calls, block, target
        torch.cuda.empty_cache()
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", choices=["linear", "logits"])
    parser.add_argument(
        "--peers", nargs="*", choices=["compile", "torch", "liger"], default=["compile", "torch", "liger"]
    )
    parser.add_argument("--json", help="write here; a whole green run goes to benchmarks/results/h200 by itself")
    parser.add_argument("--commit", help="what was measured, where there is no git")
    options = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        print("bench_loss_cuda: needs a Hopper GPU, none is visible to torch")
        return 0
    torch.manual_seed(0)
    rows, failures = [], []
    if options.only != "logits":
        rows += linear_rows(options.peers, failures)
        torch.cuda.empty_cache()
    if options.only != "linear":
        rows += logits_rows(BF16, TOKENS, options.peers) + logits_rows(F32, TOKENS // 2, options.peers)
    if options.json or (options.only is None and not failures):
        write_gpu_rows(options.json or JSON, rows, options.commit, ("liger_kernel", "triton", "nvidia-cublas"))
    for failure in failures:
        print(f"failed: {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
