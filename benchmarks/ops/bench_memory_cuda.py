"""What memory bounds, on one GPU, at the 122B model's sizes: python -m benchmarks.ops.bench_memory_cuda.

A time is the median of CUDA events over rounds that run ours, a copy of as many bytes, the peers and ours again in
random order; inputs are larger than L2, backward is autograd's call alone. `copy` is the copy's time over ours: the
share of the copy rate that the operator's least traffic (every input read once, every output written once) reaches.

The gate before any time: `ours` on sampled rows, and whole weight gradients, by the error rule against float64 with the
eager formula as the plain twin; a peer within 5 % of float64.

Written before the first run, share of the copy: forward 0.95 (a row is held in registers, 64 KiB and more in flight on
a multiprocessor); backward of the norms 0.88 (the tail of a persistent grid, 1.5 % for the second pass over the runs);
swiglu and sigmoid_gate 0.95 both ways; gelu by erf in bf16 0.9, near the issue limit; mrope 0.93; qk_norm_mrope 0.92
and 0.87, as the norm of q alone, since the angles are made while rows are on their way. causal_conv1d forward
0.92 (the 3 rows before each run of 64 are 2.3 % more traffic, the tail 3 %), in uneven documents 0.91, backward 0.85
(float64 sums of 66 runs are 2.7 %, the last wave 5 %, and it issues for half of the time). gdn_gate 0.85 and 0.75, near
the issue limit; at the model's 32K tokens, 20 MB in L2, 0.5: launches of a few us, in backward two.
"""

import argparse
import sys
import traceback
from pathlib import Path

import torch

import automodel_c as amc
from automodel_c.reference import conv as conv_reference
from automodel_c.reference import gate as gate_reference
from automodel_c.reference import mlp as mlp_reference
from automodel_c.reference import rope as rope_reference
from benchmarks.harness import in_words, statistics_of, write_gpu_rows
from benchmarks.ops.bench_attention_cuda import measure
from tests.numerics import assert_as_good_as
from tests.ops import test_gate as gate_twin
from tests.ops import test_mlp as mlp
from tests.ops import test_norm as norm
from tests.ops import test_qk_norm_mrope as qk_norm
from tests.ops import test_rope as rope

JSON = Path(__file__).parents[1] / "results/h200/memory.json"
T, HIDDEN = 32768, 3072
QWEN = {"rotary_dim": 64, "theta": 1e7, "section": [11, 11, 10]}
PEERS = ["compile", "liger", "fla", "dao"]
SAMPLED = 256  # rows that the gate looks at
BF16, F32 = torch.bfloat16, torch.float32


def randn(*shape, dtype=BF16):
    return torch.randn(shape, device="cuda", dtype=dtype)


class Operator:
    """One operator at one size: its differentiable inputs, and what else the functions take."""

    def __init__(self, ours, plain, oracle, inputs, peers=(), extra=(), compiled=True):
        self.ours, self.plain, self.oracle, self.extra = ours, plain, oracle, extra
        self.compiled = compiled  # False where `plain` is too long a loop
        self.inputs = [x.requires_grad_() for x in inputs]
        self.peers = dict(peers)


def liger_rms(x, w):
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return LigerRMSNormFunction.apply(x, w, 1e-6, 1.0, "gemma", False)


def liger_residual(x, r, w):
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

    return LigerFusedAddRMSNormFunction.apply(x, r, w, 1e-6, 1.0, "gemma", False)


def liger_layer(x, w, b):
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    return LigerLayerNormFunction.apply(x, w, b, 1e-6)


def liger_swiglu(gate_up):
    from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction

    return LigerFusedGateUpSiLUMulFunction.apply(gate_up, False)


def fla_rms(x, w):
    from fla.modules.norm.layernorm import rms_norm

    return rms_norm(x, w + 1.0, None, eps=1e-6)


def fla_residual(x, r, w):
    from fla.modules.norm.layernorm import rms_norm

    return rms_norm(x, w + 1.0, None, residual=r, eps=1e-6, prenorm=True)


def fla_gated(x, z, w):
    from fla.modules.norm.fused_norm_gate import rms_norm_gated

    return rms_norm_gated(x, z, w, None, activation="swish", eps=1e-6)


def fla_layer(x, w, b):
    from fla.modules.norm.layernorm import layer_norm

    return layer_norm(x, w, b, eps=1e-6)


def of_norm(name, shape, dtype=BF16, **peers):
    ours, plain, oracle, rows, vectors = norm.FUNCTIONS[name]
    inputs = [randn(*shape, dtype=dtype) for _ in range(rows)] + [randn(shape[-1], dtype=dtype) for _ in range(vectors)]
    return Operator(ours, plain, oracle, inputs, peers)


