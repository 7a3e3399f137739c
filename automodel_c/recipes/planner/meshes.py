"""Every mesh of so many ranks, each predicted, and which to take."""

import dataclasses

from automodel_c.models.qwen3_5 import read_config

from .. import dry_run
from ..config import RecipeError
from .job import Job
from .memory import memory
from .timing import timing


@dataclasses.dataclass
class Choice:
    """A mesh with its prediction. fits: whether memory's estimate of all that is reserved is within the limit."""

    job: Job
    memory: object
    timing: object
    fits: bool

    @property
    def rate(self):
        return self.timing.rate(self.job)

    @property
    def name(self):
        job = self.job
        return f"dp {job.dp} x cp {job.cp}" + (f", ep {job.ep}" if job.ep > 1 else "")


def config_of(recipe):
    """The configuration of a recipe's model; of a published one by its sizes. RecipeError for what is not predicted."""
    for key in ("tp_size", "pp_size"):
        if (getattr(recipe.distributed, key) or 1) > 1:
            found = getattr(recipe.distributed, key)
            raise RecipeError(f"distributed.{key}={found}: automodel-c plan predicts meshes of dp, cp and ep alone")
    if recipe.distributed.strategy != "fsdp2":
        raise RecipeError(f"distributed.strategy={recipe.distributed.strategy}: automodel-c plan predicts fsdp2 alone")
    if recipe.distributed.moe.fp32_weight_grads:
        raise RecipeError("distributed.moe.fp32_weight_grads=true: automodel-c plan does not predict it")
    config = read_config(dry_run.source_of(recipe)[1])
    if config.tie_word_embeddings:
        raise RecipeError(
            "automodel-c plan predicts models whose head is not the embedding; tie_word_embeddings is true"
        )
    return config


def job_of(recipe, config, world, cp, ep, lengths, frames=()):
    """The Job of a schema.Recipe. lengths: of one pack; a microbatch is local_batch_size of them."""
    section, steps, frozen = recipe.distributed, recipe.step_scheduler, recipe.freeze_config
    recompute = section.activation_checkpointing
    if recompute != "selective":
        recompute = bool(recompute)
    if section.activation_checkpointing_scope == "vision":
        recompute = False
    if frozen.freeze_language_model:
        raise RecipeError("automodel-c plan predicts runs that train the language model; freeze_language_model is true")
    batch = steps.local_batch_size
    return Job(
        config.text, config.vision, world, cp, ep, tuple(lengths) * batch, tuple(frames) * batch,
        microbatches=max(1, steps.global_batch_size // (batch * (world // cp))), recompute=recompute,
        experts_stay=section.moe.reshard_after_forward is False, deferred=section.defer_fsdp_grad_sync,
        frozen_tower=frozen.freeze_vision_tower, frozen_embeddings=frozen.freeze_embeddings,
        reduce_bytes=2 if section.mp_policy.reduce_dtype in ("bfloat16", "bf16") else 4,
    )  # fmt: skip


def choice(job, machine, limit):
    held = memory(job)
    return Choice(job, held, timing(job, machine), held.reserved(machine) <= limit)


def choices(recipe, config, world, lengths, frames, machine, limit):
    """Choices of all meshes, those that fit first, the fastest first."""
    base = job_of(recipe, config, world, 1, 1, lengths, frames)
    experts, found = base.text.num_experts or 0, []
    for cp in _divisors(world):
        if sum(lengths) // cp < 256:
            continue
        for ep in [ep for ep in _divisors(world) if ep == 1 or (experts and _spreads(base, world, ep))]:
            found.append(choice(job_of(recipe, config, world, cp, ep, lengths, frames), machine, limit))
    return sorted(found, key=lambda c: (not c.fits, -c.rate if c.fits else c.memory.allocated))


def _spreads(job, world, ep):
    """Whether parallelize_qwen3_5 takes so many ranks of ep."""
    dims = (2 * job.text.moe_intermediate_size, job.text.hidden_size)
    return job.text.num_experts % ep == 0 and all(dim % (world // ep) == 0 for dim in dims)


def _divisors(n):
    return [d for d in range(1, n + 1) if n % d == 0 and d & (d - 1) == 0]
