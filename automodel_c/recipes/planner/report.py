"""The words of `automodel-c plan recipe.yaml --gpus N`."""

import copy
import dataclasses

from automodel_c.models.qwen3_5 import CONFIGS, read_config

from .job import Job
from .meshes import choice, choices, config_of, job_of
from .packs import frames, packs
from .timing import timing

GIB = 2**30
SHOWN = 6
PUBLISHED = (  # NeMo Automodel's runs on H100s: (model, mesh, GiB, seconds a step, tokens/s/GPU, which packs)
    ("122B-A10B", (128, 16, 8), "64.2", None, 49.53, "mixed"),
    ("122B-A10B", (128, 32, 8), "59.62", 92.0, None, "mixed"),
    ("122B-A10B", (128, 32, 8), "58.49", 74.0, None, "mixed"),
)
PIPELINES = (  # of the 27B: (pp, tp, dp, published GB)
    (2, 1, 4, "32 to 42"),
    (4, 4, 1, "40 to 52"),
)


def explain(recipe, world, machine, *, limit=None, lengths=None, media=0.25):
    """Lines: the recipe's own mesh in parts, other meshes, why, published runs, what is assumed. lengths: of a pack,
    None: uneven documents and one document. limit: bytes of a GPU. media: share of tokens that are media's."""
    limit = limit or machine.memory
    size = recipe.packed_sequence.pack_size
    if not (lengths or size):
        raise ValueError("plan: the recipe has no packed_sequence.pack_size, so --lengths must say what is packed")
    kinds = {"given": tuple(lengths)} if lengths else packs(size)
    section = recipe.distributed
    cp, ep, config = section.cp_size or 1, section.ep_size or 1, config_of(recipe)
    for name, some in kinds.items():
        seen = frames(sum(some), media)
        own = choice(job_of(recipe, config, world, cp, ep, some, seen), machine, limit)
        yield f"{world} GPUs, a pack of {sum(some):,} tokens in {len(some)} document{'s' * (len(some) > 1)} ({name})"
        yield from _parts(own, machine, limit)
        yield from _what_if(own, machine)
        yield from _experts_kept(own, machine, limit)
        if name == next(iter(kinds)):
            yield from _meshes(choices(recipe, config, world, some, seen, machine, limit), own, machine, limit)
        yield ""
    yield from _published(recipe, config, machine, limit, media)
    yield from _assumed(machine, media)


def _parts(own, machine, limit):
    job, held, took = own.job, own.memory, own.timing
    yield (
        f"  {own.name}, {job.microbatches} microbatch{'es' * (job.microbatches > 1)}: {held.allocated / GIB:.1f} GiB"
        f" allocated, {held.reserved(machine) / 1e9:.1f} GB with slack and context of {limit / 1e9:.0f};"
        f" {took.step:.2f} s a step, {own.rate:,.0f} tokens/s/GPU"
    )
    yield f"  memory when it is fullest, {held.moment}:"
    for part, n in sorted(held.parts.items(), key=lambda of: -of[1]):
        yield f"    {part:28} {n / GIB:8.2f} GiB"
    assumed = {"slack of the allocator": held.allocated * machine.slack, "context, NCCL's buffers": machine.context}
    for part, n in assumed.items():
        yield f"    {part:28} {n / GIB:8.2f} GiB, assumed"
    others = sorted(((n, moment) for moment, n in held.moments_of_step.items() if moment != held.moment), reverse=True)
    yield f"    at other moments: {', '.join(f'{moment} {n / GIB:.1f}' for n, moment in others)}"
    yield "  time:"
    for part, seconds in took.parts.items():
        beside = f"  (+{took.hidden[part] * 1e3:.0f} ms beside other work)" if took.hidden.get(part) else ""
        yield f"    {part:28} {seconds * 1e3:8.1f} ms  {seconds / took.step:5.1%}{beside}"


def _what_if(own, machine):
    """The recipe's mesh where an assumption is wrong."""
    job, took = own.job, own.timing
    slower = copy.copy(machine)
    slower.infiniband_bytes = machine.infiniband_bytes * 0.8
    quieter = copy.copy(machine)
    quieter.crowded = 0.1
    cases = {
        f"InfiniBand at {slower.infiniband_bytes / 1e9:.0f} GB/s": timing(job, slower).step,
        "no weights travel beside work": took.step + (1 - machine.crowded) * sum(took.hidden.values()),
        f"wires slow the work beside them by 0.1 of their time, not {machine.crowded:.2f}": timing(job, quieter).step,
    }
    if job.text.num_experts:
        cases["the busiest rank has 1.3 of the rows of experts"] = took.step + 0.3 * took.parts["experts"]
    words = [f"{name} {job.step_tokens / job.world / step:,.0f}" for name, step in cases.items()]
    yield f"  tokens/s/GPU if {'; if '.join(words)}"


def _experts_kept(own, machine, limit):
    """What it is worth to gather each layer's experts once a microbatch, for the memory that they then take."""
    job = own.job
    if not job.text.num_experts or job.ep in (1, job.world) or job.experts_stay:
        return
    other = choice(dataclasses.replace(job, experts_stay=True), machine, limit)
    yield (
        f"  with distributed.moe.reshard_after_forward: false {other.rate:,.0f} tokens/s/GPU and"
        f" {other.memory.reserved(machine) / 1e9:.1f} GB in all{'' if other.fits else ', which does not fit'}"
    )


