"""Routed experts on one GPU, at the 122B model's sizes: python -m benchmarks.ops.bench_moe_cuda.

262,144 routed rows over 32 experts, 3072 -> 2 x 1024 -> 3072, bf16. A kernel of ours is timed by the profiler inside
the operator, a peer's call by CUDA events, in rounds of random order; a time is a median. Peers: torch._grouped_mm on
rows that are permuted already, with this package's swiglu behind it for the gate; a copy of as many bytes;
torch.compile for the router; transformers' grouped_mm experts and its router for the whole layer.

The gate before any time: sampled rows of the output and of hidden's gradient, and one expert's weight gradients, by the
error rule against float64 with the plain formula in bf16 as the twin.

Written before the first run. 2 M N K is 3.30 TFLOP for gate_up, 1.65 for down; at 790 TFLOP/s 4.18 and 2.09 ms. gate_up
with its activation 4.45 ms (740 TFLOP/s; torch 738 and 0.4 ms of swiglu: 1.09x), gradients of rows 740, of weights 750.
Permute and un-permute move 1.81 GB, 0.42 ms at the copy's rate: 0.9 of it. The router's product is 51.5 GFLOP, 80 us,
its choice 25 us, its sort 15 us; compiled torch needs 100 us for product and softmax, 500 us for topk and counts.
Measured: gate_up 1.04x of torch, not 1.09 (kernels and torch's alike run below their rates alone: the power limit);
rows' gradients 1.04 to 1.05x, weights' 1.01 to 1.03x, permute 0.88, router 3.5x.
"""

import argparse
import random
import sys
import traceback
from pathlib import Path

import torch
import torch.nn.functional as F

import automodel_c as amc
from automodel_c.ops import _experts
from benchmarks.harness import in_words, statistics_of, write_gpu_rows
from benchmarks.ops.bench_attention_cuda import sample
from tests.numerics import assert_as_good_as

JSON = Path(__file__).parents[1] / "results/h200/moe.json"
H, INNER, EXPERTS = 3072, 1024, 32
BF16 = torch.bfloat16
KERNELS = {  # part of a kernel's name -> what its first, second .. launch of a call makes
    "moe_permute_kernel": ("permute", "permute dout", "permute again"),
    "moe_product_sm90_kernel<(MoeKind)0, true": ("gate_up",),
    "moe_product_sm90_kernel<(MoeKind)0, false": ("down",),
    "moe_product_sm90_kernel<(MoeKind)1": ("dact", "dx"),
    "moe_product_sm90_kernel<(MoeKind)2": ("ddown", "dgate_up"),
    "moe_swiglu_grad_kernel": ("swiglu grad",),
    "moe_unpermute_kernel": ("unpermute", "unpermute dx"),
}
FLOPS = {name: 2 * H * INNER * (1 if name in ("down", "dact", "ddown") else 2) for name in
         ("gate_up", "down", "dact", "dx", "ddown", "dgate_up")}  # fmt: skip


def randn(*shape, scale=1.0):
    return (torch.randn(shape, device="cuda") * scale).to(BF16)


def balanced():
    """8 different experts of 32 a token, each as likely."""
    return torch.rand(32768, EXPERTS, device="cuda").topk(8).indices.int()


def skewed():
    """8 of 32 a token, the likely ones about ten times as likely as the others."""
    likely = torch.linspace(2.5, 0.0, EXPERTS, device="cuda")
    noise = -torch.log(-torch.log(torch.rand(32768, EXPERTS, device="cuda").clamp(1e-9, 1 - 1e-7)))
    return (likely + noise).topk(8).indices.int()


def third():
    """2 of 32 a token; one expert gets a third of all rows."""
    scores = torch.rand(131072, EXPERTS, device="cuda")
    scores[:, 5] = torch.where(torch.rand(131072, device="cuda") < 2 / 3, 2.0, -1.0)
    return scores.topk(2).indices.int()


class Layer:
    """Tensors of one routing, and its rows as torch's grouped products want them."""

    def __init__(self, chosen):
        self.chosen, self.tokens, self.k = chosen.contiguous(), *chosen.shape
        self.hidden, self.dout = randn(self.tokens, H), randn(self.tokens, H)
        self.gate_up, self.down = (
            randn(EXPERTS, 2 * INNER, H, scale=H**-0.5),
            randn(EXPERTS, H, INNER, scale=INNER**-0.5),
        )
        self.weights = torch.rand(self.tokens, self.k, device="cuda").to(BF16).float()
        order = chosen.flatten().sort(stable=True).indices
        self.token, self.pair = order // self.k, order
        self.ends = torch.bincount(chosen.flatten(), minlength=EXPERTS).cumsum(0).int()

    def inputs(self):
        return [x.requires_grad_() for x in (self.hidden, self.gate_up, self.down, self.weights)]


