"""Checkpoints that resume a run: model, optimizer, random numbers, position in the data."""

import re
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from .runtime import rng_state, set_rng_state

_NAME = re.compile(r"step_(\d+)")


def save_checkpoint(folder, step, model, optimizer, runtime, *, data, keep=None):
    """Writes <folder>/step_<step> with torch.distributed.checkpoint; call it on every rank.

    Written beside and renamed, so that whatever is called step_<n> is whole. data: integers by name that, with the
    step, tell the position in the data (the learning rate needs the step alone). keep: how many of the newest to keep.
    """
    folder = Path(folder)
    final, beside = folder / f"step_{step}", folder / f".step_{step}.tmp"
    if runtime.is_main:
        shutil.rmtree(beside, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {
        "model": model_state,
        "optimizer": optimizer_state,
        "progress": _progress(step, data),
        "rng": {str(runtime.rank): rng_state(runtime.device)},
    }
    dcp.save(state, checkpoint_id=beside)
    dist.barrier()
    if runtime.is_main:
        shutil.rmtree(final, ignore_errors=True)
        beside.rename(final)
        _prune(folder, keep)
    dist.barrier()
    return final


def load_checkpoint(folder, model, optimizer, runtime, *, data):
    """Restores what save_checkpoint wrote into `folder`, on the same or another number of ranks. Returns the step.

    The optimizer's settings (rate, betas, eps, decay) stay what they are; its state is the saved one.
    Ranks that the saved run did not have keep their generators as they are. ValueError when the folder holds no
    .metadata, its name holds no step, or `data` is not what was saved.
    """
    folder = Path(folder)
    step = checkpoint_step(folder)
    reader = dcp.FileSystemReader(folder)
    saved = reader.read_metadata().state_dict_metadata
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "progress": _progress(0, data)}
    rank = str(runtime.rank)
    if any(key.startswith(f"rng.{rank}.") for key in saved):
        state["rng"] = {rank: rng_state(runtime.device)}
    _read(state, reader, folder)
    settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for group, now in zip(optimizer.param_groups, settings, strict=True):
        group.update(now)
    if "rng" in state:
        set_rng_state(state["rng"][rank], runtime.device)
    for key, wanted in _progress(step, data).items():
        if not torch.equal(state["progress"][key], wanted):
            raise ValueError(
                f"checkpoint.restore_from={str(folder)!r}: {key} was {int(state['progress'][key])}, is {int(wanted)}"
            )
    return step


def load_model(folder, model):
    """Restores only the model of what save_checkpoint wrote into `folder`; call it on every rank.

    ValueError when it is no whole checkpoint, or not one of this model.
    """
    checkpoint_step(folder)
    state = {"model": get_model_state_dict(model)}
    _read(state, dcp.FileSystemReader(folder), folder)
    set_model_state_dict(model, state["model"])


def _read(state, reader, folder):
    """Fills `state`. ValueError names what the folder lacks, or holds in another shape."""
    try:
        dcp.load(state, storage_reader=reader)
    except CheckpointException as error:
        reason = next(iter(error.failures.values()))[0]
        raise ValueError(f"checkpoint.restore_from={str(folder)!r} is not of this model: {reason}") from error


def _progress(step, data):
    return {key: torch.tensor(value) for key, value in {"step": step, **data}.items()}


def checkpoint_step(folder):
    """The step of a checkpoint folder, from its name; ValueError when it is no whole checkpoint."""
    folder = Path(folder)
    match = _NAME.fullmatch(folder.name)
    if not match or not (folder / ".metadata").is_file():
        raise ValueError(
            f"checkpoint.restore_from={str(folder)!r}: expected a folder called step_<n> that holds .metadata"
        )
    return int(match.group(1))


def _prune(folder, keep):
    if keep is None:
        return
    found = [p for p in folder.iterdir() if _NAME.fullmatch(p.name) and (p / ".metadata").is_file()]
    found.sort(key=lambda p: (p / ".metadata").stat().st_mtime_ns)  # an earlier run may have left later steps
    for path in found[:-keep]:
        shutil.rmtree(path)
