"""Offsets that 31 bits do not hold: rows that lie 2^31 elements apart give the bits of rows that lie together.

Only the rows that are touched cost memory.
"""

import pytest
import torch

import automodel_c as amc
from automodel_c import _amcore

BF16, ROWS = torch.bfloat16, 5
STEP = (1 << 31) // (ROWS - 1) + 64  # the last row begins beyond 2^31


def apart(x):
    """`x` with `STEP` elements from row to row."""
    inner = x[0].numel()
    memory = torch.empty((ROWS - 1) * STEP + inner, dtype=x.dtype)
    return memory.as_strided(x.shape, (STEP, *x.contiguous().stride()[1:])).copy_(x)


def run(function, inputs):
    """Outputs and gradients; the leaves keep their strides. The gradient of an output that is far apart is too."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    far = inputs[0].stride(0) == STEP
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(y.shape, generator=generator).to(y.dtype) for y in outputs]
    upstream = [apart(g) if far and g.ndim else g for g in upstream]
    return [y.detach() for y in outputs] + list(torch.autograd.grad(outputs, leaves, upstream))


def drawn(*shapes):
    return [torch.randn(shape).to(BF16) for shape in shapes]


X, W = (ROWS, 48), (48,)
CASES = {
    "rms_norm": (amc.ops.rms_norm, [X, W], 1),
    "residual": (lambda x, r, w: amc.ops.rms_norm(x, w, residual=r), [X, X, W], 2),
    "gated_rms_norm": (amc.ops.gated_rms_norm, [X, X, W], 2),
    "layer_norm": (amc.ops.layer_norm, [X, W, W], 1),
    "swiglu": (amc.ops.swiglu, [X], 1),
    "swiglu-two": (amc.ops.swiglu, [X, X], 2),
    "sigmoid_gate": (amc.ops.sigmoid_gate, [X, X], 2),
    "gelu": (amc.ops.gelu, [X], 1),
    "gelu-tanh": (lambda x: amc.ops.gelu(x, "tanh"), [X], 1),
    "causal_conv1d": (lambda x, w: amc.ops.causal_conv1d(x, w)[0], [X, (48, 4)], 1),
    "gdn_gate": (lambda a, b, *v: amc.ops.gdn_gate(a, b, *(x.float() for x in v)), [X, X, W, W], 2),
    "mrope": (
        lambda q, k: amc.ops.mrope(q, k, torch.arange(ROWS), rotary_dim=8, theta=1e4, section=[2, 1, 1]),
        [(ROWS, 2, 16), (ROWS, 1, 16)],
        2,
    ),
    "qk_norm_mrope": (
        lambda *x: amc.ops.qk_norm_mrope(*x, torch.arange(ROWS), rotary_dim=8, theta=1e4, section=[2, 1, 1]),
        [(ROWS, 2, 16), (ROWS, 1, 16), (16,), (16,)],
        2,
    ),
    "vision_rope": (
        lambda q, k: amc.ops.vision_rope(q, k, torch.arange(2 * ROWS).view(2, ROWS)),
        [(ROWS, 2, 16), (ROWS, 2, 16)],
        2,
    ),
    "cross_entropy": (lambda x: amc.ops.cross_entropy(x, torch.arange(ROWS)), [X], 1),
    "linear_cross_entropy": (lambda h, w: amc.ops.linear_cross_entropy(h, w, torch.arange(ROWS)), [X, (64, 48)], 1),
    "moe": (
        lambda h, r, g, d: amc.ops.moe(h, r, g, d, top_k=2),
        [X, (4, 48), (4, 32, 48), (4, 48, 16)],
        1,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_far_rows(seed, name):
    function, shapes, far = CASES[name]
    inputs = drawn(*shapes)
    spread = [apart(x) if i < far else x for i, x in enumerate(inputs)]
    assert all(map(torch.equal, run(function, inputs), run(function, spread)))


def test_rows_that_travel(seed):
    x, moves = torch.randn(X), [0, 2, 3, 3, 0, 2]
    out = apart(torch.zeros(X))
    _amcore.exchange_copy(out, apart(x), moves, reverse=False, runs=False)
    assert torch.equal(out, torch.cat([x[3:], x[:3]]))
    _amcore.exchange_sum(out, apart(x), apart(x), moves, [0, 0, ROWS], own_after=1, reverse=False, runs=False)
    assert torch.equal(out, torch.cat([x[3:], x[:3]]) + x)
