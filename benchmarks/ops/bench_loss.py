"""Cross-entropy at Qwen3.5's vocabulary beside torch with whole logits: python -m benchmarks.ops.bench_loss.

A linear_cross_entropy row also prints our extra memory: the growth of the resident set over one call, without the
gradients, as a share of whole logits. Take few rounds: --rounds 5.

The floor is 6 n V H flops: three products. torch's matmul makes 72 to 90 GFLOP/s a core of float32 here and 190 to 205
of bfloat16, whether a chunk or the whole vocabulary is multiplied; ours 85 to 95 and 165 to 195. Beside them torch
reads and writes whole logits some eight times and faults in three copies.

Tried (n rows; torch's CPU time over ours, f32, T=256, H=1024, loaded machine; first one thread, then two):
- vocabulary chunks, logits made again, 4 products of torch: 0.86, -.
- logits kept in the memory of weight's gradient, 3 + max(0, 1 - H / n) products: predicted 1.10, found 1.20 and 0.73.
  With two threads torch's spin at the end of 360 products while ours run the rows (bf16: 1.09 and 0.56).
- our own products on our threads, blocks of 512 x 256 handed out as threads come free, the same 120 chunks: 1.25 and
  1.00; bf16 1.02 and 0.70: what spun was the copy of a chunk.
- no call of torch inside the loop, and chunks of 4 % instead of 0.8 %, as each is a place to wait: bf16 1.03 and 1.01,
  its wall clock 0.63 before and 1.15 after; f32 two threads 1.23. T=256, H=256: 1.6, bf16 1.3; T=1024, H=256: 1.3.
- hidden's gradient added to its total every 64 words of the depth: a red gate at T=256, H=256; once a chunk: green.
- T=2048, H=1024, bf16, where half of the logits are made again (7/6 of the flops): 0.74. Slower than torch;
  on quiet cores 1.00, of least times 0.95.
- row blocks of 3 % of the rows: not written. 33 passes that read W twice and read and write dW are 528 V H bytes beside
  6 n V H flops: at 15 GB/s they cost more than the product they save up to about 3500 rows, and in bf16 dW would be
  rounded 33 times.
- keeping 4 % of the logits beside the gradients: not written, saves 1 % of the work.
"""

import ctypes
import os
import threading
from pathlib import Path

import torch
import torch.nn.functional as F

from automodel_c import ops
from automodel_c.reference import loss as reference
from benchmarks.harness import Case, main
from benchmarks.ops.gates import forward_backward
from benchmarks.peers import Peer
from tests.numerics import Parts, assert_as_good_as, assert_numbers, dtype_name

VOCAB = 248_320
BLOCK = 16_384  # rows of the vocabulary that are float64 at a time


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_growth(call):
    """Most bytes of resident memory above the start of `call`, looked at every millisecond."""
    ctypes.CDLL(None).malloc_trim(0)
    start, highest, done = resident(), [0], threading.Event()

    def watch():
        while not done.wait(1e-3):
            highest[0] = max(highest[0], resident() - start)

    watcher = threading.Thread(target=watch)
    watcher.start()
    result = call()
    done.set()
    watcher.join()
    return highest[0], result


def gate(inputs, labels, oracle):
    """The error rule with torch as the twin."""
    wide = [x.double().requires_grad_() for x in inputs]

    def check(outcomes):
        loss = oracle(*wide, labels)
        truth = [loss.detach(), *torch.autograd.grad(loss, wide)]
        return [
            assert_as_good_as(a.float(), b.float(), c, name=f"part {i}", dtype=inputs[0].dtype if i else None)
            for i, (a, b, c) in enumerate(zip(outcomes["ours"], outcomes["torch"], truth, strict=True))
        ]

    return check


