"""Gradients of bf16 parameters, accumulated over microbatches in float32.

FSDP2 keeps the gradient of a bf16 parameter in bf16 and adds each microbatch's reduction to it, rounding every time:
small contributions vanish. The reduce-scatter keeps the float32 sum and hands FSDP2, each time, the difference between
that sum and what FSDP2 holds. What FSDP2 then holds is the sum to within the last place, after any number of
microbatches.
"""

import torch


class Bf16Shards:
    """The float32 sum [n] of one parameter group's flat shard; ``param_group`` None: never wanted."""

    def __init__(self, param_group):
        self.group = param_group
        self.total = self.shown = None

    def wanted(self):
        """Whether the group's trainable parameters are bf16.

        NotImplementedError where FSDP2 changes our output before it adds it: HSDP, or a division after a sum.
        """
        params = _params(self.group) if self.group else []
        if not params or params[0].sharded_param.dtype != torch.bfloat16:
            return False
        if self.group._is_hsdp:
            raise NotImplementedError("bf16 parameters under HSDP: use float32 parameters and a bf16 param_dtype")
        if self.group.force_sum_reduction_for_comms and self.group.gradient_divide_factor != 1:
            raise NotImplementedError("bf16 parameters with a forced SUM need a gradient divide factor of 1")
        return True

    def accumulate(self, fresh):
        """``fresh`` [n] float32, this microbatch's reduction -> bf16 [n] for FSDP2 to add to its gradient."""
        held = self._held(fresh.numel())
        if held is None:  # the first microbatch of a step
            self.total, self.shown = fresh, fresh.to(torch.bfloat16)
            return self.shown
        if self.shown is None:
            self.total = held.float()
        else:  # else somebody zeroed or scaled the gradients; the host does not wait to learn it
            self.total = torch.where((held == self.shown).all(), self.total, held.float())
        self.total = self.total + fresh
        step = (self.total - held).to(torch.bfloat16)
        self.shown = held + step
        return step

    def _held(self, n):
        """FSDP2's gradients in the layout of the reduce-scatter's output [n] bf16, or None when it has none."""
        params = _params(self.group)
        if all(p.sharded_param.grad is None for p in params):
            return None
        flat = torch.zeros(n, dtype=torch.bfloat16, device=self.group.device)
        at = 0
        for p in params:
            if (grad := p.sharded_param.grad) is not None:
                local = grad.to_local().reshape(-1)
                flat[at : at + local.numel()] = local
            at += p.padded_sharded_param_size.numel()
        return flat


def _params(group):
    return [p for p in group.fsdp_params if p.sharded_param.requires_grad]
