"""Checkpoints that resume a run: model, optimizer, random numbers, position in the data.

A folder of checkpoints holds step_<n> folders, whole ones alone, and two files that name one of them: LATEST the one
that was finished last, LOWEST_VAL the one whose held-out loss was lowest of those that were evaluated when they were
saved. A step folder has the sums of its files in SHA256SUMS: before one is read they are checked.
"""

import concurrent.futures
import contextlib
import json
import logging
import math
import os
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
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from ..models.qwen3_5.checkpoint import take_place
from ..parallel import faults, megatron, uneven
from ..sums import SUMS, sums_of, write_sums
from . import integrity
from .runtime import rng_state, set_rng_state

POINTERS = ("LATEST", "LOWEST_VAL")
_NAME = re.compile(r"step_(\d+)")
_LAST_S = 20.0  # a rank that fails is to be told of within 30
_HELD_OUT = "held_out.json"  # of a step folder: its evaluation
_log = logging.getLogger(__name__)


class Checkpoints:
    """Writes the checkpoints of a run into `folder`; made, and every method called, on every rank alike.

    keep: how many of the newest stay; the one with the lowest held-out loss stays besides.
    background: whether a thread writes, from a copy on the host, while training goes on. A write that failed is raised
    by the next `save` or `wait`, on all ranks, and what was written before is as it was.
    """

    def __init__(self, folder, runtime, *, keep=None, background=False):
        self.folder, self.runtime, self.keep = Path(folder), runtime, keep
        self._writer = concurrent.futures.ThreadPoolExecutor(1, "checkpoint") if background else None
        # of its own, so that the thread's messages do not meet those of training
        self._group = dist.new_group(backend="gloo") if background else None
        self._writing = None
        self.saved = None  # the step of the last `save`

    def save(self, step, model, optimizer, *, data, held_out=None):
        """Writes <folder>/step_<step>, or begins to; returns that path.

        Written beside and renamed, so that whatever is called step_<n> is whole. data: integers by name that, with the
        step, tell the position in the data (the learning rate needs the step alone). held_out: the loss on held-out
        data, where it was found at this step.
        """
        self.wait()
        final, beside = self.folder / f"step_{step}", self.folder / f".step_{step}.tmp"
        if self.runtime.is_main:
            self.folder.mkdir(parents=True, exist_ok=True)
            for left in self.folder.glob(".step_*.tmp"):  # by a run that was killed
                shutil.rmtree(left, ignore_errors=True)
        dist.barrier()
        model_state, optimizer_state = _states(model, optimizer)
        state = {
            "model": model_state,
            "optimizer": optimizer_state,
            "progress": _progress(step, data),
            "rng": {str(self.runtime.rank): rng_state(self.runtime.device)},
        }
        if self._writer is None:
            self._write(state, final, beside, held_out)
            dist.barrier()
        else:
            state = tree_map(_copied, state)
            self._writing = self._writer.submit(self._write, state, final, beside, held_out)
        self.saved = step
        return final

    def wait(self):
        """Until the write that was begun is done; raises what it raised, on every rank, whose alone it may be."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        error, told = writing.exception(), [None] * self.runtime.world
        dist.all_gather_object(told, error and f"{type(error).__name__}: {error}", group=self._group)
        if error is not None:
            raise error
        for rank, message in enumerate(told):
            if message:
                raise faults.RankFailure(rank, message)

    def close(self, *, failed=False):
        """After the last `save`: waits, and ends the thread. Raises what the last write raised; not where the run has
        `failed`, when the write has _LAST_S to end well."""
        try:
            if not failed:
                self.wait()
            elif self._writing is not None:
                concurrent.futures.wait([self._writing], _LAST_S)
        finally:
            if self._writer is not None:
                self._writer.shutdown(wait=not failed)

    def _write(self, state, final, beside, held_out):
        try:  # all ranks return when all have written
            dcp.save(state, checkpoint_id=beside, process_group=self._group)
        except CheckpointException as error:
            rank, (reason, _) = next(iter(error.failures.items()))
            raise RuntimeError(f"{final} was not written: rank {rank}: {type(reason).__name__}: {reason}") from error
        sums = self._sums(beside)
        if self.runtime.is_main:
            if held_out is not None:
                _write_text(beside / _HELD_OUT, json.dumps({"loss": held_out}))
                sums += sums_of(beside, [_HELD_OUT])
            write_sums(beside, sums)
            _sync(beside / SUMS)
            take_place(beside, final)
            _sync(self.folder)  # before anything names it
            _point(self.folder, "LATEST", final.name)
            lowest = _lowest(self.folder)
            if lowest is not None:
                _point(self.folder, "LOWEST_VAL", lowest.name)
            _prune(self.folder, self.keep, lowest)

    def _sums(self, folder):
        """The sums of a checkpoint's files on the main rank, a part found by each rank; [] on the others."""
        rank, world = self.runtime.rank, self.runtime.world
        told, error = [None], None
        try:
            told = [sorted(p.name for p in folder.iterdir()) if self.runtime.is_main else None]
        except OSError as failed:
            told = [f"{folder} cannot be read again: {type(failed).__name__}: {failed}"]
        dist.broadcast_object_list(told, src=0, group=self._group)
        if isinstance(told[0], str):
            raise RuntimeError(told[0])
        try:
            part = sums_of(folder, told[0][rank::world])
        except OSError as failed:  # on the main rank it is raised, which tells the others
            part, error = [], f"{type(failed).__name__}: {failed}"
        parts = [None] * world if self.runtime.is_main else None
        dist.gather_object((part, error), parts, dst=0, group=self._group)
        for number, (_, failed) in enumerate(parts or ()):
            if failed:
                raise RuntimeError(f"{folder} cannot be read again: rank {number}: {failed}")
        return [pair for part, _ in parts or () for pair in part]


