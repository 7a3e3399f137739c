"""What `automodel-c train recipe.yaml --check --world N` does: a run of N ranks, built on none.

Every rank is worked out from where it stands in the meshes. Of ranks that hold equally much of every weight one is
built, by the code that a run is built by: mesh, model, shards and optimizer on the meta device, in a process group that
sends nothing. What it then holds must be what was worked out.
"""

import math
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ..data.sampler import check_batch_sizes
from ..models import build as models
from ..models import qwen3_5
from ..models.gates import published_name
from ..models.qwen3_5.experts import Experts
from ..models.qwen3_5.layers import MLP
from ..parallel import ContextPlan
from ..parallel.fsdp_units import frees, gathered, units
from ..parallel.plan import make_pack
from . import parts
from .finetune_vlm import shard, shared
from .runtime import mesh_shape, runtime_over, stages_on
from .schedule import LrSchedule
from .targets import resolve

PARTS = ("vision tower", "decoder", "experts", "embedding, head", "MTP head")
GIB = 2**30


@dataclass
class Bytes:
    """Of one part of the model on one rank: fp32 masters, which are the parameters; moments of the optimizer; sharded
    gradients; and its largest unit while that is gathered to compute, on any rank."""

    masters: int = 0
    moments: int = 0
    gradients: int = 0
    gathered: int = 0

    @property
    def held(self):
        """What stays from step to step, and the gradients."""
        return self.masters + self.moments + self.gradients


@dataclass
class DryRun:
    """parameters: of the whole model. shape: (dp, cp, tp, pp, ep). ranks: for every rank {part: Bytes}, the same
    object where ranks are alike; kinds: how many objects. largest: (name, bytes) of the unit that is largest when
    gathered. at_once: bytes of the weights that are gathered at the same time, at most. whole_gradients: of gradients
    that a step of several microbatches holds unsharded, where it defers their reduction. plan: ContextPlan of a full
    pack as one document, None on one rank of cp. reads: bytes of the files that each built rank would read, of
    `files`."""

    parameters: int
    shape: tuple
    ranks: list
    kinds: int
    largest: tuple
    at_once: int
    whole_gradients: int
    microbatches: int
    plan: object
    attention: tuple
    reads: list
    files: int
    seconds: float

    def describe(self):
        """For people, some lines."""
        dp, cp, tp, pp, ep = self.shape
        world, heaviest = len(self.ranks), max(range(len(self.ranks)), key=lambda r: self._held(r))
        shown, least = self.ranks[heaviest], min(self._held(r) for r in range(world))
        over = f", experts over {ep}" if ep > 1 else ""
        shape = f"dp {dp} x cp {cp}" + "".join(f" x {name} {n}" for name, n in (("tp", tp), ("pp", pp)) if n > 1)
        yield (
            f"recipe is fine: {self.parameters:,} parameters on {_count(world, 'rank')} ({shape}){over},"
            f" {_count(self.microbatches, 'microbatch', 'es')} a step; built {_count(self.kinds, 'kind')} of ranks in"
            f" {self.seconds:.1f} s"
        )
        yield f"GiB on rank {heaviest}, which holds most (the least: {least / GIB:.3f}); activations are not in it"
        columns = ("masters", "moments", "gradients", "sum", "largest unit gathered")
        yield f"  {'':16}" + "".join(f"{name:>{max(10, len(name) + 2)}}" for name in columns)
        for name, of in shown.items():
            yield f"  {name:16}" + _numbers(of, of.gathered)
        total = Bytes(*(sum(getattr(of, key) for of in shown.values()) for key in ("masters", "moments", "gradients")))
        yield f"  {'all':16}" + _numbers(total, self.largest[1])
        yield f"largest unit gathered: {self.largest[0]}; at the same time are gathered {self.at_once / GIB:.3f} GiB"
        if self.whole_gradients:
            yield f"gradients wait for the last microbatch unsharded: {self.whole_gradients / GIB:.3f} GiB more"
        if self.reads:
            most, fewest = max(self.reads) / GIB, min(self.reads) / GIB
            yield f"a rank reads {fewest:.3f} to {most:.3f} GiB of the model's files, which hold {self.files / GIB:.3f}"
        yield from self._planned()

    def _held(self, rank):
        return sum(of.held for of in self.ranks[rank].values())

    def _planned(self):
        if self.plan is None:
            return
        attention = self.plan.attention(*self.attention)
        received, costs = attention.traffic()["received"], attention.costs
        yield (
            f"a pack of {self.plan.tokens:,} tokens, {self.plan.local:,} a rank; as one document the costliest rank"
            f" computes {costs.max() / costs.mean():.2f} of the mean, and a rank receives at most"
            f" {received.max() / 2**20:.1f} MiB in an attention layer"
        )


def _count(n, what, more="s"):
    return f"{n} {what}{more * (n != 1)}"


