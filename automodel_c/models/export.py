"""Writes a trained model as a Hugging Face directory."""

from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from ..parallel import uneven
from ..parallel.pipeline import PipelineParallel
from .gates import published_name
from .qwen3_5 import Qwen3_5
from .qwen3_5.checkpoint import save, written_beside
from .qwen3_5.experts import whole_experts


def full_state_dict(model):
    """The whole, unsharded state on the CPU on rank 0 of the default group, {} elsewhere; call it on every rank. Of a
    pipeline the first rank of every stage sends what it holds."""
    pp = model.pp if isinstance(model, Qwen3_5) else PipelineParallel()
    each, rank = dist.get_world_size() // pp.ranks, dist.get_rank()
    state, device = {}, torch.device("cpu")
    for name, tensor in whole_experts(model):
        whole, device = uneven.whole(tensor) if isinstance(tensor, DTensor) else tensor, tensor.device
        if rank % each == 0:
            state[published_name(name)] = whole.detach().cpu().contiguous()
    for source in range(each, dist.get_world_size(), each):
        if rank == source:
            _send(state, device)
        elif rank == 0:
            state |= _receive(source, device)
    return state if rank == 0 else {}


def _send(state, device):
    dist.send_object_list([{key: (x.shape, x.dtype) for key, x in state.items()}], 0, device=device)
    for x in state.values():
        dist.send(x.to(device), 0)


def _receive(source, device):
    told, state = [None], {}
    dist.recv_object_list(told, source, device=device)
    for key, (shape, dtype) in told[0].items():
        x = torch.empty(shape, dtype=dtype, device=device)
        dist.recv(x, source)
        state[key] = x.cpu()
    return state


def export_hf(model, processor, folder):
    """Writes safetensors (keys as in the published checkpoints), config.json and the processor's files: a directory
    that transformers and models.qwen3_5.load read.

    Written beside and renamed: `folder` is whole or as it was. Call it on every rank; rank 0 writes.
    """
    state = full_state_dict(model)
    if dist.get_rank() == 0:
        if isinstance(model, Qwen3_5):
            save(model, folder, state=state, extra=processor.save_pretrained)
        else:
            _write_transformers(model, state, processor, Path(folder))
    dist.barrier()


def _write_transformers(model, state, processor, folder):
    with written_beside(folder) as beside:
        config = model.config
        config.architectures = [_transformers_class(model).__name__]
        save_file(state, beside / "model.safetensors", metadata={"format": "pt"})
        config.save_pretrained(beside)
        processor.save_pretrained(beside)


def _transformers_class(model):
    """The class before FSDP2 mixed itself in."""
    return next(c for c in type(model).__mro__ if c.__module__.startswith("transformers."))
