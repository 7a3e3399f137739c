"""Constants of this machine for `automodel-c plan --machine FILE`: automodel-c bench machine

Writes machine.json, or another FILE: python -m benchmarks.recipes.bench_machine FILE.

Measures what the planner's largest parts come from, with this package's operators at the 122B's sizes: a copy, products
of matrices, attention, the gated delta rule, experts, the loss, AdamW, a launch; under torchrun on two GPUs also their
link. What it does not measure (small operators' shares of a copy, what is stated or assumed) is the package's own, and
keeps its source. --tiny runs it on the CPU, to exercise the code. Not run on a GPU yet.
"""

import argparse
import itertools
import json
import os
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist

from automodel_c import Pack, ops
from automodel_c.optim import FusedAdamW
from automodel_c.recipes.planner.packs import heavy_tailed
from benchmarks.recipes.machine_file import constant, constants, scores

HUNDRED = [64 + 37 * i * i % 937 for i in range(100)]


class Sizes:
    """Of the 122B; tiny ones for the CPU."""

    def __init__(self, tiny):
        self.tokens, self.hidden, self.vocab = (64, 32, 96) if tiny else (32768, 3072, 248320)
        self.heads, self.kv, self.dim = (2, 1, 16) if tiny else (32, 2, 256)
        self.keys, self.values, self.state = (1, 2, 16) if tiny else (16, 64, 128)
        self.experts, self.k, self.inner = (4, 2, 16) if tiny else (32, 8, 1024)
        self.numbers = 10_000 if tiny else 250_000_000
        self.short = [5, 9, 16, 2] if tiny else HUNDRED


def seconds(call, device, rounds):
    """Median of so many calls."""
    call()
    times = []
    for _ in range(rounds):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        else:
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def both_passes(function, inputs, device, rounds):
    """(forward, backward) seconds of function(*inputs), whose gradients are all taken."""
    inputs = [x.requires_grad_() if x.is_floating_point() else x for x in inputs]
    wanted = [x for x in inputs if x.requires_grad]
    upstream = torch.ones_like(function(*inputs))

    def forward():
        with torch.no_grad():
            function(*inputs)

    one = seconds(forward, device, rounds)
    two = seconds(lambda: torch.autograd.grad(function(*inputs), wanted, upstream), device, rounds)
    return one, max(two - one, 1e-9)


