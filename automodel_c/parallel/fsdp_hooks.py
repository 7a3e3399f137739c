"""FSDP2's communication, ours: gradients travel as parts and are summed in float32 in rank order.

FSDP2 hands a unit's gradients to the reduce-scatter as one flat buffer of R equal slices, padded where a parameter does
not divide. Each rank receives its slice from everyone (one all-to-all) and adds the R parts with
``_amcore.comm_reduce_parts``; between the GPUs of one machine ``_amcore.comm_sum`` does both, piece by piece. The
result is repeatable to the bit, equals the slice of an all-reduce, and never rounds between two additions, whatever
dtype travels.
"""

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from automodel_c import _amcore
from automodel_c.parallel import nccl
from automodel_c.parallel.bf16_shards import Bf16Shards
from automodel_c.parallel.carry import channel_of, has_nccl
from automodel_c.parallel.fsdp_units import CompleteGradients, param_group, units

gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the latter: torch 2.11


def install_comm_hooks(model, *, wire_dtype=None):
    """Give every FSDP2 unit of ``model`` (nn.Module after ``fully_shard``) our all-gather and reduce-scatter.

    ``wire_dtype``: the dtype in which gradients travel: None (the reduce dtype), torch.float32 or torch.bfloat16. The
    sum is float32 either way. FSDP's op (SUM, AVG, PREMUL_SUM) and gradient divide factor are honoured. HSDP's
    all-reduce stays torch's. Calling it again replaces the hooks.

    From then on a trainable parameter that got no gradient in a reducing backward has a zero gradient, not None: all
    ranks reduce the same buffers, whichever parameters each of them used. bf16 parameters accumulate over microbatches
    in float32 (`Bf16Shards`).

    Raises ValueError (no FSDP unit), TypeError (``wire_dtype``), NotImplementedError (a unit with several parameter
    groups, parameters that are neither on the CPU nor on CUDA). Nothing is changed then.
    """
    if wire_dtype not in (None, torch.float32, torch.bfloat16):
        raise TypeError(f"install_comm_hooks: wire_dtype is {wire_dtype}, not None, torch.float32 or torch.bfloat16")
    pairs = [(unit, group) for unit in units(model) if (group := param_group(unit)) is not None]
    for unit, group in pairs:
        if group.device.type not in ("cpu", "cuda"):
            raise NotImplementedError(
                f"install_comm_hooks: {type(unit).__name__} is on {group.device}; the hooks sum on the CPU and on CUDA"
            )
    for unit, group in pairs:
        unit.set_custom_all_gather(GatherShards())
        unit.set_custom_reduce_scatter(ReduceParts(group, wire_dtype))
        CompleteGradients.install(group)


class _Allocates:
    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)


class GatherShards(_Allocates, AllGather):
    """input [n] of every rank -> output [R * n], in rank order."""

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        return gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class ReduceParts(_Allocates, ReduceScatter):
    """input [R * n] of every rank -> output [n]: this rank's slice of the sum, float32 or bfloat16."""

    def __init__(self, param_group=None, wire_dtype=None):
        self.wire_dtype = wire_dtype
        self.bf16_shards = Bf16Shards(param_group)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        if async_op:
            raise ValueError("ReduceParts: async_op is not supported: the sum is begun before the call returns")
        scale = scale_of(op, group.size())
        sent = input_tensor.to(self.wire_dtype or input_tensor.dtype)
        if self.bf16_shards.wanted():
            total = torch.empty(output_tensor.shape, dtype=torch.float32, device=output_tensor.device)
            _sum_parts(total, sent, group, scale)
            output_tensor.copy_(self.bf16_shards.accumulate(total))
        else:
            _sum_parts(output_tensor, sent, group, scale)
            increment_version(output_tensor)
        return None


def _sum_parts(out, sent, group, scale):
    """out [n] = scale * the sum of every rank's slice for this one, in the order of ranks; sent [R * n]."""
    if sent.is_cuda and 1 < group.size() <= nccl.MOST_RANKS and has_nccl(group):
        channel = channel_of(group, sent.device, "the first reduce-scatter")
        if channel.has_windows:
            channel.sum(out, sent.view(group.size(), -1), scale)
            channel.join(out)
            return
    parts = torch.empty_like(sent)
    dist.all_to_all_single(parts, sent, group=group)
    _amcore.comm_reduce_parts(out, parts.view(group.size(), -1), scale=scale)


def scale_of(op, world):
    """The factor (float) by which a reduction of ``op`` over ``world`` ranks multiplies the sum.

    ``op``: ReduceOp.SUM, AVG, or a PREMUL_SUM with a number. NotImplementedError for any other.
    """
    if op == dist.ReduceOp.SUM:
        return 1.0
    if op == dist.ReduceOp.AVG:
        return 1.0 / world
    if op == dist.ReduceOp.PREMUL_SUM:
        _, factor = op.__getstate__()  # the factor has no other reader in torch 2.11 to 2.13
        return float(factor)
    raise NotImplementedError(f"the reduce-scatter sums: SUM, AVG and PREMUL_SUM are supported, not {op}")
