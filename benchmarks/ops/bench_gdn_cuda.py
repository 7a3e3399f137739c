"""The gated delta rule on one GPU beside fla and FlashQLA: python -m benchmarks.ops.bench_gdn_cuda.

The layer of Qwen3.5-122B: 16 key heads, 64 value heads, dims of 128, bf16, l2 norms inside, no states in or out. A time
is the median of CUDA events over rounds that run ours, the peers and ours again in random order; inputs are larger than
L2. The floor is the fewest bytes (q, k, v, g, beta and o; backward dout and the gradients too) at 4.3 TB/s or the
products that chunks of 64 need (9.2 MFLOP a chunk and value head forward, 22 backward) at 790 TFLOP/s, the larger one:
0.38 and 0.91 ms for 32K tokens.

The gate before any time, for gates that are log-sigmoids with a quarter of the heads at 0 and for those of a trained
model: results and gradients of a small pack by the error rule against float64, none more than 1.5 times as far as the
best peer's; at full size a peer's output within 2 % of ours.

Written before the first run: the plain kernels are float32 without tensor cores, 20 ms forward and 50 ms backward on
32K, a tenth of a peer. What came: 28.7 and 104.5 ms; 7.1 and 26.1 on 8K; 19.8 and 84.1 on 32x1K. No peer ran beside it.

Written before the first run of the Hopper kernels: 0.65 and 2.4 ms on 32K. What came, medians of nine events with no
peer beside it: 1.50 and 4.88 ms; 0.34 and 1.36 on 8K; 1.38 and 4.91 on 32x1K; 5.33 and 18.3 on 128K. The scan of a long
document is bound by the one warp a scheduler that issues, and what backward moves, states written and read again above
all, is 2.8 ms by itself at memory's rate.

Written before chunks were prepared by squares in registers, o of the scan in a second warpgroup: 1.0 ms forward on 32K,
4.6 backward. What came, kernels before and after in one process: 1.35 to 1.10 and 4.89 to 4.71, 1.20 to 1.04 forward on
32x1K, all of it the preparation's; the second warpgroup made the scan slower and is not used. See gdn_variants.json.
"""

import argparse
import inspect
import itertools
import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

from automodel_c import Pack, _amcore
from automodel_c.ops.gdn import gated_delta_rule
from automodel_c.reference.gdn import gated_delta_rule as reference
from benchmarks.harness import in_words, statistics_of, write_gpu_rows
from benchmarks.ops.bench_attention_cuda import backward_of, heavy_tailed, measure
from benchmarks.peers import version_of
from tests.numerics import assert_as_good_as

FLOPS, BANDWIDTH = 790e12, 4.3e12
KEY_HEADS, HEADS, DIM = 16, 64, 128
NAMES = ("o", "dq", "dk", "dv", "dg", "dbeta")
JSON = Path(__file__).parents[1] / "results/h200/gdn.json"
SHAPES = {  # name: lengths
    "8K": [8192],
    "32K": [32768],
    "32x1K": [1024] * 32,
    "32K-heavy": heavy_tailed(32768),
    "128K": [131072],
}


def log_sigmoid_gates(tokens):
    g = F.logsigmoid(torch.randn(tokens, HEADS, device="cuda")) / 16
    g[:, ::4] = 0
    return g


def trained_gates(tokens):
    rate, bias = 16 * torch.rand(HEADS, device="cuda"), torch.randn(HEADS, device="cuda")
    return -rate * F.softplus(torch.randn(tokens, HEADS, device="cuda") + bias)


class Inputs:
    """Random tensors of one pack and its documents."""

    def __init__(self, lengths, gates, backward=True):
        tokens = sum(lengths)
        rows = [
            torch.randn(tokens, heads, DIM, device="cuda", dtype=torch.bfloat16)
            for heads in (KEY_HEADS, KEY_HEADS, HEADS)
        ]
        beta = torch.randn(tokens, HEADS, device="cuda").sigmoid().bfloat16()
        self.tensors = [x.requires_grad_(backward) for x in (*rows, gates(tokens), beta)]
        self.ends = list(itertools.accumulate(lengths))
        self.pack = Pack(cu_seqlens=[0, *self.ends], device="cuda")
        self.cu = torch.tensor([0, *self.ends], dtype=torch.int32, device="cuda")


def ours(x, *tensors):
    return gated_delta_rule(*(tensors or x.tensors), pack=x.pack)[0]


def fla(x, *tensors):
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    rows = (t[None] for t in tensors or x.tensors)
    return chunk_gated_delta_rule(*rows, use_qk_l2norm_in_kernel=True, cu_seqlens=x.cu)[0][0]


def flashqla(x, *tensors):
    import flash_qla

    rows = (t[None] for t in tensors or x.tensors)
    return flash_qla.chunk_gated_delta_rule(*rows, use_qk_l2norm_in_kernel=True, cu_seqlens=x.cu)[0][0]


