"""Packed attention, forward and backward, beside torch's SDPA: python -m benchmarks.ops.bench_attention.

Head dim 256, 8 query and 2 key heads, 2,048 tokens in eight uneven documents, causal. The work is 4 area Hq D forward
and 2.5 times that backward, area = sum of L (L + 1) / 2: 17.4 GFLOP together.

Bars, two threads: 1.2 times SDPA per document in fp32, 1.5 times in bf16, 5 times SDPA with the block mask.

What was expected (written down after the first runs) and what came, in GFLOP/s of CPU time on one thread of a Sapphire
Rapids class core whose peaks are 175 (FMA), 86 (vdpbf16ps) and over 1,300 (tiles); SDPA per document gets 68 forward
and 50 backward in fp32, 147 and 55 in bf16:
  AVX-512, fp32   75 % of the peak expected from register blocks of 12 x 32 over panels that stay in L1, keys hidden by
                  causality left out of every product; 103 forward, 109 backward (60 %). With bf16 inputs 117 and 119.
  vdpbf16ps       twice fp32 expected from half the instructions; 76 and 76, because this core issues the instruction
                  at a quarter of FMA's rate. The row is for cores that issue it faster.
  tiles, bf16     300 to 600 expected, bound by softmax and by operands from L2: 299 to 331 and 266 to 318; two thirds
                  of the time is in the products.
  AVX2, fp32      62 and 65.
Summing a product's whole depth onto C lost the error rule for dk and dv in fp32; sums from 0, added once a block, keep
it at no cost. lse rounded to fp32 lost it at logits of 40; its second float keeps it.
"""

import itertools

import torch

import automodel_c as amc
from automodel_c.reference.attention import attention as reference
from benchmarks.harness import Case, main
from benchmarks.peers import Peer
from tests.numerics import assert_as_good_as

LENGTHS = [901, 17, 512, 300, 1, 200, 100, 17]
HEADS, KEY_HEADS, DIM = 8, 2, 256
NAMES = ("out", "dq", "dk", "dv")
sdpa = torch.nn.functional.scaled_dot_product_attention


def documents():
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).tolist()
    return list(itertools.pairwise(ends))


def step(function, inputs):
    """Forward and backward as one call; its results are out and the gradients."""

    def run():
        q, k, v = (x.detach().requires_grad_() for x in inputs["qkv"])
        out = function(q, k, v)
        out.backward(inputs["dout"])
        return out.detach(), q.grad, k.grad, v.grad

    return run


def per_document(attend):
    def run(q, k, v):
        pieces = [attend(*(x[a:b].transpose(0, 1)[None] for x in (q, k, v))) for a, b in documents()]
        return torch.cat([piece[0].transpose(0, 1) for piece in pieces])

    return run


def causal_sdpa(q, k, v):
    return sdpa(q, k, v, is_causal=True, enable_gqa=True)


def eager(q, k, v):
    """The plain formula: products in the operator's dtype, softmax in fp32."""
    k, v = (x.repeat_interleave(HEADS // KEY_HEADS, 1) for x in (k, v))
    hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    scores = (q @ k.transpose(2, 3) * DIM**-0.5).masked_fill(hidden, torch.finfo(q.dtype).min)
    return torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype) @ v


def sdpa_with_mask(inputs):
    mask = torch.zeros(sum(LENGTHS), sum(LENGTHS), dtype=torch.bool)
    for a, b in documents():
        mask[a:b, a:b] = torch.ones(b - a, b - a, dtype=torch.bool).tril()

    def attend(q, k, v):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return sdpa(q, k, v, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)

    return step(attend, inputs)


def gate_of(inputs):
    wide = {"qkv": [x.double() for x in inputs["qkv"]], "dout": inputs["dout"].double()}
    truth = step(lambda *x: reference(*x, documents())[0], wide)()
    naive = step(per_document(eager), inputs)()

    def gate(outcomes):
        numbers = {}
        for name, x, plain, true in zip(NAMES, outcomes["ours"], naive, truth, strict=True):
            numbers[name] = assert_as_good_as(x, plain, true, name=name)
        for peer in set(outcomes) - {"ours"}:  # a peer need not be as good as we are, only do the same
            for x, true in zip(outcomes[peer], truth, strict=True):
                assert (x - true).norm() <= 0.05 * true.norm(), f"{peer} computes something else"
        return numbers

    return gate


def cases(dtype):
    torch.manual_seed(0)
    tokens = sum(LENGTHS)
    inputs = {
        "qkv": [torch.randn(tokens, heads, DIM).to(dtype) for heads in (HEADS, KEY_HEADS, KEY_HEADS)],
        "dout": torch.randn(tokens, HEADS, DIM).to(dtype),
    }
    pack = amc.Pack(cu_seqlens=[0, *(end for _, end in documents())])
    yield Case(
        op="attention",
        direction="fwd+bwd",
        shape=f"{tokens} tokens d{DIM} h{HEADS}/{KEY_HEADS}",
        dtype=str(dtype).removeprefix("torch."),
        ours=step(lambda q, k, v: amc.ops.attention(q, k, v, pack=pack), inputs),
        gate=gate_of(inputs),
        inputs=inputs,
        peers=[
            Peer("sdpa-per-doc", torch.__version__, lambda given: step(per_document(causal_sdpa), given)),
            Peer("sdpa-block-mask", torch.__version__, sdpa_with_mask),
        ],
    )


CASES = {"fp32": lambda: cases(torch.float32), "bf16": lambda: cases(torch.bfloat16)}

if __name__ == "__main__":
    main("attention", CASES)
