"""The one place where a recipe takes its optimizer, clipping, gradient reduction and fault handling from."""

from automodel_c.optim import FusedAdamW, clip_grad_norm_
from automodel_c.parallel import faults, install_comm_hooks, megatron, set_grad_reduction, sum_gradients

__all__ = ["build_optimizer", "clip_gradients", "finish_gradients", "guard", "install_reduction", "set_grad_reduction"]

guard, finish_gradients = faults.guard, megatron.finish_gradients


def build_optimizer(model, section):
    """The optimizer of a schema.Optimizer section over the fp32 shards of a model."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = FusedAdamW(
        parameters, lr=section.lr, betas=tuple(section.betas), eps=section.eps, weight_decay=section.weight_decay
    )
    megatron.follow(model, optimizer)
    return optimizer


def clip_gradients(parameters, max_norm, group=None):
    """Clips the global gradient norm to max_norm (None: measures only) and returns it, float32 []. group: ranks that
    hold other parameters of the same model."""
    return clip_grad_norm_(parameters, float("inf") if max_norm is None else max_norm, group=group)


def install_reduction(model, device):
    """Makes FSDP2's gradient reduction a plain sum: the loss is already divided by the global label count.

    On the CPU it is ours: parts travel, and are summed in float32 in rank order. On CUDA it stays FSDP2's. That of
    Megatron-FSDP is a sum as it is.
    """
    if megatron.of(model) is not None:
        return
    if device.type == "cpu":
        install_comm_hooks(model)
    sum_gradients(model)
