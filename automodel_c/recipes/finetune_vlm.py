"""Fine-tunes a Qwen3.5 vision-language model: the recipe that `automodel-c train` runs."""

import gc
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import DataLoader
from transformers.utils import logging as transformers_logging

from ..data.build import build_dataset, prepare_data
from ..data.packing import PackedDataset, build_packs
from ..data.sampler import GlobalBatchSampler, check_batch_sizes
from ..models import qwen3_5
from ..models.build import as_dtype, build_model, freeze, materialise
from ..models.export import export_hf
from ..models.parallelize import parallelize_qwen3_5
from ..parallel import ContextParallel, TensorParallel
from . import parts
from .calls import calls_of
from .checkpoint import Checkpoints, checkpoints_of, load_checkpoint, sound_folder
from .config import frame_sharding
from .evaluate import evaluate
from .interrupt import NEVER, Interrupt, Interrupted, stay_apart
from .logs import Logs, check_loggers
from .metrics import Progress, memory_gib
from .plots import draw_curves
from .prewarm import prewarm
from .profile import Profile, span
from .runtime import UsageError, seed_model, seed_training, start_ranks
from .schedule import LrSchedule
from .schema import Recipe
from .step import train_step
from .targets import resolve


@dataclass
class Run:
    """Everything that a training run is made of."""

    recipe: Recipe
    runtime: object
    model: torch.nn.Module
    processor: object
    optimizer: torch.optim.Optimizer
    schedule: LrSchedule
    dataset: object
    held_out: object
    sampler: GlobalBatchSampler
    output: Path
    checkpoints: Checkpoints | None
    reads: list  # bytes of the model's files that each rank has read, [] where the weights come from elsewhere
    interrupted: Interrupted | None = None  # why it left early, the same on every rank
    profile: Profile | None = None  # what looks at the steps, on the main rank where it was asked for

    @property
    def data_order(self):
        return data_order(self.recipe, len(self.dataset))


def train(recipe, *, check=False, profile=None):
    """Runs a schema.Recipe on this rank; with check, builds everything and stops before the first step. profile: how
    many steps to take times of, operator by operator (None: of none).

    Returns the Evaluation of the held-out data, None when the recipe names none or with check. Interrupted, on every
    rank, where SIGINT or SIGTERM ended the run early.
    """
    check_loggers(recipe)
    transformers_logging.set_verbosity_error()  # on a CPU it advises kernels that are for GPUs
    with start_ranks(recipe) as runtime, parts.guard():
        run = _build_or_complain(recipe, runtime)
        if check:
            _say(run, f"recipe is fine: {describe(run)}")
            return None
        _make_folder(run.output)
        if profile and runtime.is_main:
            left = run.sampler.steps - run.sampler.first_step
            run.profile = Profile(profile, left=left, device=runtime.device, world=runtime.world)
        evaluation = fit(run)
    if run.interrupted:
        raise run.interrupted
    return evaluation