def operators(s, device, rounds, known):
    """(name, value, what was timed) of each constant that is measured here."""

    def randn(*shape):
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    def timed(function, *inputs):
        return both_passes(function, inputs, device, rounds)

    yield "copy", copy_rate(4 * s.numbers, device, rounds), "a copy"
    x, w = randn(s.tokens, s.hidden), randn(4 * s.hidden, s.hidden)
    forward, backward = timed(torch.nn.functional.linear, x, w)
    yield "products", 6 * s.tokens * w.numel() / (forward + backward), "a linear layer, both passes"
    found = {}
    for name, lengths in (("long", [s.tokens]), ("short", s.short)):
        qkv = [randn(sum(lengths), n, s.dim) for n in (s.heads, s.kv, s.kv)]
        pack = pack_of(lengths, device)
        found[name] = timed(lambda q, k, v, pack=pack: ops.attention(q, k, v, pack=pack), *qkv)
    width = s.heads * s.dim
    for i, which in enumerate(("fwd", "bwd")):
        score = found["long"][i] / scores([s.tokens]) / width
        token = max(1e-15, found["short"][i] / width - score * scores(s.short)) / sum(s.short)
        yield f"attention_{which}_score", score, "attention, one document"
        yield f"attention_{which}_token", token, "attention, a hundred documents"
    uneven = pack_of(heavy_tailed(s.tokens), device)
    qkv = [randn(s.tokens, n, s.state) for n in (s.keys, s.keys, s.values)]
    gates = [-torch.rand(s.tokens, s.values, device=device), torch.rand(s.tokens, s.values, device=device)]
    rule = timed(lambda *x: ops.gated_delta_rule(*x, pack=uneven)[0], *qkv, gates[0], gates[1].bfloat16())
    for which, value in zip(("fwd", "bwd"), rule, strict=True):
        yield f"gdn_{which}", value / s.tokens / s.values, "the gated delta rule, uneven documents"
    weights = randn(s.experts, s.hidden), randn(s.experts, 2 * s.inner, s.hidden), randn(s.experts, s.hidden, s.inner)
    took = timed(lambda *a: ops.moe(*a, top_k=s.k), randn(s.tokens, s.hidden), *weights)
    pairs = s.tokens * s.k
    gate_up, down = 4 * pairs * s.hidden * s.inner, 2 * pairs * s.hidden * s.inner
    of = {name: known[f"experts_{name}"]["value"] for name in ("gate_up", "down", "dact", "dx", "ddown", "dgate_up")}
    predicted = gate_up * sum(1 / of[n] for n in ("gate_up", "dx", "dgate_up"))
    predicted += down * sum(1 / of[n] for n in ("down", "dact", "ddown"))
    for name, rate in of.items():
        yield f"experts_{name}", rate * predicted / sum(took), "experts, both passes: the package's, all by one factor"
    hidden, head = randn(s.tokens // 4, s.hidden), randn(s.vocab, s.hidden)
    labels = torch.randint(0, s.vocab, (s.tokens // 4,), device=device)
    took = timed(lambda h, w: ops.linear_cross_entropy(h, w, labels), hidden, head)
    yield "loss", 8 * len(hidden) * head.numel() / sum(took), "linear_cross_entropy, logits made twice"
    p = torch.nn.Parameter(torch.zeros(s.numbers, device=device))
    p.grad = torch.ones_like(p)
    yield "adam", seconds(FusedAdamW([p]).step, device, rounds) / s.numbers, "AdamW, fp32"
    yield "launch", launch(device), "one of a thousand small additions on the host"


def copy_rate(nbytes, device, rounds):
    """Bytes a second, read and written."""
    source, target = (torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * nbytes / seconds(lambda: target.copy_(source), device, rounds)


def pack_of(lengths, device):
    return Pack(cu_seqlens=[0, *itertools.accumulate(lengths)], device=device)


def launch(device):
    """Seconds of the host."""
    x = torch.zeros(1, device=device)
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(1000):
        x.add_(1)
    return (time.perf_counter() - began) / 1000


def links(device, rounds, tiny):
    """As `operators`, of two ranks."""
    n = 1 << (12 if tiny else 26)
    sent, arriving = (torch.zeros(n, device=device) for _ in range(2))
    half = seconds(lambda: dist.all_to_all_single(arriving, sent), device, rounds)
    yield "pair_bytes", n * 2 / half, "all_to_all_single, half of 256 MiB to the other"
    part = torch.zeros(n // 2, device=device)
    yield (
        "pair_reduce_scatter",
        n * 2 / seconds(lambda: dist.reduce_scatter_tensor(part, sent), device, rounds),
        ("reduce_scatter_tensor, 256 MiB"),
    )
    few = [torch.zeros(1 << 10, device=device) for _ in range(2)]
    yield "message", seconds(lambda: dist.all_to_all_single(*few), device, rounds), "all_to_all_single, 4 KiB"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", nargs="?", default="machine.json", help="where the constants go")
    parser.add_argument("--tiny", action="store_true", help="small sizes on the CPU")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    device, ranks = torch.device("cpu"), int(os.environ.get("WORLD_SIZE", 1))
    if not options.tiny:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    kept = dict(constants())
    found = list(operators(Sizes(options.tiny), device, options.rounds, kept))
    if ranks > 1:
        dist.init_process_group("gloo" if options.tiny else "nccl")
        found += links(device, options.rounds, options.tiny)
    for name, value, what in found:
        unit = kept.get(name, {"unit": "s"})["unit"]
        kept[name] = constant(value, unit, f"measured here: {what}")
    if int(os.environ.get("RANK", 0)) == 0:
        name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU, tiny"
        about = {"machine": f"{name}, torch {torch.__version__}", "written_by": "benchmarks.recipes.bench_machine"}
        Path(options.file).write_text(json.dumps(about | {"constants": kept}, indent=1) + "\n")
        for name, value, what in found:
            print(f"{name:24} {value:10.4g}  {what}")
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
