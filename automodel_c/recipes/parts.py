"""The one place where a recipe takes its optimizer, clipping, gradient reduction and fault handling from."""

from automodel_c.optim import FusedAdamW, clip_grad_norm_
from automodel_c.parallel import faults, install_comm_hooks, set_grad_reduction, sum_gradients

__all__ = ["build_optimizer", "clip_gradients", "guard", "install_reduction", "set_grad_reduction"]

guard = faults.guard


def build_optimizer(parameters, section):
    """The optimizer of a schema.Optimizer section over the fp32 shards."""
    return FusedAdamW(
        parameters, lr=section.lr, betas=tuple(section.betas), eps=section.eps, weight_decay=section.weight_decay
    )


def clip_gradients(parameters, max_norm, group=None):
    """Clips the global gradient norm to max_norm (None: measures only) and returns it, float32 []. group: ranks that
    hold other parameters of the same model."""
    return clip_grad_norm_(parameters, float("inf") if max_norm is None else max_norm, group=group)


def install_reduction(model, device):
    """Makes FSDP2's gradient reduction a plain sum: the loss is already divided by the global label count.

    On the CPU it is ours: parts travel, and are summed in float32 in rank order. On CUDA it stays FSDP2's.
    """
    if device.type == "cpu":
        install_comm_hooks(model)
    sum_gradients(model)
