"""Whether a checkpoint's files are what was written, and reading them without running what they say."""

import io
import os
import pickle
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from ..sums import differences

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


def damage(folder, *, shared=False):
    """What is wrong with a folder's files in words, one a file: [] where all are as SHA256SUMS says, None where there
    is no such file.

    shared: all ranks call it; each reads a part of the files, and all get the same answer.
    """
    if not shared:
        return differences(folder)
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, differences(folder, dist.get_rank(), len(parts)))
    known = [part for part in parts if part is not None]
    return [words for part in known for words in part] if known else None


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