def torch_calls(x):
    """torch's grouped products of every pass, on rows in their places."""
    rows, dy = x.hidden.detach()[x.token], x.dout[x.token]
    gate_up, down, mm = x.gate_up.detach(), x.down.detach(), torch._grouped_mm
    products = mm(rows, gate_up.transpose(1, 2), offs=x.ends)
    act, dproducts = amc.ops.swiglu(products), torch.randn_like(products)
    return {
        "gate_up": lambda: amc.ops.swiglu(mm(rows, gate_up.transpose(1, 2), offs=x.ends)),
        "gate_up alone": lambda: mm(rows, gate_up.transpose(1, 2), offs=x.ends),
        "down": lambda: mm(act, down.transpose(1, 2), offs=x.ends),
        "dact": lambda: mm(dy, down, offs=x.ends),
        "dx": lambda: mm(dproducts, gate_up, offs=x.ends),
        "ddown": lambda: mm(dy.t(), act, offs=x.ends),
        "dgate_up": lambda: mm(dproducts.t(), rows, offs=x.ends),
    }


def plain_layer(x, dtype, tokens):
    """Output and hidden's gradient of the tokens, ddown and dgate_up of expert 0 from all its rows, in dtype."""
    hidden, gate_up, down, weights = (y.detach().to(dtype) for y in x.inputs())
    out, dhidden = torch.zeros(2, len(tokens), H, device="cuda", dtype=dtype)
    place = torch.full((x.tokens,), -1, device="cuda").scatter(0, tokens, torch.arange(len(tokens), device="cuda"))
    parts = []
    for e in range(EXPERTS):
        token, j = torch.where(x.chosen == e)
        if e:
            keep = place[token] >= 0
            token, j = token[keep], j[keep]
        rows, dy, w = hidden[token], x.dout[token].to(dtype), weights[token, j][:, None]
        g, u = (rows @ gate_up[e].T).chunk(2, -1)
        sigma = torch.sigmoid(g)
        act, dact = g * sigma * u, (dy * w) @ down[e]
        dproducts = torch.cat([dact * u * (sigma + g * sigma * (1 - sigma)), dact * g * sigma], -1)
        if e == 0:
            parts = [dproducts.T @ rows, (dy * w).T @ act]
        here = place[token] >= 0
        out.index_add_(0, place[token[here]], (act @ down[e].T)[here] * w[here])
        dhidden.index_add_(0, place[token[here]], (dproducts @ gate_up[e])[here])
    return [out, dhidden, *parts]


def gate(x):
    """The numbers of the error rule."""
    tokens = torch.randperm(x.tokens, device="cuda")[:192]
    out = _experts.experts(*x.inputs()[:3], x.chosen, x.weights)
    dhidden, dgate_up, ddown = torch.autograd.grad(out, x.inputs()[:3], x.dout)
    mine = [out.detach()[tokens], dhidden[tokens], dgate_up[0], ddown[0]]
    pairs = zip(mine, plain_layer(x, BF16, tokens), plain_layer(x, torch.float64, tokens), strict=True)
    names = ("out", "dhidden", "dgate_up", "ddown")
    return {name: assert_as_good_as(a, b, c, name=name) for name, (a, b, c) in zip(names, pairs, strict=True)}


def kernel_times(events, rounds):
    """{what a kernel makes: its milliseconds in each round}."""
    found = {}
    for part, names in KERNELS.items():
        spans = sorted((e.time_range.start, e.device_time) for e in events if part in e.name)
        times = [ms * 1e-3 for _, ms in spans]
        for i, name in enumerate(names):
            if len(times) == rounds * len(names):
                found[name] = times[i :: len(names)]
    return found


