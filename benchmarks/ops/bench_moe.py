"""Routed experts beside transformers' eager loop and its grouped_mm: python -m benchmarks.ops.bench_moe.

The floor is 6 T k H I flops forward and three times that with backward, at 150 GFLOP/s a core for fp32 operands (wide,
T=2048: 43 ms and 129 ms on two cores); tile registers go below it for bf16.
"""

import torch
from transformers import Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as modeling

from automodel_c import ops
from automodel_c.reference import moe as reference
from benchmarks.harness import Case, main
from benchmarks.ops.gates import forward, forward_backward
from benchmarks.peers import Peer, version_of
from tests.numerics import assert_as_good_as
from tests.ops.test_moe import problem


def peer(implementation, shape):
    """Router and experts of transformers with the given experts' implementation, as a function of the four inputs."""
    _, size, inner, experts, k = shape
    config = Qwen3_5MoeTextConfig(
        hidden_size=size, moe_intermediate_size=inner, num_experts=experts, num_experts_per_tok=k
    )
    config._experts_implementation = implementation
    with torch.device("meta"):
        router, block = modeling.Qwen3_5MoeTopKRouter(config), modeling.Qwen3_5MoeExperts(config)

    def run(hidden, router_weight, gate_up, down):
        call = torch.func.functional_call
        _, weights, chosen = call(router, {"weight": router_weight}, (hidden,))
        return call(block, {"gate_up_proj": gate_up, "down_proj": down}, (hidden, chosen, weights))

    return run


def oracle(shape):
    """The reference's formula in float64, expert by expert."""

    def run(hidden, router_weight, gate_up, down):
        _, chosen, weights = reference.route(hidden, router_weight, shape[4])
        out = torch.zeros_like(hidden)
        for e in range(shape[3]):
            token, place = torch.where(chosen == e)
            gate, up = (hidden[token] @ gate_up[e].T).chunk(2, -1)
            y = (gate * torch.sigmoid(gate) * up) @ down[e].T
            out = out.index_add(0, token, y * weights[token, place, None])
        return out

    return run


def gate(truth):
    """The error rule with transformers' eager code as the twin."""

    def check(outcomes):
        rows = zip(outcomes["ours"], outcomes["transformers"], truth(), strict=True)
        return [assert_as_good_as(a, b, c, name=f"part {i}") for i, (a, b, c) in enumerate(rows)]

    return check


def cases(shape, dtype):
    tokens, size, inner, experts, k = shape
    inputs = problem(*shape, dtype)
    upstream = [torch.randn(tokens, size).to(dtype)]
    wide = [x.double() for x in inputs]
    label, kind = f"T={tokens} H={size} I={inner} E={experts} k={k}", str(dtype).removeprefix("torch.")
    for direction, call in (
        ("fwd", forward),
        ("fwd+bwd", lambda f, x: forward_backward(f, x, [g.to(x[0].dtype) for g in upstream])),
    ):
        peers = [
            Peer(name, version_of("transformers"), lambda x, how=how, call=call: call(peer(how, shape), x))
            for name, how in (("transformers", "eager"), ("grouped_mm", "grouped_mm"))
        ]
        ours = call(lambda *x: ops.moe(*x, top_k=k), inputs)
        yield Case("moe", direction, label, kind, ours, gate(call(oracle(shape), wide)), peers, inputs)


SHAPES = {
    f"{name}-{kind}": lambda shape=shape, dtype=dtype: cases(shape, dtype)
    for name, shape in {"wide": (2048, 512, 256, 64, 8), "tiny": (1024, 128, 64, 4, 2)}.items()
    for kind, dtype in {"f32": torch.float32, "bf16": torch.bfloat16}.items()
}

if __name__ == "__main__":
    main("moe", SHAPES, budget_s=4)
