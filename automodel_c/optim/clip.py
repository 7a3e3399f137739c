"""Clip gradients by their common norm over all ranks."""

import torch

from automodel_c import _amcore
from automodel_c.ops import _alloc
from automodel_c.optim.local import is_dtensor, to_local

_SUMSQ_PARTS = 1024  # AM_SUMSQ_PARTS of csrc/adam/clip.h


@torch.no_grad()
def clip_grad_norm_(parameters, max_norm, *, group=None):
    """Scale all gradients by max_norm / norm where their 2-norm exceeds `max_norm`; return the norm.

    parameters: a tensor or an iterable of tensors, plain or DTensor; gradients float32 or bfloat16, dense; a tensor
    that comes twice counts once. Returns the norm before clipping: float32 [] on the gradients' device, the same bits
    on every rank. A DTensor's shards are summed over its mesh, replicated gradients count once, a parameter without a
    gradient or without elements adds 0; every rank must pass the same parameters, and issues the same collectives.
    group: a process group whose ranks each hold other parameters, which it is the norm of all of; they all call it.

    Up to `max_norm` no gradient changes by a bit; nor when the norm is inf or NaN. Squares are summed in float64, where
    those of float32 cannot overflow. Errors: ValueError (max_norm below 0, gradients with gaps), TypeError (a dtype).
    """
    params = [parameters] if isinstance(parameters, torch.Tensor) else list(dict.fromkeys(parameters))
    max_norm = float(max_norm)
    if not max_norm >= 0:
        raise ValueError(f"clip_grad_norm_: max_norm is {max_norm}, at least 0 is needed")
    if not params and group is None:
        return torch.zeros(())
    device = next((p.grad.device for p in params if p.grad is not None), params[0].device if params else "cpu")
    total = torch.zeros(1, dtype=torch.float64, device=device)
    for sharding, members in _by_sharding(params).items():
        total += _sum_of_squares(members, sharding).to(device)
    if group is not None:
        torch.distributed.all_reduce(total, group=group)
    exact = total.sqrt()[0]
    norm = exact.float()
    factor = torch.where(norm.isfinite() & (exact > max_norm), max_norm / exact, 1.0)
    if not (factor.is_cpu and factor == 1.0):
        _scale([p.grad for p in params if p.grad is not None], factor)
    return norm


def _by_sharding(params):
    """Parameters by (mesh, placements), in order of appearance; plain tensors under None."""
    groups = {}
    for p in params:
        groups.setdefault((p.device_mesh, p.placements) if is_dtensor(p) else None, []).append(p)
    return groups


def _sum_of_squares(params, sharding):
    """Of the gradients of parameters that are sharded alike, over all ranks of their mesh: float64 [1]."""
    by_device = {params[0].device: []}
    for p in params:
        if p.grad is not None:
            grad = p.grad
            if sharding and grad.placements != p.placements:
                grad = grad.redistribute(placements=p.placements)
            grad = to_local(grad)
            by_device.setdefault(grad.device, []).append(grad)
    total = torch.zeros(1, dtype=torch.float64, device=params[0].device)
    for device, grads in by_device.items():
        own = _alloc.empty((1,), torch.float64, device)
        _amcore.grad_sumsq(own, _alloc.empty((_SUMSQ_PARTS,), torch.float64, device), grads)
        total += own.to(total.device)
    if sharding is None:
        return total
    mesh, placements = sharding
    total = total.to(mesh.device_type)  # the shards may be offloaded to the host, where the mesh's backend is not
    for dim, placement in enumerate(placements):
        if not placement.is_replicate():
            torch.distributed.all_reduce(total, group=mesh.get_group(dim))
    return total


def _scale(grads, factor):
    locals_ = [to_local(grad) for grad in grads]
    by_device = {}
    for grad in locals_:
        by_device.setdefault(grad.device, []).append(grad)
    for device, members in by_device.items():
        _amcore.scale_(members, factor.to(device))
    torch.autograd.graph.increment_version([*grads, *(t for t, g in zip(locals_, grads, strict=True) if t is not g)])
