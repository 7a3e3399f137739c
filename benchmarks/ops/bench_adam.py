"""FusedAdamW and clip_grad_norm_ beside torch's: python -m benchmarks.ops.bench_adam.

Bars: at least 1.0x torch fused on 32 tensors of 2^20, 5x foreach on 20,000 tensors, 2 us for a binding call.
"""

import numpy as np
import torch

from automodel_c import _amcore
from automodel_c.optim import FusedAdamW, clip_grad_norm_
from automodel_c.reference import adam as reference
from benchmarks.harness import Case, main
from benchmarks.peers import Peer
from tests.numerics import measure

HYPER = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
SAMPLE = 64  # tensors that the gate looks at, spread over the list


class Inputs:
    """Starting values and gradients; `params()` gives one optimizer its own copy."""

    def __init__(self, sizes, dtype=torch.float32):
        self.dtype = dtype
        self.start = [torch.randn(n) for n in sizes]
        self.grads = [torch.randn(n).to(dtype) for n in sizes]
        self.made = {}

    def params(self, name, dtype=None):
        params = [x.to(dtype or self.dtype, copy=True).requires_grad_() for x in self.start]
        for p, g in zip(params, self.grads, strict=True):
            p.grad = g.to(p.dtype)
        self.made[name] = params
        return params


def torch_adamw(name, **options):
    return Peer(name, torch.__version__, lambda inputs: torch.optim.AdamW(inputs.params(name), **options).step)


def torch_masters(inputs):
    """What one does with torch for bfloat16 parameters: fused AdamW on float32 masters, then a copy."""
    masters, params = inputs.params("masters", torch.float32), inputs.params("fused + copy")
    for p in masters:
        p.grad = None
    optimizer = torch.optim.AdamW(masters, fused=True)

    def step():
        for master, p in zip(masters, params, strict=True):
            master.grad = p.grad.float()
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(params, masters)

    return step


def gate(inputs):
    """After one step: every optimizer keeps the error rule against float64, the plain float32 formula beside it."""

    def check(outcomes):
        count = len(inputs.start)
        for i in sorted({k * (count - 1) // SAMPLE for k in range(SAMPLE + 1)}):
            begin, zero = inputs.start[i].to(inputs.dtype), torch.zeros_like(inputs.start[i])
            truth = reference.adamw(begin, zero, zero, inputs.grads[i], 1, **HYPER)[0]
            naive = reference.adamw(begin, zero, zero, inputs.grads[i], 1, **HYPER, dtype=torch.float32)[0]
            for name in outcomes:
                numbers = measure(inputs.made[name][i].detach(), naive.to(inputs.dtype), truth)
                assert numbers["passes"], f"{name}, tensor {i}: {numbers}"

    return check


def step_cases(shape, sizes, bytes_an_element):
    inputs = Inputs(sizes)
    ours = FusedAdamW(inputs.params("ours"))
    peers = [torch_adamw("fused", fused=True), torch_adamw("foreach", foreach=True)]
    yield Case("adam", "step", shape, "f32", ours.step, gate(inputs), peers, inputs, bytes_an_element * sum(sizes))


def master_cases(shape, sizes):
    inputs = Inputs(sizes, torch.bfloat16)
    ours = FusedAdamW(inputs.params("ours"))
    peers = [Peer("fused + copy", torch.__version__, torch_masters)]
    yield Case("adam", "step", shape, "bf16+f32", ours.step, gate(inputs), peers, inputs, 28 * sum(sizes))


def clip_cases(shape, sizes):
    inputs = Inputs(sizes)
    truth = float(reference.clip(inputs.grads, 1.0)[1])

    def check(outcomes):
        assert abs(float(outcomes["ours"]) - truth) <= 1e-7 * truth, f"norm {float(outcomes['ours'])}, truth {truth}"

    params = inputs.params("ours")
    limit = 2 * truth  # nothing to scale: the norm alone
    peer = Peer("torch", torch.__version__, lambda i: lambda: torch.nn.utils.clip_grad_norm_(params, limit))
    ours = lambda: clip_grad_norm_(params, limit)  # noqa: E731
    yield Case("adam", "clip", shape, "f32", ours, check, [peer], inputs, 4 * sum(sizes))


def binding_cases():
    """One call with a parameter, two moments and a gradient of 16 elements, and its step."""
    lists = [[torch.zeros(16)], [torch.zeros(16)], [torch.zeros(16)], [torch.zeros(())], [torch.zeros(16)]]
    out, x = torch.zeros(16), torch.ones(16)
    peer = Peer("torch.add(out=)", torch.__version__, lambda _: lambda: torch.add(x, x, out=out))
    ours = lambda: _amcore.adam_step(*lists, **HYPER)  # noqa: E731
    yield Case("adam", "binding", "4 tensors", "f32", ours, lambda _: None, [peer], bar_s=2e-6)


def log_uniform(count, largest):
    draws = np.exp(np.random.default_rng().uniform(0.0, np.log(largest + 1), count))
    return [int(n) - 1 for n in draws]


LARGE = [1 << 20] * 32
SHAPES = {
    "binding": binding_cases,  # first: after gigabytes of tensors have gone by, every call is slower, torch's too
    "32x2^20": lambda: step_cases("32 x 2^20", LARGE, 28),
    "20000": lambda: step_cases("20000 of 0 to 64K", log_uniform(20_000, 1 << 16), 28),
    "bf16": lambda: master_cases("32 x 2^20", LARGE),
    "clip": lambda: clip_cases("32 x 2^20", LARGE),
}

if __name__ == "__main__":
    main("adam", SHAPES)
