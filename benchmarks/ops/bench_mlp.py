"""Elementwise gates beside torch: python -m benchmarks.ops.bench_mlp."""

import torch

from benchmarks.harness import Case, main
from benchmarks.ops.gates import forward, forward_backward, gate_by_rule
from benchmarks.peers import Peer
from tests.ops.test_mlp import FUNCTIONS


def cases(name, shape, dtype):
    ours, plain, oracle, count = FUNCTIONS[name]
    inputs = [torch.randn(shape).to(dtype) for _ in range(count)]
    y = ours(*inputs)
    upstream = [torch.randn(y.shape).to(dtype)]
    read, written = sum(x.nbytes for x in inputs), y.nbytes
    label, kind = "x".join(map(str, shape)), str(dtype).removeprefix("torch.")
    yield Case(
        f"mlp_{name}", "fwd", label, kind, forward(ours, inputs), gate_by_rule(oracle, inputs),
        [Peer("torch", torch.__version__, lambda x: forward(plain, x))], inputs, read + written,
    )  # fmt: skip
    yield Case(
        f"mlp_{name}", "fwd+bwd", label, kind, forward_backward(ours, inputs, upstream),
        gate_by_rule(oracle, inputs, upstream),
        [Peer("torch", torch.__version__, lambda x: forward_backward(plain, x, upstream))], inputs,
        3 * read + 2 * written,
    )  # fmt: skip


SHAPES = {
    f"{name}-{kind}": lambda name=name, shape=shape, dtype=dtype: cases(name, shape, dtype)
    for name, shape in {
        "swiglu": (2048, 2048),
        "sigmoid_gate": (2048, 2048),
        "gelu": (2048, 2048),
        "gelu-tanh": (2048, 2048),
    }.items()
    for kind, dtype in {"f32": torch.float32, "bf16": torch.bfloat16}.items()
}

if __name__ == "__main__":
    main("mlp", SHAPES)
