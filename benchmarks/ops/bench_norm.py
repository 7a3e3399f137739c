"""Norms beside torch: python -m benchmarks.ops.bench_norm. The peer is transformers' eager formula, or F.layer_norm."""

import torch

from benchmarks.harness import Case, main
from benchmarks.ops.gates import forward, forward_backward, gate_by_rule
from benchmarks.peers import Peer
from tests.ops.test_norm import FUNCTIONS


def cases(name, shape, dtype):
    ours, plain, oracle, rows, vectors = FUNCTIONS[name]
    inputs = [torch.randn(shape).to(dtype) for _ in range(rows)]
    inputs += [torch.randn(shape[-1:]).to(dtype) for _ in range(vectors)]
    outputs = 2 if name == "residual" else 1
    upstream = [torch.randn(shape).to(dtype) for _ in range(outputs)]
    elements, size = inputs[0].numel(), inputs[0].element_size()
    label, kind = "x".join(map(str, shape)), str(dtype).removeprefix("torch.")
    yield Case(
        f"norm_{name}", "fwd", label, kind, forward(ours, inputs), gate_by_rule(oracle, inputs),
        [Peer("torch", torch.__version__, lambda x: forward(plain, x))], inputs, (rows + outputs) * elements * size,
    )  # fmt: skip
    yield Case(
        f"norm_{name}", "fwd+bwd", label, kind, forward_backward(ours, inputs, upstream),
        gate_by_rule(oracle, inputs, upstream),
        [Peer("torch", torch.__version__, lambda x: forward_backward(plain, x, upstream))], inputs,
        (3 * rows + 2 * outputs) * elements * size,
    )  # fmt: skip


SHAPES = {
    f"{name}-{kind}": lambda name=name, shape=shape, dtype=dtype: cases(name, shape, dtype)
    for name, shape in {
        "rms_norm": (2048, 1024),
        "residual": (2048, 1024),
        "gated_rms_norm": (2048, 16, 128),
        "layer_norm": (2048, 1152),
    }.items()
    for kind, dtype in {"f32": torch.float32, "bf16": torch.bfloat16}.items()
}

if __name__ == "__main__":
    main("norm", SHAPES)
