"""The one place where a recipe takes its optimizer, clipping, gradient reduction and fault handling from."""

from ..optim import FusedAdamW, clip_grad_norm_
from ..parallel import faults, install_comm_hooks, sum_gradients
from ..parallel import set_grad_reduction as set_grad_reduction


def build_optimizer(parameters, section):
    """The optimizer of a schema.Optimizer section over the fp32 shards."""
    return FusedAdamW(
        parameters, lr=section.lr, betas=tuple(section.betas), eps=section.eps, weight_decay=section.weight_decay
    )


def clip_gradients(parameters, max_norm):
    """Clips the global gradient norm to max_norm (None: measures only) and returns it as a plain scalar tensor."""
    return clip_grad_norm_(parameters, float("inf") if max_norm is None else max_norm)


def install_reduction(model):
    """Our all-gather and reduce-scatter where they exist, summing: the loss is already divided by the label count."""
    if next(model.parameters()).device.type == "cpu":
        install_comm_hooks(model)
    sum_gradients(model)


def guard():
    """Around a rank's work: when one rank fails, the others raise too, naming it."""
    return faults.guard()