def _numbers(of, unit):
    numbers = [of.masters, of.moments, of.gradients, of.held]
    return "".join(f"{n / GIB:>{w}.3f}" for n, w in zip([*numbers, unit], (10, 10, 11, 10, 23), strict=True))


def dry_run(recipe, world):
    """A `DryRun` of a schema.Recipe on `world` ranks, without reading data or weights.

    A published model whose directory is not here ("Qwen/Qwen3.5-122B-A10B") is taken by its published sizes.
    UsageError, ValueError and NotImplementedError as a run of so many ranks would raise them.
    """
    began = time.perf_counter()
    shape = dp, cp, _, _ = mesh_shape(recipe.distributed, world)
    ep, steps = recipe.distributed.ep_size or 1, recipe.step_scheduler
    check_batch_sizes(steps.global_batch_size, steps.local_batch_size, dp)
    LrSchedule(recipe.lr_scheduler, recipe.optimizer.lr, steps.max_steps or 1, recipe.optimizer.weight_decay)
    if recipe.model.operators != "automodel_c":
        raise ValueError(f"--world needs model.operators: automodel_c, found {recipe.model.operators!r}")
    if recipe.distributed.strategy != "fsdp2":
        raise NotImplementedError(
            f"--world lays out distributed.strategy=fsdp2 alone, found {recipe.distributed.strategy}: the package that"
            " cuts the weights needs GPUs to say what a rank holds"
        )
    kinds = _Kinds(recipe, source_of(recipe), shape, ep)
    ranks = [kinds.of(rank).parts for rank in range(world)]
    built, stages = kinds.all(), kinds.stages()
    reads = [of.reads for of in built if of.reads is not None]
    largest, at_once, whole = _worst(of.units for of in stages)
    built = built[0]
    text, microbatches = built.model.config.text, steps.global_batch_size // (steps.local_batch_size * dp)
    return DryRun(
        parameters=sum(p.numel() for of in stages for p in of.model.parameters()),
        shape=(*shape, ep),
        ranks=ranks,
        kinds=len(kinds.all()),
        largest=largest,
        at_once=at_once,
        whole_gradients=whole if microbatches > 1 and recipe.distributed.defer_fsdp_grad_sync else 0,
        microbatches=microbatches,
        plan=_plan(recipe, cp),
        attention=(text.num_attention_heads, text.num_key_value_heads, text.head_dim, _compute_dtype(recipe)),
        reads=reads,
        files=0 if built.model.folder is None else qwen3_5.Files(built.model.folder).total_bytes,
        seconds=time.perf_counter() - began,
    )


class _Kinds:
    """One rank of each kind, built when it is first met. Ranks of one stage of a pipeline have the same weights, of
    which they hold parts that may differ in size."""

    def __init__(self, recipe, source, shape, ep):
        self.recipe, self.source, self.shape, self.ep = recipe, source, shape, ep
        self.world, self.each = math.prod(shape), math.prod(shape[:3])
        self._placed, self._kinds = {}, {}

    def of(self, rank):
        stage, built = rank // self.each, None
        if stage not in self._placed:
            built = self._build(rank)
            self._placed[stage] = _placed(built.model)
        key = stage, tuple(_local_numel(*where, rank) for where in self._placed[stage])
        if key not in self._kinds:
            built = built or self._build(rank)
            if tuple(p.to_local().numel() for p in built.model.parameters()) != key[1]:
                raise RuntimeError(f"rank {rank} of {self.world} holds other shards than were worked out")
            self._kinds[key] = built
        return self._kinds[key]

    def all(self):
        return list(self._kinds.values())

    def stages(self):
        """One of each stage."""
        return list({stage: built for (stage, _), built in self._kinds.items()}.values())

    def _build(self, rank):
        return _built(self.recipe, self.source, self.shape, self.ep, rank)


def _worst(units):
    """Of `_units` of every stage the largest of each."""
    largest, at_once, whole = zip(*units, strict=True)
    return max(largest, key=lambda of: of[1]), max(at_once), max(whole)


@dataclass
class _Built:
    model: torch.nn.Module
    parts: dict
    units: tuple
    reads: int | None


