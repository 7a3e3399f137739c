"""The one place that knows how FSDP2 keeps its parameter groups (torch 2.11 to 2.13)."""

import torch
from torch.distributed.fsdp import FSDPModule


def units(model):
    """Every FSDP unit of ``model`` (nn.Module), itself included; ValueError when there is none."""
    found = [m for m in model.modules() if isinstance(m, FSDPModule)]
    if not found:
        raise ValueError(f"{type(model).__name__} has no FSDP2 unit: call fully_shard first")
    return found


def param_group(unit):
    """A unit's parameter group, or None where its children hold all its parameters.

    NotImplementedError for a unit with several groups: FSDP2 takes no custom communication there.
    """
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch 2.11
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    if len(groups) > 1:
        raise NotImplementedError(
            f"{type(unit).__name__} has {len(groups)} parameter groups; custom communication needs one a unit"
        )
    return groups[0] if groups else None


def trainable(group):
    """The group's parameters that take a gradient and were gathered at least once."""
    return [p for p in group.fsdp_params if p.sharded_param.requires_grad and hasattr(p, "_unsharded_param")]


def gathered(unit):
    """(numbers, their dtype, those that take a gradient) of a unit's parameters while they are gathered; (0, None, 0)
    without parameters."""
    group = param_group(unit)
    if group is None:
        return 0, None, 0
    dtype = unit._get_fsdp_state()._mp_policy.param_dtype or group.fsdp_params[0].sharded_param.dtype
    numbers = [(p._orig_size.numel(), p.sharded_param.requires_grad) for p in group.fsdp_params]
    return sum(n for n, _ in numbers), dtype, sum(n for n, trained in numbers if trained)


def frees(unit):
    """Whether a unit with parameters frees them after forward; what FSDP2 decides about a root by itself it does at the
    first forward."""
    return param_group(unit).post_forward_mesh_info is not None


class CompleteGradients:
    """Wraps a group's ``post_backward``: before a reduction every trainable parameter has a gradient, of one dtype.

    FSDP2 reduces the gradients that exist. A parameter that one rank did not use would make the ranks' buffers differ,
    and one first used in a later microbatch has another dtype than those accumulated so far. Both are widened here: a
    missing gradient becomes zeros, a fresh one joins the accumulated ones in the reduce dtype.
    """

    def __init__(self, group):
        self.group, self.post_backward = group, group.post_backward

    @classmethod
    def install(cls, group):
        if not isinstance(group.post_backward, cls):
            group.post_backward = cls(group)

    def __call__(self, *unused):
        if self.group.reduce_grads:
            self._complete()
        return self.post_backward(*unused)

    def _complete(self):
        params = trainable(self.group)
        held = any(p.unsharded_accumulated_grad is not None for p in params)
        for p in params:
            if p.unsharded_accumulated_grad is None and p._unsharded_param.grad is None:
                p._unsharded_param.grad = torch.zeros_like(p._unsharded_param)
            if held and p.unsharded_accumulated_grad is None:
                p.to_accumulated_grad_if_needed()


class WideGradients:
    """A `weight_grads` of `ops.moe`: FSDP2's accumulated gradients, float32, of parameters that compute in bf16.

    Backward of a microbatch adds to them without rounding in between; FSDP2 reduces them, or holds them, as it does
    those that it widens itself.
    """

    def __init__(self, params):
        self.params = params

    @classmethod
    def install(cls, model, module_type, names):
        """Gives every module of that type one of its parameters `names`, all trained, as `weight_grads`; their units
        are told to expect such gradients."""
        for group in filter(None, map(param_group, units(model))):
            held = {}
            for p in group.fsdp_params:
                if isinstance(p._module_info.module, module_type) and p.sharded_param.requires_grad:
                    held.setdefault(p._module_info.module, {})[p._module_info.param_name] = p
            for module, params in held.items():
                if params.keys() >= set(names):
                    module.weight_grads = cls([params[name] for name in names])
                    CompleteGradients.install(group)

    def __call__(self):
        """([the local part of each gradient], whether there is something in them)."""
        for p in self.params:
            p.to_accumulated_grad_if_needed()
        accumulate = any(p.unsharded_accumulated_grad is not None for p in self.params)
        for p in self.params:
            if p.unsharded_accumulated_grad is None:
                make = torch.zeros_like if accumulate else torch.empty_like
                p.unsharded_accumulated_grad = make(p._unsharded_param, dtype=torch.float32, requires_grad=False)
        grads = [p.unsharded_accumulated_grad_data for p in self.params]
        return *grads, accumulate