def save_checkpoint(folder, step, model, optimizer, runtime, *, data, keep=None):
    """`Checkpoints.save` once, without a thread."""
    return Checkpoints(folder, runtime, keep=keep).save(step, model, optimizer, data=data)


def _states(model, optimizer):
    """Of both, as checkpoints hold them."""
    megatron.rest(model)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    megatron.place_states(model, optimizer_state["state"])
    return model_state, optimizer_state


def _copied(value):
    """A copy on the host that nothing else writes to."""
    if isinstance(value, DTensor):  # from_local would move the copy to the mesh's device
        return uneven.follow(DTensor(_copied(value.to_local()), value._spec, requires_grad=False), value)
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


def _point(folder, pointer, name):
    beside = folder / f".{pointer}.tmp"
    _write_text(beside, name + "\n")
    beside.replace(folder / pointer)
    _sync(folder)


def _write_text(path, text):
    """Writes a file that is on the disk when this returns."""
    path.write_text(text)
    _sync(path)


def _sync(path):
    """Has the disk take a file, or the names in a folder."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _lowest(folder):
    """The step folder with the lowest held-out loss, the newest of equals; None where no loss is known."""
    found = []
    for path in _whole(folder):
        with contextlib.suppress(OSError, ValueError, KeyError):
            found.append((json.loads((path / _HELD_OUT).read_text())["loss"], path))
    found = [of for of in found if not math.isnan(of[0])]
    return min(reversed(found), key=lambda of: of[0], default=(None, None))[1]


def load_checkpoint(folder, model, optimizer, runtime, *, data):
    """Restores what was saved into `folder`, on the same or another number of ranks. Returns the step.

    The optimizer's settings (rate, betas, eps, decay) stay what they are; its state is the saved one.
    Ranks that the saved run did not have keep their generators as they are. ValueError when the folder holds no
    .metadata, its name holds no step, or `data` is not what was saved.
    """
    folder = Path(folder)
    step = checkpoint_step(folder)
    reader = integrity.Reader(folder)
    saved = _described(reader, folder)
    model_state, optimizer_state = _states(model, optimizer)
    # settings stay what they are, and what they name of parameters may be another stage's of a pipeline
    state = {"model": model_state, "optimizer": {"state": optimizer_state["state"]}, "progress": _progress(0, data)}
    rank = str(runtime.rank)
    if any(key.startswith(f"rng.{rank}.") for key in saved):
        state["rng"] = {rank: rng_state(runtime.device)}
    _read(state, reader, folder)
    settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=optimizer_state | state["optimizer"]
    )
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
    """Restores only the model of what was saved into the step folder `folder`; call it on every rank.

    ValueError when it is no whole checkpoint, or not one of this model.
    """
    checkpoint_step(folder)
    megatron.rest(model)
    state = {"model": get_model_state_dict(model)}
    reader = integrity.Reader(folder)
    _described(reader, folder)
    _read(state, reader, folder)
    set_model_state_dict(model, state["model"])


def _described(reader, folder):
    """What a checkpoint holds, by name. ValueError where .metadata does not say it, and nothing else."""
    try:
        return reader.read_metadata().state_dict_metadata
    except integrity.UNREADABLE as error:
        raise ValueError(f"checkpoint.restore_from={str(folder)!r}: {type(error).__name__}: {error}") from error


def _read(state, reader, folder):
    """Fills `state`. ValueError names what the folder lacks, or holds in another shape."""
    try:
        dcp.load(state, storage_reader=reader, planner=integrity.Planner())
    except CheckpointException as error:
        reason = next(iter(error.failures.values()))[0]
        raise ValueError(f"checkpoint.restore_from={str(folder)!r} is not of this model: {reason}") from error


def _progress(step, data):
    return {key: torch.tensor(value) for key, value in {"step": step, **data}.items()}


def checkpoints_of(recipe):
    """The folder of a run's checkpoints."""
    return Path(recipe.checkpoint.checkpoint_dir or Path(recipe.output_dir) / "checkpoints")


