"""The causal convolution beside torch: python -m benchmarks.ops.bench_conv.

The peer is transformers' torch path, F.conv1d on the transposed rows and SiLU, whole or document by document.
"""

import torch
import torch.nn.functional as F

import automodel_c as amc
from automodel_c.reference import conv as reference
from benchmarks.harness import Case, main
from benchmarks.ops.gates import forward, forward_backward, gate_by_rule
from benchmarks.peers import Peer


def per_document(x, weight, documents):
    rows = x.shape[0] // documents
    outputs = []
    for start in range(0, x.shape[0], rows):
        part = x[None, start : start + rows].transpose(1, 2)
        z = F.conv1d(part, weight[:, None], padding=weight.shape[1] - 1, groups=weight.shape[0])[:, :, :rows]
        outputs.append(F.silu(z).transpose(1, 2)[0])
    return outputs[0] if documents == 1 else torch.cat(outputs)


def cases(tokens, channels, documents, dtype):
    inputs = [torch.randn(tokens, channels).to(dtype), torch.randn(channels, 4).to(dtype)]
    upstream = [torch.randn(tokens, channels).to(dtype)]
    pack = amc.Pack(cu_seqlens=list(range(0, tokens + 1, tokens // documents)))

    def ours(x, weight):
        return amc.ops.causal_conv1d(x, weight, pack=pack)[0]

    def plain(x, weight):
        return per_document(x, weight, documents)

    def oracle(x, weight):
        return reference.causal_conv1d(x, weight, pack.docs)[0]

    label, kind = f"{tokens}x{channels}/{documents}", str(dtype).removeprefix("torch.")
    yield Case(
        "conv", "fwd", label, kind, forward(ours, inputs), gate_by_rule(oracle, inputs),
        [Peer("torch", torch.__version__, lambda x: forward(plain, x))], inputs, 2 * inputs[0].nbytes,
    )  # fmt: skip
    yield Case(
        "conv", "fwd+bwd", label, kind, forward_backward(ours, inputs, upstream),
        gate_by_rule(oracle, inputs, upstream),
        [Peer("torch", torch.__version__, lambda x: forward_backward(plain, x, upstream))], inputs,
        5 * inputs[0].nbytes,
    )  # fmt: skip


SHAPES = {
    f"{tokens}x{channels}-{documents}-{kind}": lambda shape=(tokens, channels, documents), dtype=dtype: cases(
        *shape, dtype
    )
    for tokens, channels, documents in ((1024, 8192, 1), (1024, 8192, 16), (2048, 512, 4))
    for kind, dtype in {"f32": torch.float32, "bf16": torch.bfloat16}.items()
}

if __name__ == "__main__":
    main("conv", SHAPES)
