"""When FSDP2 reduces gradients, and whether it sums or averages them."""

from automodel_c.parallel import megatron
from automodel_c.parallel.fsdp_units import units


def set_grad_reduction(model, per_microbatch):
    """Choose what the following backwards of ``model`` (nn.Module after ``fully_shard``) do with their gradients.

    ``per_microbatch`` True: every following backward reduces into the sharded gradients (float32 where the parameters
    are) and no full-size gradient outlives it. False: the following backwards hold full-size gradients, in the reduce
    dtype, and communicate nothing; parameters stay gathered in between.

    Per microbatch: call once with True. Deferred: call with False before the first microbatch of a step, and with True
    before its last. The gradients are the same up to rounding. Under Megatron-FSDP the way was settled when the model
    was sharded, and this tells it which microbatch is the last. ValueError without an FSDP unit, TypeError for no bool.
    """
    if not isinstance(per_microbatch, bool):
        raise TypeError(f"set_grad_reduction: per_microbatch is {per_microbatch!r}, a bool is needed")
    if (shards := megatron.of(model)) is not None:
        return shards.reduce(per_microbatch)
    for unit in units(model):
        unit.set_is_last_backward(per_microbatch)
        unit.set_reshard_after_backward(per_microbatch, recurse=False)
        unit.set_requires_gradient_sync(per_microbatch, recurse=False)


def sum_gradients(model):
    """Make every FSDP2 unit of ``model`` sum gradients over the data-parallel ranks instead of averaging them.

    For losses that are already divided by the label count of the whole batch: nothing needs to be scaled back up. It
    covers HSDP's all-reduce, and works with FSDP2's own reduce-scatter as with ours. ValueError without an FSDP unit.
    """
    for unit in units(model):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


def grad_reduction_from_config(defer_fsdp_grad_sync=None, reduce_grad_per_microbatch=None):
    """``per_microbatch`` (bool) from the recipe's two keys, each True, False or None (not given).

    ``distributed.defer_fsdp_grad_sync`` (default True) and ``pipeline.reduce_grad_per_microbatch`` say the same thing
    inversely. ValueError when both are given and disagree, TypeError for anything but a bool or None.
    """
    given = {"defer_fsdp_grad_sync": defer_fsdp_grad_sync, "reduce_grad_per_microbatch": reduce_grad_per_microbatch}
    for key, value in given.items():
        if value is not None and not isinstance(value, bool):
            raise TypeError(f"{key} is {value!r}, a bool is needed")
    if None not in given.values() and defer_fsdp_grad_sync == reduce_grad_per_microbatch:
        raise ValueError(
            "distributed.defer_fsdp_grad_sync and pipeline.reduce_grad_per_microbatch are both "
            f"{defer_fsdp_grad_sync}: each is the other's inverse, so give one"
        )
    if reduce_grad_per_microbatch is not None:
        return reduce_grad_per_microbatch
    return defer_fsdp_grad_sync is False
