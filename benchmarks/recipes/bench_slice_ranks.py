"""The slice of bench_slice over ranks, beside the same slice on one rank, in one process group.

    torchrun --nproc-per-node 2 -m benchmarks.recipes.bench_slice_ranks --json FILE     a GPU each, NCCL
    torchrun --nproc-per-node 2 -m benchmarks.recipes.bench_slice_ranks --tiny          the CPU, gloo

Packs are of as many tokens a rank in every row. dp R: every rank has a pack of its own. cp R: one pack, R times as
long, is shared; the one-rank row beside it is that very pack. ep R: packs as in dp R, and the 32 experts of a layer,
as many as on one rank, are spread, 32 / R a rank, so that tokens travel. cp R x ep R: both; of four ranks and more,
dp x cp as well. One-rank rows run on all ranks at the same time, each in a group of its own, and count as their mean.
speedup = tokens / s of all ranks over those of one rank on the same pack; asked of two GPUs: 1.85.

Gate, before any time: a narrow model in which every token takes every expert, documents of all sizes; what each token
adds to the loss, and gradients, by the error rule: truth is one rank in fp32, its bf16 the plain twin (bench_slice
holds one rank against transformers). At full size loss and norm of the gradients must be those of one rank over the
same packs: norm within 1 %, the tokens' values within 5 % (nearly equal experts fall either way in bf16).

A step is forward, backward and optimizer; its time is the median of CUDA events on the slower rank. `exposed` is what
of NCCL's kernels, which includes waiting for the other rank, no other kernel covers; `idle` when nothing runs.
"""

import argparse
import gc
import os
import statistics
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from automodel_c import Pack
from automodel_c.models.gates import published_name
from automodel_c.models.qwen3_5.share import Share
from automodel_c.models.qwen3_5.step import Step
from automodel_c.optim import clip_grad_norm_
from automodel_c.parallel import ContextParallel, faults, wire
from automodel_c.parallel.experts import ExpertParallel
from automodel_c.recipes.parts import install_reduction
from benchmarks.harness import write_gpu_rows
from benchmarks.ops.bench_attention_cuda import heavy_tailed
from benchmarks.recipes import bench_slice
from benchmarks.recipes.bench_slice import GATED, NARROW, REAL, TINY, Inputs, between, by_kind, our_model, sharded
from tests.numerics import assert_as_good_as

JSON = Path(__file__).parents[1] / "results/h200x2/slice_ranks.json"
STEPS, WARM = 8, 2
CHECKED = tuple(name.replace("layers.0.linear_attn.A_log", "linear_attn.A_log") for name in GATED)  # few numbers each
NORM, VALUES = 0.01, 0.05  # what loss and gradients of full size may differ by


class Shared(Inputs):
    """What this rank holds of a step: its part of a pack that a group shares, or all of one. packs: how many a step."""

    def __init__(self, lengths, sizes, vocab, seed, device, packs=1, cp=None, travels=False):
        tokens = sum(lengths)
        generator = torch.Generator(device).manual_seed(1000 + seed)
        ends = [0, *torch.tensor(lengths).cumsum(0).tolist()]
        plan = None if cp is None or cp.group is None else cp.plan(cu_seqlens=ends, tokens=tokens)
        if plan is not None:
            plan.use()
        share = Share(torch.repeat_interleave(torch.tensor(ends[1:]), torch.tensor(lengths)).numpy(), plan)
        if share.tokens != tokens:
            raise ValueError(f"{tokens} tokens leave padding over {plan.ranks} ranks")
        ids = torch.randint(0, vocab, (tokens,), generator=generator, device=device)
        projection = torch.randn(tokens, sizes["hidden_size"], generator=generator, device=device)
        first, end = int(share.own[0]), int(share.own[-1]) + 1  # the layout is contiguous
        self.tokens, self.all_tokens, self.lengths, self.rows = end - first, tokens * packs, lengths, slice(first, end)
        self.ids, self.projection = ids[first:end].clone(), projection[first:end].clone()
        self.share = self.tokens / self.all_tokens
        starts = torch.cat([torch.arange(n) for n in lengths])[first:end].to(device)
        pack = Pack(cu_seqlens=ends, device=device)
        self.step = Step(pack, starts.expand(3, -1).contiguous(), None, plan, travels)