def of_mlp(name, shapes, dtype=BF16, **peers):
    ours, plain, oracle, _ = mlp.FUNCTIONS[name]
    return Operator(ours, plain, oracle, [randn(*s, dtype=dtype) for s in shapes], peers)


def attention_gate():
    """x [T, H, D] by the second halves of [T, H, 2 D], as attention's output is gated."""
    gate = randn(T, 32, 512)[..., 256:]
    plain = lambda x, g: x * torch.sigmoid(g)  # noqa: E731
    return Operator(amc.ops.sigmoid_gate, plain, mlp_reference.sigmoid_gate, [randn(T, 32, 256), gate])


def fla_conv(ends):
    from fla.modules.convolution import causal_conv1d

    offsets = ends.cuda() if len(ends) > 2 else None
    return lambda x, w: causal_conv1d(x[None], w, activation="silu", cu_seqlens=offsets)[0][0]


def dao_conv(ends):
    from causal_conv1d import causal_conv1d_fn

    numbers = torch.repeat_interleave(torch.arange(len(ends) - 1), ends.diff()).int()[None].cuda()
    numbers = numbers if len(ends) > 2 else None
    return lambda x, w: causal_conv1d_fn(x.T[None], w, activation="silu", seq_idx=numbers)[0].T


def later(make, ends):
    """The call that `make` makes, made at its first use: what cannot be imported is missing there."""
    made = []

    def call(*inputs):
        if not made:
            made.append(make(ends))
        return made[0](*inputs)

    return call


