"""Tensor parallelism: the ranks of a group split the heads of attention and the width of MLPs, and between these the
rows of the token axis.

A rank's rows are the contiguous `own` part. Where a weight is split all rows come together (`gather`), and what each
rank makes of them with its part of the weight is summed while the rows go home (`scatter`). A weight that is whole on
every rank sees a rank's rows, or its heads, alone: its gradient is this rank's part, and parts sum over the group.
"""

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh

from automodel_c import _amcore

_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the latter: torch 2.11


class TensorParallel:
    """The ranks that share the split weights of a model. `mesh`: their DeviceMesh of one dimension, None for one."""

    def __init__(self, mesh=None):
        if mesh is not None and not isinstance(mesh, DeviceMesh):
            raise TypeError(f"TensorParallel: mesh must be a DeviceMesh or None, not {type(mesh).__name__}")
        if mesh is not None and mesh.ndim != 1:
            raise ValueError(f"TensorParallel: mesh has {mesh.ndim} dimensions, 1 is needed")
        self.ranks, self.rank = (1, 0) if mesh is None else (mesh.size(), mesh.get_local_rank())
        self.mesh = mesh if self.ranks > 1 else None
        self.group = None if self.mesh is None else mesh.get_group()

    def __repr__(self):
        return f"TensorParallel(rank {self.rank} of {self.ranks})"

    def __deepcopy__(self, memo):
        return self  # a copy of a model is over the same ranks

    def own(self, x, dim=0):
        """This rank's rows of x, whose `dim` the ranks divide; None of None."""
        if self.group is None or x is None:
            return x
        rows = x.shape[dim] // self.ranks
        return x.narrow(dim, self.rank * rows, rows)

    def gather(self, x):
        """Every rank's x [n, ..] -> all rows [R n, ..]; a row's gradient is the sum of all ranks'."""
        return x if self.group is None else _Gather.apply(x, self.group)

    def scatter(self, x):
        """The sum over ranks of x [R n, ..], of which each rank gets its own rows [n, ..]."""
        return x if self.group is None else _Scatter.apply(x, self.group)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return gather_rows(x, group)

    @staticmethod
    def backward(ctx, grad):
        return sum_rows(grad, ctx.group), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return sum_rows(x, group)

    @staticmethod
    def backward(ctx, grad):
        return gather_rows(grad, ctx.group), None


def gather_rows(x, group):
    """x [n, ..] of every rank -> [R n, ..], in rank order."""
    whole = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
    _gather_single(whole, x.contiguous(), group=group)
    return whole


def sum_rows(x, group):
    """x [R n, ..] of every rank -> this rank's rows [n, ..] of the sum, added in float32 in rank order."""
    parts = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(parts, x.contiguous(), group=group)
    total = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    _amcore.comm_reduce_parts(total.view(-1), parts.view(group.size(), -1), scale=1.0)
    increment_version(total)
    return total
