"""The part of a tensor that this rank holds."""

import torch

try:
    from torch.distributed.tensor import DTensor
except ImportError:  # torch built without distributed: there are no DTensors to meet
    DTensor = ()


def is_dtensor(tensor):
    return isinstance(tensor, DTensor)


def to_local(tensor):
    """The plain tensor behind `tensor`, memory shared: a DTensor's own shard, waited for. Called under no_grad."""
    if not isinstance(tensor, DTensor):
        return tensor
    local = tensor.to_local()
    return local.wait() if hasattr(local, "wait") else local


def host_scalar(value, device):
    """`value` (number, tensor or DTensor of one element) as a float32 tensor on `device`; None stays None."""
    if value is None:
        return None
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return torch.as_tensor(value, dtype=torch.float32, device=device)
