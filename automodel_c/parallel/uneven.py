"""DTensors of which ranks hold uneven runs of rows, as Megatron-FSDP cuts them.

torch works out from a DTensor's placement where a rank's shard lies, which is wrong here: a rank may hold any rows, or
none. So a shard carries its place, which torch's checkpoints ask a shard for before they work it out.
"""

import functools

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

_PLACE = "_amcore_place"


def place(tensor, offsets):
    """Notes that this rank's shard of a DTensor begins at `offsets` (ints, one an axis) of the whole."""
    local = tensor._local_tensor
    chunk = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=local.size())
    setattr(local, _PLACE, tuple(offsets))
    local.__create_chunk_list__ = lambda: [chunk] if local.numel() else []
    local.__create_write_items__ = functools.partial(_write_items, chunk)


def place_of(tensor):
    """The offsets that `place` noted, None for a tensor without."""
    return getattr(getattr(tensor, "_local_tensor", None), _PLACE, None)


def follow(tensor, other):
    """`tensor`, a DTensor cut as `other` is, at the same place; anything else as it is."""
    offsets = place_of(other)
    if offsets is not None and hasattr(tensor, "_local_tensor"):
        place(tensor, offsets)
    return tensor


@torch.no_grad()
def whole(tensor):
    """All of a DTensor, the same bits on every rank; all ranks of its mesh call it."""
    offsets = place_of(tensor)
    if offsets is None:
        return tensor.full_tensor()
    local = tensor.to_local()
    found = torch.zeros(tensor.shape, dtype=local.dtype, device=local.device)
    found[tuple(slice(o, o + n) for o, n in zip(offsets, local.shape, strict=True))] = local
    for dim, placement in enumerate(tensor.placements):
        if not placement.is_replicate():  # nobody else has a byte where one rank has one that is not 0
            dist.all_reduce(found.view(-1).view(torch.uint8), group=tensor.device_mesh.get_group(dim))
    return found


def _write_items(chunk, name, tensor):
    local = tensor.to_local()
    if not local.numel():
        return []
    data = TensorWriteData(chunk=chunk, properties=TensorProperties.create_from_tensor(local), size=tensor.size())
    return [WriteItem(index=MetadataIndex(name, chunk.offsets), type=WriteItemType.SHARD, tensor_data=data)]