class Ranks:
    """A mesh over all ranks, dp x cp with ep innermost over both; or, `alone`, each rank in a mesh of its own."""

    def __init__(self, device, cp=1, ep=1, alone=False):
        world = dist.get_world_size()
        self.device, self.world, self.alone = device, 1 if alone else world, alone
        shape = (world, 1, 1) if alone else (1, world // cp, cp)
        self.mesh = init_device_mesh(device.type, shape, mesh_dim_names=("each", "dp", "cp"))["dp", "cp"]
        self.moe_mesh = None
        if ep > 1:
            self.moe_mesh = init_device_mesh(device.type, (world // ep, ep), mesh_dim_names=("ep_shard", "ep"))
        self.cp = ContextParallel(self.mesh.get_group("cp")) if cp > 1 else None
        self.ep = ExpertParallel(self.moe_mesh.get_group("ep") if ep > 1 else None)
        self.packs = self.world // cp
        self.pack = 0 if alone else dist.get_rank() // cp

    def model(self, sizes, vocab):
        model = sharded(our_model(sizes, vocab, self.device, self.cp, self.ep), self.mesh, self.moe_mesh)
        install_reduction(model, self.device)
        return model

    def inputs(self, lengths, sizes, vocab):
        """lengths: of every pack of a step."""
        travels = self.ep.group is not None
        return Shared(lengths[self.pack], sizes, vocab, self.pack, self.device, len(lengths), self.cp, travels)


def values_of(packs, lengths, shares):
    """float64 [tokens of all packs]: what each token adds to the loss, from the ranks' rows."""
    tokens = [sum(one) for one in lengths]
    whole = torch.zeros(sum(tokens), dtype=torch.float64, device=shares[0].values.device)
    for index, x in zip(packs, shares, strict=True):
        offset = sum(tokens[:index])
        whole[offset + x.rows.start : offset + x.rows.stop] = x.values.double()
    return whole


def gradients(model):
    """Those of CHECKED, whole, by published names; of several that a name fits one after another."""
    named = {published_name(k).replace("language_model.", ""): p.grad for k, p in model.named_parameters()}
    found = [[g for k, g in named.items() if name in k] for name in CHECKED]
    return [torch.cat([_whole(g).float().flatten() for g in some]) for some in found]


def _whole(gradient):
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def gate(meshes, tiny, device):
    """The error rule for loss and gradients of every mesh."""
    sizes, world = TINY if tiny else NARROW, dist.get_world_size()
    short = [70, 3, 129, 1, 40, 13] if tiny else [700, 3, 321, 1, 64, 65, 128, 830]
    single = {}
    for name, (cp, ep) in meshes.items():
        if cp not in single:
            lengths = [turned(short, r) for r in range(world // cp)]
            single[cp] = lengths, *alone_results(lengths, sizes, device)
        lengths, truth, naive = single[cp]
        ranks = Ranks(device, cp, ep)
        x, model = ranks.inputs(lengths, sizes, 512), ranks.model(sizes, 512)
        model(x).backward()
        values = values_of([ranks.pack], lengths, [x])
        dist.all_reduce(values)
        found = [values.float(), *gradients(model)]
        for part, a, b, c in zip(("loss of a token", *CHECKED), found, naive, truth, strict=True):
            numbers = assert_as_good_as(a, b, c.double(), name=f"{name}, {part}", dtype=torch.bfloat16)
            say(f"gate {name:12s} {part:48s} ranks {numbers['ours_fro']:.2e}  one rank {numbers['naive_fro']:.2e}")
        del model
    release(device)


def alone_results(lengths, sizes, device):
    """(fp32, bf16) results of one rank over all packs of a step: the truth and its plain twin."""
    model, found = our_model(sizes, 512, device), []
    for dtype in (torch.float32, torch.bfloat16):
        model.to(dtype)
        model.zero_grad(set_to_none=True)
        shares = [Shared(one, sizes, 512, i, device, len(lengths)) for i, one in enumerate(lengths)]
        for x in shares:
            model(x).backward()
        values = values_of(range(len(lengths)), lengths, shares)
        found.append([values.float(), *gradients(model)])
    return found


def first_step(model, shares):
    """The norm of the gradients of a whole step's packs one after another; no weight changes."""
    for x in shares:
        model(x).backward()
    norm = clip_grad_norm_([p for p in model.parameters() if p.requires_grad], float("inf")).item()
    model.zero_grad(set_to_none=True)
    return norm


def time_steps(model, x, device, steps):
    """({part: median ms}, profile, peak bytes, bytes of rows sent a step)."""
    optimizer, parts = bench_slice.optimizer_of(model), {"forward": [], "backward": [], "optimizer": [], "step": []}

    def step():
        return bench_slice.one_step(model, x, optimizer, device)[1]

    for n in range(WARM + steps):
        if n == WARM and device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        sent = wire.sent
        marks = step()
        for name, (a, b) in zip(parts, ((0, 1), (1, 2), (2, 3), (0, 3)), strict=True):
            if n >= WARM:
                parts[name].append(between(marks[a], marks[b]))
    sent = wire.sent - sent
    peak, kinds = 0, {}
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated()
        kinds = by_kind(step)
    return {name: statistics.median(some) for name, some in parts.items()}, kinds, peak, sent


def over_ranks(numbers, op):
    """Each number's MAX or AVG over the ranks."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    both = torch.tensor(list(numbers.values()), dtype=torch.float64, device=device)
    dist.all_reduce(both, dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM)
    both = both if op == "max" else both / dist.get_world_size()
    return dict(zip(numbers, both.tolist(), strict=True))


def row(name, shape, ranks, lengths, options, beside=None):
    """A row; `beside`: the one-rank row of the same packs, which it must agree with."""
    device, sizes = ranks.device, TINY if options.tiny else REAL
    vocab = 512 if options.tiny else bench_slice.HEADLESS_VOCAB
    model = ranks.model(sizes, vocab)
    if ranks.alone:  # every rank runs all packs of a step for the comparison, and is timed on one of them
        shares = [Shared(one, sizes, vocab, i, device, len(lengths)) for i, one in enumerate(lengths)]
        norm = first_step(model, shares)
        values = values_of(range(len(lengths)), lengths, shares)
        x = shares[dist.get_rank() % len(shares)]
        del shares
        x.share = 1.0
    else:
        x = ranks.inputs(lengths, sizes, vocab)
        norm = first_step(model, [x])
        values = values_of([ranks.pack], lengths, [x])
        dist.all_reduce(values)
    found = {"mesh": name, "shape": shape, "documents": [len(one) for one in lengths], "tokens": x.all_tokens}
    if beside is not None:
        found |= {"norm_ratio": norm / beside["norm"]}
        found["values_error"] = ((values - beside["values"]).norm() / beside["values"].norm()).item()
        assert abs(found["norm_ratio"] - 1) < NORM, f"{name}: norm {norm}, of one rank {beside['norm']}"
        assert found["values_error"] < VALUES, f"{name}: the tokens' values differ by {found['values_error']}"
    ms, profile, peak, sent = time_steps(model, x, device, options.steps)
    del model
    release(device)
    ms = over_ranks(ms, "mean" if ranks.alone else "max")
    per_step = x.tokens if ranks.alone else x.all_tokens
    found |= {
        "ms": ms, "tokens_per_s": per_step / ms["step"] * 1e3, "sent_mib": sent / 2**20,
        "peak_gib": over_ranks({"peak": peak / 2**30}, "max")["peak"], **profile,
    }  # fmt: skip
    if beside is not None:
        found["tokens_per_s_per_rank"] = found["tokens_per_s"] / ranks.world
        found["speedup"] = found["tokens_per_s"] / beside["tokens_per_s"]
    show(found)
    return found | {"norm": norm, "values": values}


def show(found):
    words = " ".join(f"{part} {value:.1f}" for part, value in found["ms"].items())
    line = f"{found['mesh']:12s} {found['shape']:12s} {found['tokens_per_s']:9.0f} tokens/s  {words}"
    line += f"  peak {found['peak_gib']:.1f} GiB  rows sent {found['sent_mib']:.1f} MiB"
    if "speedup" in found:
        agrees = f"norm {found['norm_ratio']:.5f} of one's, values differ by {found['values_error']:.1e}"
        line += f"  {found['speedup']:.3f} of one rank  ({agrees})"
    say(line)
    for kind, value in (found.get("kinds") or {}).items():
        say(f"    {kind:24s} {value:8.2f} ms")
    if "exposed_ms" in found:
        say(
            f"    communication {found['communication_ms']:.2f} ms, exposed {found['exposed_ms']:.2f};"
            f" idle {found['idle_ms']:.2f}; waits and copies to the host: {found['waits'] or 'none'}"
        )


def say(line):
    if dist.get_rank() == 0:
        print(line, flush=True)


def release(device):
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def shapes(tiny):
    """{name: lengths of pack r that cp ranks share, of (cp, r)}."""
    if tiny:
        return {"heavy": tiny_heavy, "one": lambda cp, r: [48 * cp]}
    return {"32K heavy": lambda cp, r: heavy_tailed(32768 * cp, r), "32K": lambda cp, r: [32768 * cp]}


def tiny_heavy(cp, r):
    return turned([24, 3, 30, 31, 48 * cp - 88], r) if cp > 1 else [24, 3, 21 - r, *[r] * (r > 0)]


def turned(lengths, by):
    return lengths[by % len(lengths) :] + lengths[: by % len(lengths)]


def meshes_of(world):
    """{name: (cp, ep)}."""
    found = {f"dp {world}": (1, 1), f"ep {world}": (1, world)}
    for cp in (n for n in range(2, world + 1) if world % n == 0):
        name = f"cp {cp}" if cp == world else f"dp {world // cp} x cp {cp}"
        found |= {name: (cp, 1), f"{name} x ep {world}": (cp, world)}
    return found


def joined(name, tiny):
    """This rank's device, in the process group that torchrun asks for: gloo and the CPU if tiny, else NCCL."""
    if "RANK" not in os.environ:
        raise SystemExit(f"{name}: start it with torchrun --nproc-per-node 2 -m benchmarks.recipes.{name}")
    os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"] = "1"
    device = torch.device("cpu")
    if not tiny:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo" if tiny else "nccl", timeout=timedelta(minutes=4), device_id=None if tiny else device
    )
    return device


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="small sizes on the CPU")
    parser.add_argument("--shapes", nargs="+", help="of these packs alone")
    parser.add_argument("--only", nargs="+", help="meshes whose name holds one of these")
    parser.add_argument("--steps", type=int, default=STEPS, help="timed steps of a row")
    parser.add_argument("--json", help=f"write here; default {JSON.name}, with --tiny none")
    parser.add_argument("--commit", default="", help="what was measured, where there is no git")
    options = parser.parse_args()
    device = joined("bench_slice_ranks", options.tiny)
    with faults.guard():
        rows = measured(options, device)
    if dist.get_rank() == 0 and rows:
        slowest = min((r for r in rows if "speedup" in r), key=lambda r: r["speedup"], default=None)
        if slowest:
            say(f"least: {slowest['speedup']:.3f} of one rank, {slowest['mesh']} {slowest['shape']}")
    dist.destroy_process_group()


def measured(options, device):
    world = dist.get_world_size()
    meshes = meshes_of(world)
    if options.only:
        meshes = {name: of for name, of in meshes.items() if any(word in name for word in options.only)}
    gate(meshes, options.tiny, device)
    path = options.json or (None if options.tiny else JSON)
    rows = []

    def add(found):
        rows.append({key: value for key, value in found.items() if key != "values"})
        if path and dist.get_rank() == 0:  # after each: a run may be cut off
            write_gpu_rows(path, rows, options.commit)
        return found

    for shape, lengths in shapes(options.tiny).items():
        if options.shapes and shape not in options.shapes:
            continue
        for cp in sorted({cp for cp, _ in meshes.values()}):
            packs, words = [lengths(cp, r) for r in range(world // cp)], shape if cp == 1 else f"{shape} x {cp}"
            beside = add(row("one", words, Ranks(device, alone=True), packs, options))
            for name, (_, ep) in ((name, of) for name, of in meshes.items() if of[0] == cp):
                add(row(name, words, Ranks(device, cp, ep), packs, options, beside))
    return rows


if __name__ == "__main__":
    main()