def _meshes(found, own, machine, limit):
    yield "  meshes that fit, the fastest first:" if found[0].fits else "  no mesh fits; those that need least:"
    shown = [c for c in found if c.fits == found[0].fits][:SHOWN]
    for c in shown:
        yield f"    {_line(c, machine)}" + ("   <- the recipe's" if c.job == own.job else "")
    if own.job not in [c.job for c in shown]:
        yield f"    {_line(own, machine)}   <- the recipe's"
    yield from (f"  {line}" for line in _why(found, limit, machine))


def _line(c, machine):
    return (
        f"{c.name:24} {c.memory.allocated / GIB:6.1f} GiB, {c.memory.reserved(machine) / 1e9:6.1f} GB in all,"
        f" {c.timing.step:7.2f} s, {c.rate:7,.0f} tokens/s/GPU{'' if c.fits else '  does not fit'}"
    )


def _why(found, limit, machine):
    """The smallest context parallelism that fits, what stops the next smaller, and what the fastest pays for."""
    fitting = [c for c in found if c.fits]
    if not fitting:
        return
    least = min(c.job.cp for c in fitting)
    best = max((c for c in fitting if c.job.cp == least), key=lambda c: c.rate)
    line = f"smallest context parallelism that fits: {least}, fastest there {best.name}"
    smaller = [c for c in found if c.job.cp == least // 2]
    if smaller:
        c = min(smaller, key=lambda c: c.memory.allocated)
        most = max(c.memory.parts, key=c.memory.parts.get)
        line += (
            f"; with cp {least // 2} even {c.name} takes {c.memory.reserved(machine) / 1e9:.0f} GB, most of it {most}"
        )
    yield line
    fastest = fitting[0]
    if fastest.job.cp != least:
        yield (
            f"fastest is {fastest.name}: {best.name} spends {_largest(best)}, it spends {_largest(fastest)}"
        )  # fmt: skip


def _largest(c):
    part, seconds = next(iter(c.timing.parts.items()))
    return f"{seconds:.2f} s on {part}"


def _published(recipe, config, machine, limit, media):
    yield "published runs (NeMo Automodel, H100) beside these predictions (H200's constants):"
    name = recipe.model.pretrained_model_name_or_path or ""
    for model, (world, cp, ep), gib, seconds, rate, which in PUBLISHED:
        if not name.endswith(model):
            continue
        lengths = packs(131072)[which]
        job = job_of(recipe, config, world, cp, ep, lengths, frames(sum(lengths), media))
        c = choice(dataclasses.replace(job, microbatches=1), machine, limit)
        theirs = f"{seconds:.0f} s a step" if seconds else f"{rate} tokens/s/GPU"
        ours = f"{c.timing.step:.2f} s a step, {c.rate:,.0f} tokens/s/GPU"
        yield f"  {model}, {world} GPUs, {c.name}: {gib} GiB, {theirs}; ours {c.memory.allocated / GIB:.1f} GiB, {ours}"
    for pp, tp, dp, gb in PIPELINES:
        yield f"  27B, pp {pp} tp {tp} dp {dp}: {gb} GB; ours, by formula alone: {_pipeline(pp, tp, dp)}"


def _pipeline(pp, tp, dp, tokens=4096):
    """The 27B in stages of equal size, masters, moments and gradients sharded over tp and dp; pp microbatches of
    `tokens` in flight, whose layers keep their inputs."""
    config = read_config(CONFIGS["27B"])
    job, t = Job(config.text, config.vision, 1, 1, 1, (tokens,)), config.text
    weights, end = sum(job.weights.values()) / (pp * tp * dp), job.root[0] / tp
    layer = max(sum(job.unit(kind)) for kind in t.layer_types) / tp
    inputs = 2 * t.hidden_size * tokens * t.num_hidden_layers / tp
    rest = inputs + 2 * end + 2 * 2 * layer + 4 * layer + 4 * end + min(4 * job.root[0], 2 * tokens * t.vocab_size) / tp
    return (
        f"{(16 * weights + rest) / 1e9:.1f} GB with fp32 moments, {(12 * weights + rest) / 1e9:.1f} with bf16 ones"
        f" ({tokens:,} tokens a microbatch; by this formula alone)"
    )


def _assumed(machine, media):
    yield f"constants: {machine.about}"
    stated = [
        f"{name} ({source})" for name, source in machine.sources.items() if source.startswith(("stated", "assumed"))
    ]
    yield f"  not measured: {'; '.join(stated)}"
    yield (
        f"  assumed: {media:.0%} of tokens are images' or clips' in frames of 1,024 patches; experts are chosen evenly;"
        " hosts of 8, ep innermost, so that up to 8 ranks of ep share NVLink; weights over hosts travel at InfiniBand's"
        " rate, one gather or reduction at a time; no time is lost between hosts beyond that; the device always has"
        " work, which it has not where a model is too small for the host to be ahead"
    )
    yield "  not measured: more than two GPUs, several hosts, 48 layers; data loading and checkpoints are left out"
