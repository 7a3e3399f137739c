"""Tensor parallelism: the ranks of a group split the heads of attention and the width of MLPs, and between these the
rows of the token axis.

A rank's rows are the contiguous `own` part. Where a weight is split all rows come together (`gather`), and what each
rank makes of them with its part of the weight is summed while the rows go home (`scatter`). A weight that is whole on
every rank sees a rank's rows, or its heads, alone: its gradient is this rank's part, and parts sum over the group.
"""

import functools
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.graph import increment_version
from torch.distributed import _symmetric_memory as symmetric
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group

from automodel_c import _amcore

from .fsdp_hooks import gather_single

_traced = torch.ops._c10d_functional  # what torch.compile sees of collectives


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
        return x if self.group is None else _Gather.apply(x, self.ranks, self.group.group_name)

    def scatter(self, x):
        """The sum over ranks of x [R n, ..], of which each rank gets its own rows [n, ..]."""
        return x if self.group is None else _Scatter.apply(x, self.ranks, self.group.group_name)

    def products(self, x, weights, asynchronous=False):
        """[all rows of x [n, H] times a split weight [m, H]] of every weight. asynchronous: see `compiled`."""
        return (compiled(_joined_products) if asynchronous else _products)(x, weights, self)

    def send_in_pieces(self):
        """Has the ranks' memory seen by each other, without which `compiled` cuts nothing; on CUDA, called by all."""
        if self.mesh is None or self.mesh.device_type != "cuda":
            return
        with warnings.catch_warnings():  # needless, it says; Inductor's pass goes by whether it was called
            warnings.simplefilter("ignore", FutureWarning)
            symmetric.enable_symm_mem_for_group(self.group.group_name)

    def product(self, x, weight, asynchronous=False):
        """x [R n, m], this rank's part of the channels, times its part [H, m] of a weight: its own rows of the sum."""
        return (compiled(_product) if asynchronous else _product)(x, weight, self)


@functools.cache
def compiled(function):
    """A function of tensors by torch.compile, where Inductor cuts gathers and the products behind them, and products
    and the sums behind them, into pieces that run at the same time. It does so on CUDA, in groups of which
    `TensorParallel.send_in_pieces` was called, where rows are added in their own dtype; elsewhere it leaves them as
    they are."""
    return torch.compile(function, options={"_micro_pipeline_tp": True})


def _products(x, weights, tp):
    x = tp.gather(x)
    return [F.linear(x, weight) for weight in weights]


def _joined_products(x, weights, tp):
    """One product, so that its gradient is one too and the sum over ranks stands right behind it."""
    return F.linear(tp.gather(x), torch.cat(weights)).split([len(weight) for weight in weights], -1)


def _product(x, weight, tp):
    return tp.scatter(F.linear(x, weight))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, ranks, name):
        ctx.of = ranks, name
        return gather_rows(x, ranks, name)

    @staticmethod
    def backward(ctx, grad):
        return sum_rows(grad, *ctx.of), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, ranks, name):
        ctx.of = ranks, name
        return sum_rows(x, ranks, name)

    @staticmethod
    def backward(ctx, grad):
        return gather_rows(grad, *ctx.of), None, None


def gather_rows(x, ranks, name):
    """x [n, ..] of every rank of the group of that name -> [R n, ..], in rank order."""
    if torch.compiler.is_compiling():
        return _traced.wait_tensor(_traced.all_gather_into_tensor(x.contiguous(), ranks, name))
    whole = x.new_empty(ranks * x.shape[0], *x.shape[1:])
    gather_single(whole, x.contiguous(), group=_resolve_process_group(name))
    return whole


def sum_rows(x, ranks, name):
    """x [R n, ..] of every rank of the group of that name -> this rank's rows [n, ..] of the sum, added in float32 in
    rank order."""
    if torch.compiler.is_compiling():
        return _traced.wait_tensor(_traced.reduce_scatter_tensor(x.contiguous(), "sum", ranks, name))
    parts = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(parts, x.contiguous(), group=_resolve_process_group(name))
    total = x.new_empty(x.shape[0] // ranks, *x.shape[1:])
    _amcore.comm_reduce_parts(total.view(-1), parts.view(ranks, -1), scale=1.0)
    increment_version(total)
    return total