def lengths_of(tokens):
    """A heavy tail: one document of a quarter of the tokens, the next of a quarter of the rest, down to 3 tokens."""
    lengths = []
    while tokens > 3:
        lengths.append(max(3, tokens // 4))
        tokens -= lengths[-1]
    return [*lengths, tokens]


def heavy_ends():
    """Heavy tails, each of 1,024 tokens, over the first half of the axis and one tail over the second."""
    lengths = lengths_of(1024) * (T // 2048) + lengths_of(T // 2)
    return torch.tensor([0, *lengths]).cumsum(0)


def eager_conv(x, w, docs):
    """transformers' torch path, document by document."""
    parts = []
    for start, end in docs:
        part = torch.nn.functional.conv1d(x[start:end].T, w[:, None], padding=w.shape[1] - 1, groups=w.shape[0])
        parts.append(torch.nn.functional.silu(part[:, : end - start]).T)
    return torch.cat(parts)


def of_conv(dtype=BF16, ends=None):
    """The model's short convolution, 12,288 channels by a filter of 4."""
    ends = torch.tensor([0, T]) if ends is None else ends
    pack = amc.Pack(cu_seqlens=ends, device="cuda")
    ours = lambda x, w: amc.ops.causal_conv1d(x, w, pack=pack)[0]  # noqa: E731
    plain = lambda x, w: eager_conv(x, w, pack.docs.tolist())  # noqa: E731
    oracle = lambda x, w: conv_reference.causal_conv1d(x, w, pack.docs)[0]  # noqa: E731
    peers = {"fla": later(fla_conv, ends), "dao": later(dao_conv, ends)}
    inputs = [randn(T, 12288, dtype=dtype), randn(12288, 4, dtype=dtype)]
    return Operator(ours, plain, oracle, inputs, peers, compiled=len(pack) == 1)


def of_gate(rows):
    inputs = [randn(rows, 64), randn(rows, 64), torch.rand(64, device="cuda").mul(16).log(), randn(64, dtype=F32)]
    return Operator(amc.ops.gdn_gate, gate_twin.naive, gate_reference.gdn_gate, inputs)


def text_rope():
    positions = torch.arange(T, device="cuda").repeat(3, 1)
    wrap = lambda f: lambda q, k, p: f(q, k, p, **QWEN)  # noqa: E731
    inputs = [randn(T, 32, 256), randn(T, 2, 256)]
    calls = map(wrap, (amc.ops.mrope, rope.naive_mrope, rope_reference.mrope))
    return Operator(*calls, inputs, extra=(positions,))


def fla_norms_and_rope(q, k, q_weight, k_weight, positions):
    """fla's norm of both and its rotary kernel, which turns by one axis: for text, where the axes are equal."""
    from fla.modules.rotary import rotary_embedding

    angles = torch.outer(positions[0].float(), QWEN["theta"] ** (-torch.arange(0, 64, 2, device=q.device) / 64))
    cos, sin = angles.cos().to(q.dtype), angles.sin().to(q.dtype)
    normed = (fla_rms(q, q_weight), fla_rms(k, k_weight))
    return tuple(rotary_embedding(x[None], cos, sin)[0] for x in normed)


def liger_norms_and_rope(q, k, q_weight, k_weight, positions):
    """liger's norm of both, then the eager turn: its own rotary kernel turns whole heads."""
    return rope.naive_mrope(liger_rms(q, q_weight), liger_rms(k, k_weight), positions, **QWEN)


def normed_text_rope():
    """As attention has it: q is the first half of what its projection makes, k a projection of its own."""
    positions = torch.arange(T, device="cuda").repeat(3, 1)
    wrap = lambda f: lambda *a: f(*a, **QWEN)  # noqa: E731
    calls = map(wrap, (amc.ops.qk_norm_mrope, qk_norm.naive, rope_reference.qk_norm_mrope))
    inputs = [randn(T, 32, 512)[..., :256], randn(T, 2, 256), randn(256), randn(256)]
    peers = {"fla": fla_norms_and_rope, "liger": liger_norms_and_rope}
    return Operator(*calls, inputs, peers, extra=(positions,))


def tower_rope():
    positions = torch.stack([torch.arange(2 * T, device="cuda") // 64, torch.arange(2 * T, device="cuda") % 64])
    inputs = [randn(2 * T, 16, 72), randn(2 * T, 16, 72)]
    calls = amc.ops.vision_rope, rope.naive_vision, rope_reference.vision_rope
    return Operator(*calls, inputs, extra=(positions,))


CASES = {
    "rms_norm residual": lambda: of_norm("residual", (T, HIDDEN), liger=liger_residual, fla=fla_residual),
    "rms_norm residual f32": lambda: of_norm("residual", (T, HIDDEN), F32, liger=liger_residual, fla=fla_residual),
    "rms_norm": lambda: of_norm("rms_norm", (T, HIDDEN), liger=liger_rms, fla=fla_rms),
    "rms_norm 5120": lambda: of_norm("rms_norm", (T, 5120), liger=liger_rms, fla=fla_rms),
    "q norm": lambda: of_norm("rms_norm", (T, 32, 256), liger=liger_rms, fla=fla_rms),
    "k norm": lambda: of_norm("rms_norm", (4 * T, 2, 256), liger=liger_rms, fla=fla_rms),
    "gated_rms_norm": lambda: of_norm("gated_rms_norm", (T, 64, 128), fla=fla_gated),
    "layer_norm": lambda: of_norm("layer_norm", (2 * T, 1152), liger=liger_layer, fla=fla_layer),
    "swiglu": lambda: of_mlp("swiglu", [(8 * T, 2048)], liger=liger_swiglu),
    "swiglu f32": lambda: of_mlp("swiglu", [(4 * T, 2048)], F32, liger=liger_swiglu),
    "sigmoid_gate": attention_gate,
    "gelu": lambda: of_mlp("gelu", [(2 * T, 4304)]),
    "gelu tanh": lambda: of_mlp("gelu-tanh", [(2 * T, 4304)]),
    "qk_norm_mrope": normed_text_rope,
    "mrope": text_rope,
    "vision_rope": tower_rope,
    "causal_conv1d": of_conv,
    "causal_conv1d packed": lambda: of_conv(ends=heavy_ends()),
    "causal_conv1d packed f32": lambda: of_conv(F32, heavy_ends()),
    "gdn_gate": lambda: of_gate(16 * T),
    "gdn_gate 32K": lambda: of_gate(T),
}


def outputs_of(function, inputs, extra):
    made = function(*inputs, *extra)
    return made if isinstance(made, tuple) else (made,)


def backward_of(function, inputs, extra, upstream):
    """The backward pass alone: its graph is kept, nothing is added to .grad."""
    outputs = outputs_of(function, inputs, extra)[: len(upstream)]
    return lambda: torch.autograd.grad(outputs, inputs, upstream, retain_graph=True)


def forward_of(function, inputs, extra):
    def run():
        with torch.no_grad():
            return outputs_of(function, inputs, extra)

    return run


def bytes_of(tensors):
    return sum(x.numel() * x.element_size() for x in tensors)


def sampled(x):
    """Rows of a result that has rows, the first and the last among them; the whole of a weight's gradient."""
    if x.ndim == 1:
        return x.detach()
    rows = x.detach().flatten(0, -2)
    return rows[torch.linspace(0, len(rows) - 1, SAMPLED, device=x.device, dtype=torch.float64).round().long()]


def gate(op, calls, direction):
    """AssertionError for a wrong `ours`; the numbers of the rule and the names of peers that compute something else."""
    wide = [x.detach().double().requires_grad_() for x in op.inputs]
    if direction == "fwd":
        truth = forward_of(op.oracle, wide, op.extra)()
    else:
        truth = backward_of(op.oracle, wide, op.extra, [g.double() for g in op.upstream])()
    truth = [sampled(x) for x in truth]
    made = {name: [sampled(x) for x in call()][: len(truth)] for name, call in calls.items()}
    parts = enumerate(zip(made["ours"], made["eager"], truth, strict=True))
    numbers = [assert_as_good_as(a, b, c, name=f"part {part}") for part, (a, b, c) in parts]
    wrong = [
        name
        for name, results in made.items()
        if any((a.double() - c).norm() > 0.05 * c.norm() for a, c in zip(results, truth, strict=False))
    ]
    return numbers, wrong


def calls_of(op, direction, wanted, missing):
    functions = {"ours": op.ours, "eager": op.plain}
    if "compile" in wanted and op.compiled:
        functions["compile"] = torch.compile(op.plain, dynamic=False)
    functions |= {name: f for name, f in op.peers.items() if name in wanted}
    calls = {}
    for name, function in functions.items():
        try:
            if direction == "fwd":
                call = forward_of(function, op.inputs, op.extra)
            else:
                call = backward_of(function, op.inputs, op.extra, op.upstream)
            call()
        except Exception as error:
            if name in ("ours", "eager"):
                raise
            missing[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:80]}" if str(error) else repr(error)
            continue
        calls[name] = call
    return calls


def row(name, op, direction, wanted):
    """One row of the table, printed and returned; its `failed` says why there is no time."""
    missing = {}
    calls = calls_of(op, direction, wanted, missing)
    outputs = forward_of(op.ours, op.inputs, op.extra)()
    traffic = bytes_of(op.inputs) + bytes_of(outputs)
    if direction == "bwd":  # mrope's gradient needs no inputs; the gradient of a residual is the input's
        needed = bytes_of(op.upstream) + (0 if name in ("mrope", "vision_rope") else bytes_of(op.inputs))
        written = bytes_of(op.inputs)
        if "residual" in name:
            needed, written = bytes_of(op.upstream) + bytes_of(outputs[:1]), bytes_of(op.inputs[1:])
        traffic = needed + written
    del outputs
    numbers, wrong = gate(op, calls, direction)
    for peer in wrong:
        if peer != "eager":
            missing[peer] = "computes something else"
            calls.pop(peer)
    block = torch.empty(int(traffic) // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(block)
    calls["copy"] = lambda: target.copy_(block)
    stats = {key: statistics_of(seconds) for key, seconds in measure(calls).items()}
    mine, copy = stats["ours"]["ms_median"], stats["copy"]["ms_median"]
    ratio = {key: stats[key]["ms_median"] / mine for key in calls if key not in ("ours", "copy")}
    parts = [f"{name} {direction}".ljust(26), f"ours {in_words(mine)} {traffic / mine * 1e-6:.0f} GB/s"]
    parts += [f"copy {copy / mine:.3f} ({traffic / copy * 1e-6:.0f} GB/s)"]
    parts += [f"{key} {in_words(stats[key]['ms_median'])} ({value:.2f}x)" for key, value in ratio.items()]
    parts += [f"self {stats['self']['ms_median'] / mine:.3f}"]
    print("   ".join(parts), *(f"   ({key}: {why})" for key, why in missing.items()), flush=True)
    return {
        "op": name, "pass": direction, "bytes": traffic, "dtype": str(op.inputs[0].dtype), "ours": stats["ours"],
        "shape": [list(x.shape) for x in op.inputs], "copy_share": copy / mine, "copy": stats["copy"], "ratio": ratio,
        "peers": {key: stats[key] for key in ratio}, "missing": missing,
        "self_ratio": stats["self"]["ms_median"] / mine, "gate": numbers,
    }  # fmt: skip


def rows_of(name, wanted, failures):
    """Forward and backward of a case; a failure is printed and the next row goes on."""
    made = []
    op = CASES[name]()
    op.upstream = [torch.randn_like(y) for y in forward_of(op.ours, op.inputs, op.extra)()]
    for direction in ("fwd", "bwd"):
        try:
            made.append(row(name, op, direction, wanted))
        except Exception as error:
            failures.append(f"{name} {direction}: {type(error).__name__}: {error}")
            traceback.print_exc(limit=3, file=sys.stdout)
        torch.cuda.empty_cache()
    return made


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--case", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=PEERS)
    parser.add_argument("--json", help="write here; a whole green run goes to benchmarks/results/h200 by itself")
    parser.add_argument("--commit", help="what was measured, where there is no git")
    options = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        print("bench_memory_cuda: needs a Hopper GPU, none is visible to torch")
        return 0
    torch.manual_seed(0)
    rows, failures = [], []
    for name in options.case:
        rows += rows_of(name, options.peers, failures)
        torch._dynamo.reset()
    if options.json or (options.case == list(CASES) and not failures):
        packages = ("liger_kernel", "fla-core", "causal-conv1d", "triton")
        write_gpu_rows(options.json or JSON, rows, options.commit, packages)
    for failure in failures:
        print(f"failed: {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
