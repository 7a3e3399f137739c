"""Whether a folder's files are what was written, and reading them without running what they say.

A folder that this package wrote has SHA256SUMS in it, in the format of `sha256sum`, which checks it too.
"""

import hashlib
import io
import os
import pickle
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

SUMS = "SHA256SUMS"
UNREADABLE = (OSError, ValueError, EOFError, LookupError, TypeError, AttributeError, pickle.UnpicklingError)
_DCP = "torch.distributed.checkpoint"
_NAMED = {  # by a .metadata of torch.distributed.checkpoint, besides dtypes
    *((f"{_DCP}.metadata", name) for name in (
        "Metadata", "MetadataIndex", "StorageMeta", "BytesStorageMetadata", "TensorStorageMetadata",
        "ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING",
    )),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
}  # fmt: skip


def sums_of(folder, names):
    """[(name, SHA-256 in hexadecimal)] of files of a folder."""
    return [(name, _digest(Path(folder) / name)) for name in names]


def write_sums(folder, sums):
    """Writes SHA256SUMS of (name, sum) pairs."""
    lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(sums))
    (Path(folder) / SUMS).write_text(lines, encoding="utf-8")


def read_sums(folder):
    """{name: sum} as SHA256SUMS says, None where there is none. ValueError where it says something else."""
    path, sums = Path(folder) / SUMS, {}
    if not path.is_file():
        return None
    for number, line in enumerate(path.read_bytes().decode("utf-8", "replace").splitlines(keepends=True), start=1):
        digest, two_spaces, name = line.removesuffix("\n").partition("  ")
        if len(digest) != 64 or not two_spaces or not name or "/" in name or not line.endswith("\n"):
            raise ValueError(f"{path}, line {number}: no SHA-256 sum of a file")
        sums[name] = digest
    return sums


def damage(folder, *, shared=False):
    """What is wrong with a folder's files in words, one a file: [] where all are as SHA256SUMS says, None where there
    is no such file.

    shared: all ranks call it; each reads a part of the files, and all get the same answer.
    """
    rank, world = (dist.get_rank(), dist.get_world_size()) if shared else (0, 1)
    try:
        sums = read_sums(folder)
        found = None if sums is None else _differences(Path(folder), sums, rank, world)
    except (OSError, ValueError) as error:
        found = [str(error)] if rank == 0 else []
    if not shared:
        return found
    parts = [None] * world
    dist.all_gather_object(parts, found)
    known = [part for part in parts if part is not None]
    return [words for part in known for words in part] if known else None


def _differences(folder, sums, rank, world):
    """Those that the `rank`-th of `world` shares of the files, listed or there, show."""
    there = {path.name for path in folder.iterdir()} - {SUMS}
    found = [_difference(folder, name, sums.get(name)) for name in sorted(there | set(sums))[rank::world]]
    return [words for words in found if words]


def _difference(folder, name, digest):
    if digest is None:
        return f"{name} is not in {SUMS}"
    try:
        return "" if _digest(folder / name) == digest else f"{name} is not what was written"
    except OSError as error:
        return f"{name}: {error.strerror}"


def _digest(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Reader(dcp.FileSystemReader):
    """Reads .metadata, which is a pickle, with the classes alone that a checkpoint is described with."""

    def read_metadata(self, *args, **kwargs):
        if kwargs.get("rank") is not None:  # a file a rank, which this package does not write
            raise ValueError(f"{self.path}: one .metadata is read, of all ranks")
        with open(Path(self.path) / ".metadata", "rb") as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, dcp.metadata.Metadata):
            raise ValueError(f"{self.path}: .metadata holds {type(metadata).__name__}")
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = dcp.metadata.StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        _check_paths(self.path, metadata.storage_data)
        return metadata


class Planner(DefaultLoadPlanner):
    """Reads what is no tensor as torch reads weights: numbers, strings and containers of them, no other pickle."""

    def load_bytes(self, read_item, value):
        plain = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), plain)  # again, for torch's planner would take any pickle
        plain.seek(0)
        super().load_bytes(read_item, plain)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module, name):
        if (module, name) in _NAMED or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f".metadata names {module}.{name}, which no checkpoint is described with")


def _check_paths(folder, storage):
    root = os.path.realpath(folder)
    for info in storage.values():
        if os.path.dirname(os.path.realpath(os.path.join(root, info.relative_path))) != root:
            raise ValueError(f"{folder}: .metadata names {info.relative_path!r}, which is no file of the folder")
