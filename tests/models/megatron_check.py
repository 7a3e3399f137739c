"""What the tests of Megatron-FSDP ask of `megatron_worker.steps`."""

import torch

from tests.models import megatron_worker as worker
from tests.models import packs
from tests.models.test_qwen3_5_ep import norms_of
from tests.numerics import ulp_of

CHOSEN = ("text", "clips", "tiny", "padding")  # the packs of a global batch


def check_gradients(found, twins, exact, name):
    """Loss and every gradient of the first step, by the error rule beside FSDP2's; their norm is theirs."""
    ours, theirs = ([{"loss": of[0][0][0], **of[0][0][2]} for of in runs] for runs in (found, twins))
    packs.compare(ours, theirs, exact, name)
    norms = [taken[0][1] for taken, _ in found]
    for norm, expected in zip(norms, norms_of(ours), strict=True):
        assert abs(norm - expected) <= ulp_of(float(expected), "float32")


def check_updates(found, twins, name):
    """Parameters after two steps are AdamW's of the gradients that there were, by the error rule; and the second step
    computed with what the first one made, as FSDP2's did."""
    ours = [last for _, last in found]
    plain, exact = ([stepped(taken, dtype) for taken, _ in found] for dtype in (torch.float32, torch.float64))
    packs.compare(ours, plain, exact, f"{name}, parameters")
    for (taken, _), (others, _) in zip(found, twins, strict=True):
        (first, *_), (second, *_) = taken
        assert abs(second - others[1][0]) < 1e-3 * abs(second - first)


def stepped(taken, dtype):
    """{name: parameter} by torch's AdamW, from the first parameters and all gradients."""
    parameters = {name: p.to(dtype, copy=True).requires_grad_() for name, p in taken[0][3].items()}
    optimizer = torch.optim.AdamW(parameters.values(), lr=worker.LR, weight_decay=worker.DECAY, eps=1e-8)
    for _, _, gradients, _ in taken:
        for name, p in parameters.items():
            p.grad = gradients[name].to(dtype)
        optimizer.step()
    return {name: p.detach() for name, p in parameters.items()}