def layer_rows(name, chosen, rounds=12):
    """Every kernel of one routing beside torch's."""
    x = Layer(chosen)
    numbers = gate(x)
    peers = torch_calls(x)
    block = torch.empty(x.tokens * (1 + x.k) * H, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(block)
    peers["copy"] = lambda: target.copy_(block)

    def mine():
        out = _experts.experts(*x.inputs()[:3], x.chosen, x.weights)
        torch.autograd.grad(out, x.inputs()[:3], x.dout)

    for call in (mine, *peers.values()):
        call()
    times, order = {key: [] for key in peers}, [*peers, "ours"]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(rounds):
            random.shuffle(order)
            for key in order:
                if key == "ours":
                    mine()
                else:
                    times[key].append(sample(peers[key]))
        torch.cuda.synchronize()
    ours = kernel_times(profile.events(), rounds)
    made = []
    counts = x.ends.diff(prepend=x.ends.new_zeros(1)).tolist()
    print(f"{name}: {x.tokens} tokens, k {x.k}, rows of an expert {min(counts)} to {max(counts)}", flush=True)
    copy = statistics_of(times["copy"])["ms_median"]
    for key, spans in ours.items():
        stats = statistics_of([ms * 1e-3 for ms in spans])
        ms, row = stats["ms_median"], {"routing": name, "kernel": key, "ours": stats}
        words = [f"  {key:14} ours {in_words(ms)}"]
        if key in FLOPS:
            flops, peer = FLOPS[key] * x.tokens * x.k, statistics_of(times[key])
            row |= {"tflops": flops / ms * 1e-9, "torch": peer, "ratio": peer["ms_median"] / ms}
            words += [
                f"{row['tflops']:.0f} TF",
                f"torch {flops / peer['ms_median'] * 1e-9:.0f} TF",
                f"{row['ratio']:.3f}x",
            ]
        elif "permute" in key:
            row |= {"copy_share": copy / ms}
            words += [f"copy {copy / ms:.3f}"]
        print("   ".join(words), flush=True)
        made.append(row)
    alone = statistics_of(times["gate_up alone"])["ms_median"]
    print(f"  torch gate_up alone {FLOPS['gate_up'] * x.tokens * x.k / alone * 1e-9:.0f} TF", flush=True)
    made[0]["gate"] = numbers
    return made


def timed(name, calls, rounds, **more):
    """Interleaved event times of calls, `ours` among them."""
    times, order = {key: [] for key in calls}, list(calls)
    for call in calls.values():
        call(), call()
    for _ in range(rounds):
        random.shuffle(order)
        for key in order:
            times[key].append(sample(calls[key]))
    stats = {key: statistics_of(t) for key, t in times.items()}
    mine = stats["ours"]["ms_median"]
    words = [f"{key} {in_words(s['ms_median'])} ({s['ms_median'] / mine:.2f}x)" for key, s in stats.items()]
    print(f"{name}   " + "   ".join(words), flush=True)
    return {"case": name, **stats, **more}


def router_rows(rounds=31):
    """The router alone, forward: product, softmax, choice, weights, loads and sums of p."""
    x, w = randn(32768, H), randn(256, H, scale=H**-0.5)

    def plain(x, w):
        p = F.softmax(F.linear(x, w), dtype=torch.float, dim=-1)
        weights, chosen = torch.topk(p, 8, dim=-1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        return (
            weights,
            chosen,
            torch.zeros(256, device="cuda").index_add(0, chosen.flatten(), torch.ones_like(p[:, :8]).flatten()),
            p.sum(0),
        )

    compiled = torch.compile(plain, dynamic=False)
    with torch.no_grad():
        _, chosen, load, prob_sum, _ = _experts.route(x, w, None, 8)
        logits = (x.double() @ w.double().T).softmax(-1)
        same = (chosen.sort(-1).values == logits.topk(8).indices.sort(-1).values).all(-1).double().mean().item()
        assert same > 0.9 and int(load.sum()) == 8 * len(x), f"{same} of the tokens choose alike"
        torch.testing.assert_close(prob_sum.double(), logits.sum(0), rtol=1e-2, atol=0)
        calls = {"ours": lambda: _experts.route(x, w, None, 8), "compile": lambda: compiled(x, w)}
        calls["product"] = lambda: F.linear(x, w)
        return [timed("router 32K x 256", calls, rounds)]


def whole_rows(rounds=9):
    """Router to combine, forward and backward, beside transformers' grouped_mm."""
    from benchmarks.ops.bench_moe import peer

    inputs = [randn(32768, H), randn(EXPERTS, H, scale=H**-0.5), randn(EXPERTS, 2 * INNER, H, scale=H**-0.5)]
    inputs = [x.requires_grad_() for x in (*inputs, randn(EXPERTS, H, INNER, scale=INNER**-0.5))]
    theirs = peer("grouped_mm", (32768, H, INNER, EXPERTS, 8))
    dout = randn(32768, H)
    both = {"ours": lambda *x: amc.ops.moe(*x, top_k=8), "transformers": theirs}
    calls = {key: lambda f=f: torch.autograd.grad(f(*inputs), inputs, dout) for key, f in both.items()}
    outs = {key: f(*inputs).detach().float() for key, f in both.items()}
    apart = ((outs["ours"] - outs["transformers"]).norm() / outs["transformers"].norm()).item()
    assert apart < 0.02, f"the outputs are {apart} apart"
    return [timed("layer forward + backward", calls, rounds, apart=apart)]


ROUTINGS = {"balanced": balanced, "skewed": skewed, "third": third}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--case", nargs="+", default=[*ROUTINGS, "router", "layer"])
    parser.add_argument("--json", help="write here; a whole green run goes to benchmarks/results/h200 by itself")
    parser.add_argument("--commit", help="what was measured, where there is no git")
    options = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        print("bench_moe_cuda: needs a Hopper GPU, none is visible to torch")
        return 0
    torch.manual_seed(0)
    rows, failures = [], []
    cases = {name: lambda name=name, make=make: layer_rows(name, make()) for name, make in ROUTINGS.items()}
    cases |= {"router": router_rows, "layer": whole_rows}
    for name in options.case:
        try:
            rows += cases[name]()
        except Exception as error:
            failures.append(f"{name}: {type(error).__name__}: {error}")
            traceback.print_exc(limit=4, file=sys.stdout)
        torch.cuda.empty_cache()
    if options.json or (set(options.case) == set(cases) and not failures):
        write_gpu_rows(options.json or JSON, rows, options.commit, ("torch", "transformers"))
    for failure in failures:
        print(f"failed: {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
