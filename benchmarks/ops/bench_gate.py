"""The gates of the gated delta net beside transformers' eager code: python -m benchmarks.ops.bench_gate."""

import torch

import automodel_c as amc
from automodel_c.reference import gate as reference
from benchmarks.harness import Case, main
from benchmarks.ops.gates import forward, forward_backward, gate_by_rule
from benchmarks.peers import Peer
from tests.ops.test_gate import inputs_of, naive


def cases(rows, heads, dtype):
    inputs = inputs_of(rows, heads, dtype)
    upstream = [torch.randn(rows, heads), torch.randn(rows, heads).to(dtype)]
    label, kind = f"{rows}x{heads}", str(dtype).removeprefix("torch.")
    read, written = inputs[0].nbytes + inputs[1].nbytes, upstream[0].nbytes + upstream[1].nbytes
    yield Case(
        "gate", "fwd", label, kind, forward(amc.ops.gdn_gate, inputs), gate_by_rule(reference.gdn_gate, inputs),
        [Peer("torch", torch.__version__, lambda x: forward(naive, x))], inputs, read + written,
    )  # fmt: skip
    yield Case(
        "gate", "fwd+bwd", label, kind, forward_backward(amc.ops.gdn_gate, inputs, upstream),
        gate_by_rule(reference.gdn_gate, inputs, upstream),
        [Peer("torch", torch.__version__, lambda x: forward_backward(naive, x, upstream))], inputs,
        3 * read + 2 * written,
    )  # fmt: skip


SHAPES = {
    f"{rows}x{heads}-{kind}": lambda rows=rows, heads=heads, dtype=dtype: cases(rows, heads, dtype)
    for rows, heads in ((256, 16), (4096, 64))
    for kind, dtype in {"f32": torch.float32, "bf16": torch.bfloat16}.items()
}

if __name__ == "__main__":
    main("gate", SHAPES)