def step_folder(path, checkpoints=None):
    """The step folder that `path` means: itself, or what the pointer LATEST or LOWEST_VAL there names; the bare name
    of a pointer is one of the folder `checkpoints`.

    ValueError for a pointer that is not there.
    """
    path = Path(path)
    if path.name not in POINTERS:
        return path
    if str(path) == path.name and checkpoints is not None:
        path = Path(checkpoints) / path
    try:
        return path.parent / path.read_text().strip()
    except OSError as error:
        raise ValueError(f"checkpoint.restore_from={str(path)!r}: {error.strerror}") from None


def sound_folder(path, checkpoints=None):
    """The step folder that `path` means, its files checked by all ranks, which all call this: of LATEST, where that
    one is damaged, the newest of those before it that is not, with a warning.

    ValueError says what is damaged, and which is not.
    """
    folder = step_folder(path, checkpoints)
    latest = Path(path).name == "LATEST"
    if not folder.is_dir() and not latest:
        return folder  # whoever reads it says so
    found = integrity.damage(folder, shared=True) if folder.is_dir() else ["there is no such folder"]
    if found is None:
        _log.warning("%s has no %s: its files are not checked", folder, SUMS)
    if not found:
        return folder
    words = f"{folder} is damaged: {'; '.join(found[:4])}{' and more' * (len(found) > 4)}"
    older = next((other for other in _older(folder) if integrity.damage(other, shared=True) == []), None)
    if older is None or not latest:
        offer = f"; {older.name} is not" if older else ""
        raise ValueError(f"checkpoint.restore_from={str(path)!r}: {words}{offer}")
    _log.warning("%s; going on from %s", words, older.name)
    return older


def _older(folder):
    """The step folders beside one, newest first, but for those that were finished after it."""
    others = _whole(folder.parent)[::-1]
    return others[others.index(folder) + 1 :] if folder in others else others


def checkpoint_step(folder):
    """The step of a checkpoint folder, from its name; ValueError when it is no whole checkpoint."""
    folder = Path(folder)
    match = _NAME.fullmatch(folder.name)
    if not match or not (folder / ".metadata").is_file():
        raise ValueError(
            f"checkpoint.restore_from={str(folder)!r}: expected a folder called step_<n> that holds .metadata"
        )
    return int(match.group(1))


def _whole(folder):
    """The step folders, oldest first: an earlier run may have left later steps."""
    found = [p for p in folder.iterdir() if _NAME.fullmatch(p.name) and (p / ".metadata").is_file()]
    return sorted(found, key=lambda p: (p / ".metadata").stat().st_mtime_ns)


def _prune(folder, keep, spared=None):
    for path in _whole(folder)[:-keep] if keep else ():
        if path != spared:
            going = path.with_name(f".{path.name}.tmp")  # no longer called a step while it is half there
            path.rename(going)
            shutil.rmtree(going)
