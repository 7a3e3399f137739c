"""The gate and the peers that benchmarks of differentiable operators share."""

import torch

from tests.numerics import assert_as_good_as


def forward_backward(function, inputs, upstream):
    """A call that runs the operator on leaves and returns outputs and gradients."""
    leaves = [x.detach().requires_grad_() if x.is_floating_point() else x for x in inputs]
    wanted = [x for x in leaves if x.requires_grad]

    def run():
        outputs = function(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return [*(y.detach() for y in outputs), *torch.autograd.grad(outputs, wanted, upstream)]

    return run


def forward(function, inputs):
    """A call without gradients."""

    def run():
        with torch.no_grad():
            outputs = function(*inputs)
        return list(outputs) if isinstance(outputs, tuple) else [outputs]

    return run


def gate_by_rule(oracle, inputs, upstream=None):
    """Ours against float64, with the torch peer as the plain twin; gradients too when `upstream` is given."""
    wide = [x.double() if x.is_floating_point() else x for x in inputs]
    truth = forward(oracle, wide) if upstream is None else forward_backward(oracle, wide, upstream)

    def gate(outcomes):
        rows = zip(outcomes["ours"], outcomes["torch"], truth(), strict=True)
        return [assert_as_good_as(a, b, c.double(), name=f"part {i}") for i, (a, b, c) in enumerate(rows)]

    return gate
