"""How an operator becomes a torch custom op: torch.compile, meta and fake tensors, and autograd see one call."""

import torch

_library = torch.library.Library("automodel_c", "FRAGMENT")


def define(schema, kernel, fake, *, setup=None, backward=None):
    """Register `schema` (name, arguments, results) with its kernel, its fake kernel and its derivative.

    The kernel gets tensors of the CPU or of CUDA: the extension goes by their device and refuses what it has none for.

    `setup` and `backward` are those of `torch.library.register_autograd`; an operator without them, a backward say,
    raises RuntimeError when somebody differentiates through it. Returns the callable.
    """
    name = schema.split("(", 1)[0]
    qualified = f"automodel_c::{name}"
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for device in ("CPU", "CUDA"):
        _library.impl(name, kernel, device)
    torch.library.register_fake(qualified, fake, lib=_library)
    if backward is None:
        backward, setup = _refuse(name), None
    torch.library.register_autograd(qualified, backward, setup_context=setup, lib=_library)
    return getattr(torch.ops.automodel_c, name).default


def require_tensors(name, **arguments):
    """TypeError naming the first argument that is not a torch tensor, ValueError the first on another device.

    The device is checked here because torch would run the fake kernel as soon as one tensor is a meta tensor.
    """
    for argument, value in arguments.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name}: argument '{argument}' must be a torch tensor, not {type(value).__name__}")
    (first, where), *others = arguments.items()
    for argument, value in others:
        if value.device != where.device:
            raise ValueError(f"{name}: {argument} is on {value.device}, {first} on {where.device}")


def _refuse(name):
    def backward(ctx, *grads):
        raise RuntimeError(f"{name}: a second derivative is not implemented")

    return backward
