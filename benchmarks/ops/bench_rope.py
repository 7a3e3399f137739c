"""Rotary embeddings beside transformers' eager formula, angles included: python -m benchmarks.ops.bench_rope."""

from functools import partial

import torch

from automodel_c import ops
from automodel_c.reference import rope as reference
from benchmarks.harness import Case, main
from benchmarks.ops.gates import forward, forward_backward, gate_by_rule
from benchmarks.peers import Peer
from tests.ops.test_qk_norm_mrope import naive as naive_normed
from tests.ops.test_rope import QWEN, naive_mrope, naive_vision


def cases(vision, dtype):
    tokens, heads, kv_heads, dim = (2048, 16, 16, 72) if vision else (2048, 8, 2, 256)
    positions = torch.randint(0, 60 if vision else 4096, (2 if vision else 3, tokens))
    options = {} if vision else QWEN
    names = ("vision_rope", naive_vision) if vision else ("mrope", naive_mrope)
    ours, plain, oracle = (
        partial(turn, position_ids=positions, **options)
        for turn in (getattr(ops, names[0]), names[1], getattr(reference, names[0]))
    )
    inputs = [torch.randn(tokens, n, dim).to(dtype) for n in (heads, kv_heads)]
    upstream = [torch.randn_like(x) for x in inputs]
    label, kind = f"T={tokens} {heads}/{kv_heads}x{dim}", str(dtype).removeprefix("torch.")
    size = sum(x.nbytes for x in inputs)
    yield Case(
        names[0], "fwd", label, kind, forward(ours, inputs), gate_by_rule(oracle, inputs),
        [Peer("torch", torch.__version__, lambda x: forward(plain, x))], inputs, 2 * size,
    )  # fmt: skip
    yield Case(
        names[0], "fwd+bwd", label, kind, forward_backward(ours, inputs, upstream),
        gate_by_rule(oracle, inputs, upstream),
        [Peer("torch", torch.__version__, lambda x: forward_backward(plain, x, upstream))], inputs, 4 * size,
    )  # fmt: skip


def normed_cases(dtype):
    """The norms of q and k and the turn in one pass, beside the eager three."""
    tokens, heads, kv_heads, dim = 2048, 8, 2, 256
    positions = torch.randint(0, 4096, (3, tokens))
    ours, plain, oracle = (
        partial(f, position_ids=positions, **QWEN) for f in (ops.qk_norm_mrope, naive_normed, reference.qk_norm_mrope)
    )
    inputs = [torch.randn(s).to(dtype) for s in ((tokens, heads, dim), (tokens, kv_heads, dim), (dim,), (dim,))]
    upstream = [torch.randn_like(x) for x in inputs[:2]]
    label, kind = f"T={tokens} {heads}/{kv_heads}x{dim}", str(dtype).removeprefix("torch.")
    size = sum(x.nbytes for x in inputs)
    yield Case(
        "qk_norm_mrope", "fwd", label, kind, forward(ours, inputs), gate_by_rule(oracle, inputs),
        [Peer("torch", torch.__version__, lambda x: forward(plain, x))], inputs, 2 * size,
    )  # fmt: skip
    yield Case(
        "qk_norm_mrope", "fwd+bwd", label, kind, forward_backward(ours, inputs, upstream),
        gate_by_rule(oracle, inputs, upstream),
        [Peer("torch", torch.__version__, lambda x: forward_backward(plain, x, upstream))], inputs, 5 * size,
    )  # fmt: skip


SHAPES = {
    f"{'vision' if vision else 'mrope'}-{kind}": lambda vision=vision, dtype=dtype: cases(vision, dtype)
    for vision in (False, True)
    for kind, dtype in {"f32": torch.float32, "bf16": torch.bfloat16}.items()
} | {
    f"normed-{kind}": lambda dtype=dtype: normed_cases(dtype)
    for kind, dtype in {"f32": torch.float32, "bf16": torch.bfloat16}.items()
}

if __name__ == "__main__":
    main("rope", SHAPES)