@contextmanager
def _pretended(shape, ep, rank, chunks):
    """A Runtime of one rank of a process group in which nothing is sent."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend "fake"

    dist.init_process_group("fake", rank=rank, world_size=math.prod(shape), store=dist.HashStore())
    try:
        yield runtime_over(shape, torch.device("cpu"), ep, chunks)
    finally:
        dist.destroy_process_group()


def _built(recipe, source, shape, ep, rank):
    folder, config = source
    with _pretended(shape, ep, rank, stages_on(recipe.pipeline)) as runtime:
        model = models.own(folder, config, recipe.model, **shared(recipe, runtime))
        model = shard(recipe, model, runtime)
        optimizer = parts.build_optimizer(model, recipe.optimizer)
        optimizer.make_state()
        reads = None
        if folder is not None:
            files = qwen3_5.Files(folder)
            files.fill(model, qwen3_5.whole_on_meta(model))
            reads = files.bytes_read
        return _Built(
            model, _bytes(model, optimizer), _units(model, recipe.distributed.reshard_after_forward is None), reads
        )


def _part(name):
    """Which of PARTS a parameter belongs to."""
    found = {"model.visual.": "vision tower", "mtp.": "MTP head", "lm_head.": "embedding, head"}
    for prefix, part in found.items():
        if name.startswith(prefix):
            return part
    if ".embed_tokens." in name:
        return "embedding, head"
    return "experts" if ".mlp.experts." in name else "decoder"


def _bytes(model, optimizer):
    found = {part: Bytes() for part in PARTS}
    for name, p in model.named_parameters():
        of = found[_part(published_name(name))]
        of.masters += _nbytes(p)
        if p.requires_grad:
            of.gradients += _nbytes(p)
            of.moments += sum(_nbytes(t) for t in optimizer.state[p].values())
    for name, _, size in _gathered_units(model):
        of = found[_unit_part(name)]
        of.gathered = max(of.gathered, size)
    return {part: of for part, of in found.items() if of.masters or part in ("vision tower", "decoder")}


def _unit_part(name):
    return _part(f"{name}." if name else "lm_head.")


def _gathered_units(model):
    """(name, module, bytes while it is gathered) of every FSDP2 unit."""
    names = {module: name for name, module in model.named_modules()}
    for unit in units(model):
        numbers, dtype, _ = gathered(unit)
        if numbers:
            yield names[unit], unit, numbers * dtype.itemsize


def _units(model, root_stays):
    """((name, bytes) of the largest unit, bytes that are gathered at once at most, of all gradients in float32)."""
    found = list(_gathered_units(model))
    name, _, largest = max(found, key=lambda of: of[2])
    stays = [(unit is model and root_stays) or not frees(unit) for _, unit, _ in found]
    # those that stay, and of the rest a layer with a unit inside and those that are gathered ahead
    passing = sorted((size for (*_, size), stay in zip(found, stays, strict=True) if not stay), reverse=True)
    nested = 4 if any(isinstance(unit, Experts | MLP) for _, unit, _ in found) else 2
    at_once = sum(size for (*_, size), stay in zip(found, stays, strict=True) if stay) + sum(passing[:nested])
    whole = sum(4 * gathered(unit)[2] for _, unit, _ in found)
    return (name or "embedding, head and final norm", largest), at_once, whole


def _nbytes(tensor):
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()


def _placed(model):
    """(shape, [(size of a mesh dimension, its stride over ranks, the dim that it shards)]) of every parameter."""
    found = []
    for p in model.parameters():
        sizes, stride, cuts = p.device_mesh.shape, 1, []
        for size, placement in reversed(list(zip(sizes, p.placements, strict=True))):
            cuts.append((size, stride, placement.dim))
            stride *= size
        found.append((tuple(p.shape), cuts[::-1]))
    return found


def _local_numel(shape, cuts, rank):
    """How many numbers of a weight a rank holds: chunks as of torch.chunk, the last ones shorter or empty."""
    local = list(shape)
    for size, stride, dim in cuts:
        chunk, at = -(-local[dim] // size), rank // stride % size
        local[dim] = min(max(local[dim] - at * chunk, 0), chunk)
    numel = 1
    for n in local:
        numel *= n
    return numel


def source_of(recipe):
    """(directory or None, configuration) of the recipe's model."""
    section, how = recipe.model, resolve("model", recipe.model._target_)
    if how == "from_config":
        processor = models.processor_of(section, recipe.processor, how, resolve("processor", recipe.processor._target_))
        return None, models.model_config(section.config, processor)
    name = section.pretrained_model_name_or_path or ""
    if (Path(name) / "config.json").is_file():
        return name, models.directory_config(name, section)
    published = [size for size in qwen3_5.CONFIGS if name.endswith(f"Qwen3.5-{size}")]
    if not published:
        raise ValueError(f"model.pretrained_model_name_or_path={name!r}: expected a local model directory")
    mapping = dict(qwen3_5.CONFIGS[published[0]])
    for key in ("text_config", "vision_config"):
        mapping[key] = {**mapping[key], **models.config_overrides(section, key)}
    return None, models.model_config(mapping)


def _compute_dtype(recipe):
    policy = recipe.distributed.mp_policy
    return models.as_dtype(policy.param_dtype or recipe.model.torch_dtype, "model.torch_dtype")


def _plan(recipe, cp):
    tokens = recipe.packed_sequence.pack_size if recipe.packed_sequence.enabled else None
    if cp == 1 or not tokens:
        return None
    pack, tokens = make_pack(None, None, tokens * recipe.step_scheduler.local_batch_size)
    return ContextPlan(pack, tokens, ranks=cp)