def plain(x, *tensors):
    """transformers' fallback document by document, itself and not what stands in for it where fla is installed."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    fallback = inspect.unwrap(torch_chunk_gated_delta_rule)
    q, k, *rest = tensors
    rows = [t.repeat_interleave(HEADS // KEY_HEADS, 1) for t in (q, k)] + rest
    parts = [
        fallback(*(t[start:end][None] for t in rows), use_qk_l2norm_in_kernel=True)[0][0]
        for start, end in itertools.pairwise([0, *x.ends])
    ]
    return torch.cat(parts)


def peers_of(backward, wanted):
    """{name: (version, function)} and the reasons for those that are missing."""
    os.environ.update(FLA_FLASH_QLA="0", FLA_TILELANG="1")  # fla takes FlashQLA by itself where it is installed
    found, missing = {}, {}
    small = Inputs([130], log_sigmoid_gates)
    for name, package, function in (("fla", "fla-core", fla), ("flashqla", "flash-qla", flashqla)):
        if name not in wanted:
            continue
        try:
            out = function(small)
            if backward:
                out.backward(torch.randn_like(out))
        except (ImportError, RuntimeError) as error:
            missing[name] = str(error).strip().splitlines()[0][:200]
        else:
            found[name] = (version_of(package), function)
    return found, missing


def results_of(function, x, tensors, dout):
    """Output and gradients."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    out = function(x, *leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(out.dtype))]


def gate(functions):
    """AssertionError for a wrong result; the numbers of the error rule for both kinds of gates."""
    numbers = {}
    for gates in (log_sigmoid_gates, trained_gates):
        x = Inputs([700, 1, 330], gates)
        dout = torch.randn_like(x.tensors[2])
        truth = results_of(
            lambda y, *t: reference(*t, y.pack.docs)[0], x, [t.double() for t in x.tensors], dout.double()
        )
        made = {name: results_of(f, x, x.tensors, dout) for name, f in (("plain", plain), *functions.items())}
        for i, name in enumerate(NAMES):
            mine = made["ours"][i]
            rule = assert_as_good_as(mine, made["plain"][i].to(mine.dtype), truth[i], name=name, dtype=torch.bfloat16)
            errors = {n: float((r[i].double() - truth[i]).norm() / truth[i].norm()) for n, r in made.items()}
            others = [error for n, error in errors.items() if n not in ("ours", "plain")]
            assert not others or errors["ours"] <= 1.5 * min(others), f"{name}: a peer is nearer: {errors}"
            numbers[f"{gates.__name__} {name}"] = {"rule": rule, "errors": errors}
    return numbers


def floor_of(tokens, backward):
    """Seconds."""
    keys, values, gates = 2 * KEY_HEADS * DIM, 2 * HEADS * DIM, 6 * HEADS
    bytes_ = tokens * (4 * keys + 3 * values + 2 * gates if backward else 2 * keys + 2 * values + gates)
    return max(bytes_ / BANDWIDTH, tokens / 64 * HEADS * (22e6 if backward else 9.2e6) / FLOPS)


def row(name, backward, found, missing, numbers):
    """One row of the table, printed and returned."""
    x = Inputs(SHAPES[name], log_sigmoid_gates, backward)
    calls = {"ours": lambda: ours(x), **{key: lambda f=f: f(x) for key, (_, f) in found.items()}}
    mine = calls["ours"]().detach().float()
    for key in found:
        assert (calls[key]().detach().float() - mine).norm() <= 0.02 * mine.norm(), f"{key} computes something else"
    tensors = [t.detach() for t in x.tensors[:3]]
    kernels = _amcore.gated_delta_rule_row(*tensors, x.pack.docs.ravel().tolist(), backward=backward)
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    if backward:
        calls = {key: backward_of(call) for key, call in calls.items()}
    stats = {key: statistics_of(seconds) for key, seconds in measure(calls, 15).items()}
    mine, floor = stats["ours"]["ms_median"], floor_of(sum(SHAPES[name]), backward) * 1e3
    parts = [f"gdn_{'bwd' if backward else 'fwd'} {name} [{kernels}]", f"ours {in_words(mine)}"]
    parts += [f"{key} {in_words(stats[key]['ms_median'])} ({stats[key]['ms_median'] / mine:.3f}x)" for key in found]
    parts += [f"floor {floor / mine:.0%}", f"self {stats['self']['ms_median'] / mine:.3f}"]
    print("   ".join(parts), *(f"   ({key}: {why})" for key, why in missing.items()), flush=True)
    return {
        "op": "gated_delta_rule", "pass": "bwd" if backward else "fwd", "shape": name, "tokens": sum(SHAPES[name]),
        "documents": len(SHAPES[name]), "key_heads": KEY_HEADS, "heads": HEADS, "dim": DIM, "dtype": "bfloat16",
        "kernels": kernels, "ours": stats["ours"],
        "peers": {key: {"version": found[key][0], **stats[key]} for key in found},
        "ratio": {key: stats[key]["ms_median"] / mine for key in found},
        "self_ratio": stats["self"]["ms_median"] / mine, "floor_share": floor / mine,
        "peak_bytes": torch.cuda.max_memory_allocated() - held, "gate": numbers,
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--passes", nargs="+", choices=["fwd", "bwd"], default=["fwd", "bwd"])
    parser.add_argument("--peers", nargs="*", choices=["fla", "flashqla"], default=["fla", "flashqla"])
    parser.add_argument("--json", help="write here; a whole green run goes to benchmarks/results/h200 by itself")
    parser.add_argument("--commit", help="what was measured, where there is no git")
    options = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        print("bench_gdn_cuda: needs a Hopper GPU, none is visible to torch")
        return 0
    torch.manual_seed(0)
    rows = []
    for backward in (direction == "bwd" for direction in options.passes):
        found, missing = peers_of(backward, options.peers)
        numbers = gate({"ours": ours, **({key: f for key, (_, f) in found.items()} if backward else {})})
        rows += [row(name, backward, found, missing, numbers) for name in options.shape]
    if options.json or (options.shape == list(SHAPES) and len(options.passes) == 2):
        write_gpu_rows(options.json or JSON, rows, options.commit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