def linear_oracle(hidden, weight, labels, rows=BLOCK):
    """In float64, `rows` of the vocabulary at a time: the loss, hidden's gradient, and the blocks of weight's."""
    hidden, blocks = hidden.double(), range(0, len(weight), rows)

    def block(at):
        return weight[at : at + rows].double()

    sums = torch.stack([torch.logsumexp(hidden @ block(at).T, 1) for at in blocks]).logsumexp(0)
    loss = (sums - (hidden * weight[labels].double()).sum(1)).mean()

    def slope(at):
        p = torch.exp(hidden @ block(at).T - sums[:, None])
        mine = ((labels >= at) & (labels < at + p.shape[1])).nonzero()[:, 0]
        p[mine, labels[mine] - at] -= 1
        return p / len(hidden)

    dhidden = sum(slope(at) @ block(at) for at in blocks)
    return loss, dhidden, ((at, slope(at).T @ hidden) for at in blocks)


def linear_gate(inputs, labels):
    """As `gate`, without a whole float64 weight."""
    dtype = inputs[0].dtype

    def check(outcomes):
        ours, twin = outcomes["ours"], outcomes["torch"]
        loss, dhidden, dweight = linear_oracle(*inputs, labels)
        numbers = [
            assert_as_good_as(a.float(), b.float(), c, name=name, dtype=of)
            for name, of, a, b, c in zip(("loss", "dhidden"), (None, dtype), ours, twin, (loss, dhidden), strict=False)
        ]
        parts = Parts()
        for at, truth in dweight:
            parts.add(ours[2][at : at + BLOCK], twin[2][at : at + BLOCK], truth)
        return [*numbers, assert_numbers(parts.measure(dtype_name(dtype)), name="dweight")]

    return check


def linear(tokens, size, dtype):
    inputs = [torch.randn(tokens, size).to(dtype), (torch.randn(VOCAB, size) / size**0.5).to(dtype)]
    labels = torch.randint(0, VOCAB, (tokens,))
    upstream = [torch.ones(())]
    ours = forward_backward(lambda h, w: ops.linear_cross_entropy(h, w, labels), inputs, upstream)
    label, kind = f"T={tokens} H={size} V={VOCAB}", str(dtype).removeprefix("torch.")
    ours()
    extra, results = peak_growth(ours)
    extra -= sum(x.nbytes for x in results)
    print(f"linear_cross_entropy {label} {kind}: {extra / (tokens * VOCAB * dtype.itemsize):.2%} of whole logits extra")

    def plain(x):
        upstream_like = [torch.ones((), dtype=dtype)]
        return forward_backward(lambda h, w: F.cross_entropy(F.linear(h, w), labels), x, upstream_like)

    peer = Peer("torch", torch.__version__, plain)
    yield Case("linear_cross_entropy", "fwd+bwd", label, kind, ours, linear_gate(inputs, labels), [peer], inputs)


def logits(tokens, dtype):
    inputs = [torch.randn(tokens, VOCAB).to(dtype)]
    labels = torch.randint(0, VOCAB, (tokens,))
    ours = forward_backward(lambda x: ops.cross_entropy(x, labels), inputs, [torch.ones(())])
    peer = Peer(
        "torch",
        torch.__version__,
        lambda x: forward_backward(lambda y: F.cross_entropy(y.float(), labels), x, [torch.ones(())]),
    )
    yield Case(
        "cross_entropy", "fwd+bwd", f"T={tokens} V={VOCAB}", str(dtype).removeprefix("torch."), ours,
        gate(inputs, labels, reference.cross_entropy), [peer], inputs, 3 * inputs[0].nbytes,
    )  # fmt: skip


SHAPES = {
    "linear-256-f32": lambda: linear(256, 256, torch.float32),
    "linear-256-bf16": lambda: linear(256, 256, torch.bfloat16),
    "linear-1024-f32": lambda: linear(256, 1024, torch.float32),
    "linear-1024-bf16": lambda: linear(256, 1024, torch.bfloat16),
    "linear-2048-bf16": lambda: linear(2048, 1024, torch.bfloat16),
    "logits-f32": lambda: logits(128, torch.float32),
    "logits-bf16": lambda: logits(128, torch.bfloat16),
}

if __name__ == "__main__":
    main("loss", SHAPES)
