"""How an operator becomes a torch custom op: torch.compile, meta and fake tensors, and autograd see one call."""

import functools
import operator

import torch

_library = torch.library.Library("automodel_c", "FRAGMENT")
_TENSORS = {torch.Tensor, torch.nn.Parameter}
_NUMBERS = {type(None), bool, int, float, list, tuple}
_keys_of = torch._C._dispatch_keys


def _bits(*names):
    """Dispatch keys as the bits of their set."""
    sets = [torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)).raw_repr() for name in names]
    return functools.reduce(operator.or_, sets)


# of a plain tensor that a kernel is registered for; a negated view, a batch of gradients, say, have more
_PLAIN = _bits("CPU", "CUDA", "AutogradCPU", "AutogradCUDA", "ADInplaceOrView", "AutocastCPU", "AutocastCUDA")


def define(schema, kernel, fake, *, setup=None, backward=None):
    """Register `schema` (name, arguments, results) with its kernel, its fake kernel and its derivative.

    The kernel gets tensors of the CPU or of CUDA: the extension goes by their device and refuses what it has none for.

    `setup` and `backward` are those of `torch.library.register_autograd`; an operator without them, a backward say,
    raises RuntimeError when somebody differentiates through it. Returns the callable.

    The custom op's own way through the dispatcher and autograd costs more than a small kernel. Where nothing but
    autograd has to see the call, the callable goes to the kernel, or to an `autograd.Function` around it, at once.
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
    op = getattr(torch.ops.automodel_c, name).default
    differentiable = _function(name, kernel, setup, backward)

    def call(*arguments):
        if torch.compiler.is_compiling() or _is_watched() or not _are_ordinary(arguments):
            return op(*arguments)
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments):
            return differentiable.apply(*arguments)
        return kernel(*arguments)

    return call


def _is_watched():
    """Whether a mode, a transform, a tracer or the profiler wants to see operators."""
    c = torch._C
    return (
        c._len_torch_dispatch_stack()
        or c._len_torch_function_stack()
        or c._are_functorch_transforms_active()
        or c._autograd._profiler_enabled()
        or c._get_tracing_state() is not None
    )


def _are_ordinary(arguments):
    """Whether they are numbers and plain tensors that a kernel is registered for."""
    for x in arguments:
        kind = type(x)
        if kind in _TENSORS:
            if _keys_of(x).raw_repr() & ~_PLAIN:
                return False
        elif kind not in _NUMBERS:
            return False
    return True


def _function(name, kernel, setup, backward):
    def forward(ctx, *arguments):
        results = kernel(*arguments)
        if setup is not None:
            setup(ctx, arguments, results)
        return results

    parts = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(name, (torch.autograd.Function,), parts)


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