def _make_folder(path):
    """On every rank: if one cannot write there, none begins."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"output_dir={str(path)!r}: {error.strerror}") from error


def _build_or_complain(recipe, runtime):
    try:
        return build(recipe, runtime)
    except (ValueError, NotImplementedError) as error:
        if raised_here(error):
            raise UsageError(str(error)) from error
        raise


def raised_here(error):
    """Whether this package refused, rather than something below it."""
    frame = error.__traceback__
    while frame.tb_next is not None:
        frame = frame.tb_next
    return frame.tb_frame.f_globals.get("__name__", "").startswith("automodel_c.")


def build(recipe, runtime):
    """Builds a Run: data, model, optimizer, and the restored state where the recipe names one.

    ValueError and NotImplementedError name the key that does not fit the data, the model or the number of ranks.
    """
    steps = recipe.step_scheduler
    check_batch_sizes(steps.global_batch_size, steps.local_batch_size, runtime.dp_size)
    seed_model(recipe)
    model, processor = build_model(
        recipe.model,
        recipe.processor,
        resolve("model", recipe.model._target_),
        resolve("processor", recipe.processor._target_),
        **shared(recipe, runtime),
    )
    dataset, held_out = _build_data(recipe, processor, runtime)
    model = shard(recipe, model, runtime)
    if runtime.pp.stages == 1 and not any(p.requires_grad for p in model.parameters()):
        raise ValueError("freeze_config freezes every parameter")
    section = recipe.checkpoint
    folder = checkpoints_of(recipe)
    restored = sound_folder(section.restore_from, folder) if section.restore_from else None
    seed_model(recipe)
    materialise(model, runtime.device, weights=not restored)
    optimizer = parts.build_optimizer(model, recipe.optimizer)
    seed_training(recipe, runtime.rank)
    order = data_order(recipe, len(dataset))
    first_step = load_checkpoint(restored, model, optimizer, runtime, data=order) if restored else 0
    sampler = _sampler(recipe, len(dataset), runtime, first_step)
    schedule = LrSchedule(recipe.lr_scheduler, recipe.optimizer.lr, sampler.steps, recipe.optimizer.weight_decay)
    model.train()
    prewarm(recipe.prewarm, runtime)
    checkpoints = None
    if section.enabled:
        checkpoints = Checkpoints(folder, runtime, keep=section.max_recent_checkpoints, background=section.is_async)
    return Run(
        recipe, runtime, model, processor, optimizer, schedule, dataset, held_out, sampler, Path(recipe.output_dir),
        checkpoints, [] if restored else _reads(model, runtime),
    )  # fmt: skip


def shared(recipe, runtime):
    """What qwen3_5.load is told of the ranks that share a model."""
    section = recipe.distributed
    return {
        "cp": ContextParallel(runtime.mesh.get_group("cp")),
        "frame_sharding": frame_sharding(section),
        "ep_group": runtime.ep_group,
        "tp": TensorParallel(runtime.tp_mesh),
        "tp_plan": section.tp_plan,
        "pp": runtime.pp,
    }


def _reads(model, runtime):
    """What every rank has read of the files of our own model."""
    if getattr(model, "folder", None) is None:
        return []
    reads = [None] * runtime.world
    dist.all_gather_object(reads, model.bytes_read)
    return reads


def data_order(recipe, samples):
    """What, with the step, tells the position in the data: a checkpoint resumes only where these agree."""
    return {
        "dataset's samples": samples,
        "seed": recipe.seed,
        "dataloader.shuffle": int(recipe.dataloader.shuffle),
        "step_scheduler.global_batch_size": recipe.step_scheduler.global_batch_size,
    }


def describe(run):
    """One line about what is going to be trained."""
    parameters, runtime = sum(p.numel() for p in run.model.parameters()), run.runtime
    if runtime.pp_group is not None:
        held = torch.tensor(parameters, device=runtime.device)
        dist.all_reduce(held, group=runtime.pp_group)
        parameters = int(held)
    sizes = (("cp", runtime.cp_size), ("tp", runtime.tp_size), ("pp", runtime.pp.ranks))
    sizes = [f"{name} {n}" for name, n in sizes if n > 1]
    shape = f" ({' x '.join([f'dp {runtime.dp_size}', *sizes])})" if sizes else ""
    shape += "" if runtime.ep_size == 1 else f", experts over {runtime.ep_size}"
    reads = ""
    if run.reads:
        reads = f"; a rank read {min(run.reads) / 2**20:,.1f} to {max(run.reads) / 2**20:,.1f} MiB of the model's files"
    return (
        f"{parameters:,} parameters, {len(run.dataset):,} samples, {run.sampler.steps} steps of"
        f" {run.sampler.microbatches} microbatches on {runtime.world} ranks{shape}{reads}"
    )


def _build_data(recipe, processor, runtime):
    sections = [s for s in (recipe.dataset, recipe.validation_dataset) if s is not None]
    if runtime.is_main:
        for section in sections:
            prepare_data(resolve("dataset", section._target_), section)
    dist.barrier()
    built = [build_dataset(section, processor, recipe.seed) for section in sections]
    train_set = build_packs(
        built[0], recipe.packed_sequence, shuffle=recipe.dataloader.shuffle, workers=recipe.dataloader.num_workers,
        group=dist.group.WORLD,
    )  # fmt: skip
    return train_set, built[1] if len(built) > 1 else None


def shard(recipe, model, runtime):
    """Freezes what the recipe says, and shards the model over the ranks; returns it."""
    freeze(model, recipe.freeze_config)
    if not isinstance(model, qwen3_5.Qwen3_5):
        model = model.to(runtime.device)
    section = recipe.distributed
    model = parallelize_qwen3_5(
        model,
        runtime.mesh,
        moe_mesh=runtime.moe_mesh,
        mp_policy=_mp_policy(recipe),
        reshard_after_forward=section.reshard_after_forward,
        experts_reshard_after_forward=section.moe.reshard_after_forward,
        activation_checkpointing=section.activation_checkpointing,
        activation_checkpointing_scope=section.activation_checkpointing_scope or "all",
        compile=section.enable_compile,
        async_tensor_parallel=section.enable_async_tensor_parallel,
        strategy=section.strategy,
        reduce_per_microbatch=recipe.pipeline.reduce_grad_per_microbatch,
        fp32_expert_grads=section.moe.fp32_weight_grads,
    )
    parts.install_reduction(model, runtime.device)
    return model


def _mp_policy(recipe):
    section = recipe.distributed.mp_policy
    compute = as_dtype(recipe.model.torch_dtype, "model.torch_dtype")
    keys = [key for key in ("param_dtype", "reduce_dtype", "output_dtype") if getattr(section, key) is not None]
    dtypes = {key: as_dtype(getattr(section, key), f"distributed.mp_policy.{key}") for key in keys}
    return MixedPrecisionPolicy(**{"param_dtype": compute, **dtypes}, cast_forward_inputs=section.cast_forward_inputs)


def _sampler(recipe, samples, runtime, first_step):
    steps = recipe.step_scheduler
    return GlobalBatchSampler(
        samples,
        global_batch_size=steps.global_batch_size,
        local_batch_size=steps.local_batch_size,
        dp_rank=runtime.dp_rank,
        dp_size=runtime.dp_size,
        seed=recipe.seed,
        shuffle=recipe.dataloader.shuffle,
        max_steps=steps.max_steps,
        num_epochs=steps.num_epochs,
        first_step=first_step,
    )


def fit(run):
    """Trains a Run to its last step and writes its output. Returns the last Evaluation, None without held-out data.

    A run that SIGINT or SIGTERM reached saves a checkpoint, returns None and says so in `run.interrupted`.
    """
    _say(run, describe(run))
    if isinstance(run.dataset, PackedDataset):
        _say(run, run.dataset.describe())
    with _open_logs(run) as logs:
        evaluation = _fit(run, logs)
        if evaluation is None and run.held_out is not None and not run.interrupted:
            evaluation = _evaluate(run, run.sampler.steps, logs)
    export = run.recipe.checkpoint.enabled and run.recipe.checkpoint.save_consolidated
    if export and not run.interrupted:
        export_hf(run.model, run.processor, run.output / "hf")
    if run.runtime.is_main:
        draw_curves(run.output / "metrics.jsonl", run.output / "validation.jsonl", run.output / "curves.png")
    if run.interrupted:
        return None
    _say(run, f"wrote {run.output}")
    if evaluation is not None:
        _say(run, evaluation.describe())
    return evaluation


@contextmanager
def _open_logs(run):
    """The Logs of the main rank, None on the others."""
    logs = Logs(run.recipe, run.output, run.sampler.first_step) if run.runtime.is_main else None
    failed = True
    try:
        yield logs
        failed = False
    finally:
        if logs is not None:
            logs.close(failed=failed)


def _fit(run, logs):
    """All steps that are left, with what surrounds them. Returns the Evaluation after the last, if there was one."""
    if run.recipe.step_scheduler.gc_every_steps:
        gc.disable()
    failed = True
    with Interrupt(notice=run.runtime.is_main) as interrupt:
        try:
            evaluation = _loop(run, logs, interrupt)
            failed = False
        finally:
            gc.enable()
            if run.checkpoints is not None:
                run.checkpoints.close(failed=failed)
    return evaluation


def _loop(run, logs, interrupt):
    """All steps that are left, until `interrupt` is asked on any rank. Returns the Evaluation after the last, if there
    was one."""
    sampler, runtime = run.sampler, run.runtime
    progress = Progress(sampler.steps, sampler.first_step, show=runtime.is_main)
    microbatches = iter(_loader(run))
    evaluation = None
    for step in range(sampler.first_step + 1, sampler.steps + 1):
        try:
            with run.profile.step(step) if run.profile else nullcontext():
                with span("data"):
                    batches = [next(microbatches) for _ in range(sampler.microbatches)]
                result = _step(run, step, batches, interrupt)
        except FloatingPointError as error:
            raise FloatingPointError(f"step {step}: {error}") from error
        if isinstance(result, int):
            run.interrupted = _leave(run, step - 1, result)
            break
        row = _row(run, step, result, progress.step_seconds())
        if runtime.is_main:
            logs.train(row)
            progress.show(row)
        if result.asked:
            run.interrupted = _leave(run, step, result.asked)
            break
        evaluation = _after_step(run, step, logs)
        _tell_profile(run, progress)
        progress.skip()
    progress.close()
    _tell_profile(run, progress, last=True)
    return evaluation


def _tell_profile(run, progress, *, last=False):
    """Prints and writes what --profile found, when it has."""
    if run.profile is not None and (last or run.profile.table is not None):
        table, run.profile = run.profile.finish(), None
        if table is not None:
            run.output.mkdir(parents=True, exist_ok=True)
            table.write(run.output)
            progress.say("\n".join([*table.lines(), f"wrote {run.output}/profile.json and profile.png"]))


def _leave(run, step, number):
    """Saves what `step` steps have made, where that is not done yet; the Interrupted that says how to go on."""
    done = f"after step {step}"
    if run.checkpoints is None:
        return Interrupted(number, f"{done}; nothing is saved: checkpoint.enabled is false")
    if step == run.sampler.first_step:
        return Interrupted(number, "before a step was taken; there is nothing to save")
    if run.checkpoints.saved != step:
        run.checkpoints.save(step, run.model, run.optimizer, data=run.data_order)
    folder = run.checkpoints.folder / f"step_{step}"
    return Interrupted(number, f"{done}; saved, to go on: the same command with checkpoint.restore_from={folder}")


def _loader(run):
    section = run.recipe.dataloader
    return DataLoader(
        run.dataset,
        batch_sampler=run.sampler,
        num_workers=section.num_workers,
        pin_memory=section.pin_memory,
        collate_fn=_Collate(calls_of(run.model).collate, run.processor, run.recipe.packed_sequence.collate_max_length),
        generator=torch.Generator(),
        worker_init_fn=stay_apart,
    )


class _Collate:
    """A collate function with its processor, as loader workers can pickle it."""

    def __init__(self, collate, processor, max_length):
        self.collate, self.processor, self.max_length = collate, processor, max_length

    def __call__(self, samples):
        return self.collate(samples, self.processor, max_length=self.max_length)


def _step(run, step, batches, interrupt=NEVER):
    recipe = run.recipe
    return train_step(
        run.model,
        run.optimizer,
        batches,
        lr=run.schedule(step),
        weight_decay=run.schedule.weight_decay(step),
        max_norm=recipe.clip_grad_norm.max_norm,
        runtime=run.runtime,
        per_microbatch=recipe.pipeline.reduce_grad_per_microbatch,
        fused=resolve("loss_fn", recipe.loss_fn._target_) == "fused_linear",
        interrupt=interrupt,
    )


def _row(run, step, result, seconds):
    row = {
        "step": step,
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "lr": run.schedule(step),
        "tokens": result.tokens,
        "num_label_tokens": result.labels,
        "tokens_per_s": result.tokens / seconds,
        "memory": memory_gib(run.runtime.device),
    }
    more = {"aux_loss": result.aux_loss, "mtp_loss": result.mtp_loss}
    return row | {key: value for key, value in more.items() if value is not None}


def _after_step(run, step, logs):
    """Evaluation, checkpoint and garbage collection where they are due. Returns the Evaluation, if there was one."""
    steps, last = run.recipe.step_scheduler, step == run.sampler.steps
    evaluation = None
    if run.held_out is not None and (last or _due(step, steps.val_every_steps)):
        evaluation = _evaluate(run, step, logs)
    epoch = run.sampler.steps_per_epoch if steps.save_checkpoint_every_epoch else None
    if run.checkpoints is not None and (last or _due(step, steps.ckpt_every_steps) or _due(step, epoch)):
        _save(run, step, held_out=None if evaluation is None else evaluation.loss)
    if _due(step, steps.gc_every_steps):
        gc.collect()
    return evaluation


def _save(run, step, held_out=None):
    return run.checkpoints.save(step, run.model, run.optimizer, data=run.data_order, held_out=held_out)


def _evaluate(run, step, logs):
    evaluation = evaluate(
        run.model,
        run.held_out,
        run.processor,
        runtime=run.runtime,
        batch_size=_held_out_batch(run),
    )
    if run.runtime.is_main:
        logs.held_out({"step": step, **evaluation.row()})
    return evaluation


def _held_out_batch(run):
    """Conversations of one forward: about as many as a microbatch of training holds."""
    each = run.dataset.samples_per_pack if isinstance(run.dataset, PackedDataset) else 1
    return run.recipe.step_scheduler.local_batch_size * each


def _due(step, every):
    return every is not None and step % every == 0


def _say(run, text):
    if run.runtime.is_main:
        print(text, flush=True)
