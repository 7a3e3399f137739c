"""Planning attention over ranks, and moving rows beside torch's indexing: python -m benchmarks.ops.bench_exchange.

Predicted before the first run of heads: a plan that splits heads has a move from every rank to every rank where one of
rows has a few for each, so over 32 ranks it takes about twice as long as `balanced`, and `auto` tries both; all under
1 ms. Runs of heads are copied and added at the rate of as many bytes in whole rows: a head of 64 or more elements is a
cache line or more, and copies are bound by memory.
"""

import numpy as np
import torch

from automodel_c import _amcore
from automodel_c.parallel.plan import ContextPlan, make_pack
from benchmarks.harness import Case, main
from benchmarks.peers import Peer

CACHE = 8 << 20  # bytes
PLAN_S = 1e-3  # the promise: a step's plan, with every route of a rank


def lengths_of(name):
    rng = np.random.default_rng()
    return {
        "one-128k": np.array([131_072]),
        "four-32k": np.array([32_768] * 4),
        "heavy-tail": np.minimum(rng.pareto(1.1, 600) * 100 + 16, 60_000).astype(np.int64),
        "thousand-short": rng.integers(16, 260, 1000),
    }[name]


def plan_cases(name, ranks):
    lengths = lengths_of(name)
    pack, tokens = make_pack(np.concatenate([[0], np.cumsum(lengths)]), None, None)

    def ours(scheme):
        plan = ContextPlan(pack, tokens, ranks=ranks, rank=ranks - 1, scheme=scheme)
        work = plan.attention(32, 2, 256, torch.bfloat16)
        return work, (work.parts, work.keys, work.queries, work.outputs)

    def gate(outcomes):
        """Every head of every row is computed once; balanced: nobody has more than 1.05 of the mean; heads: or less
        than one head of a document above it; auto: the cheapest was taken."""
        for work, _ in outcomes.values():
            assert (work.tasks[:, 3] - work.tasks[:, 2]) @ work.tasks[:, 9] == 32 * tokens
            for head in range(32):
                some = work.tasks[(work.tasks[:, 8] <= head) & (head < work.tasks[:, 8:].sum(axis=1))]
                spans = some[np.argsort(some[:, 2])][:, 2:4]
                assert spans[0, 0] == 0 and spans[-1, 1] == tokens and (spans[1:, 0] == spans[:-1, 1]).all()
            largest = work.costs.max() / work.costs.mean()
            split = lengths[np.unique(work.tasks[work.tasks[:, 9] < 32, 1])].max(initial=0)
            most = max(1.05, 1 + split * (split + 1) / 2 / 32 / work.costs.mean())
            assert work.plan.scheme == "auto" or largest <= most, f"largest cost is {largest:.3f} of the mean"
            assert work.plan.scheme != "auto" or work.tried[work.chosen][1] == min(t[1] for t in work.tried)
        found = {"rows_migrated": work.migrated, "documents_split": work.tried[work.chosen][2]}
        return {"largest_cost_in_means": float(largest), **found}

    for scheme in ("balanced", "heads", "auto"):
        call = lambda scheme=scheme: ours(scheme)  # noqa: E731
        yield Case("exchange", f"plan-{scheme}", f"{name} ranks={ranks}", "int64", call, gate, bar_s=PLAN_S)


def flat(moves):
    return torch.tensor(moves, dtype=torch.int64).flatten()


def row_cases(ranges, rows, width, dtype):
    """Packs `ranges` ranges out of [tokens, width], and adds them back, as one rank does for its peers."""
    tokens = 2 * ranges * rows
    begins = torch.arange(ranges) * 2 * rows + rows // 2
    index = (begins[:, None] + torch.arange(rows)).flatten()
    pack = flat([(int(b), i * rows, rows) for i, b in enumerate(begins)])
    x, out = torch.randn(tokens, width).to(dtype), torch.empty(ranges * rows, width, dtype=dtype)
    grad, dx = torch.randn(ranges * rows, width).to(dtype), torch.empty(tokens, width, dtype=dtype)
    inputs = {"x": x, "index": index, "grad": grad, "own": torch.randn(tokens, width).to(dtype)}
    whole = flat([(0, 0, tokens)])

    def copy():
        _amcore.exchange_copy(out, x, pack, reverse=False, runs=False)
        return out

    def add():
        _amcore.exchange_sum(dx, grad, inputs["own"], pack, whole, own_after=0, reverse=True, runs=False)
        return dx

    def same(outcomes):
        for name, found in outcomes.items():
            assert torch.equal(found, x[index]), f"{name}: other rows"

    def near(outcomes):
        truth = inputs["own"].double().index_add(0, index, grad.double())
        for name, found in outcomes.items():
            error = (found.double() - truth).norm() / truth.norm()
            assert error < (1e-6 if dtype == torch.float32 else 5e-3), f"{name}: relative error {error:.1e}"

    shape, kind, moved = f"{ranges}x{rows} of {width}", str(dtype).removeprefix("torch."), out.nbytes
    select = Peer("torch.index_select", torch.__version__, lambda i: lambda: torch.index_select(i["x"], 0, i["index"]))
    index_add = Peer("torch.index_add", torch.__version__, lambda i: lambda: _index_add(i, dtype))
    floor = moved + 2 * dx.nbytes if dx.nbytes > CACHE else 0  # smaller ones never leave the caches
    yield Case("exchange", "copy", shape, kind, copy, same, [select], inputs)
    yield Case("exchange", "sum", shape, kind, add, near, [index_add], inputs, floor_bytes=floor)


def run_cases(ranks, tokens, heads, dim, dtype):
    """Groups of heads of every row packed for `ranks` peers, and unpacked into a sum on the way back."""
    some = heads // ranks
    x = torch.randn(tokens, heads, dim).to(dtype)
    flat_x, out = x.flatten(0, 1), torch.empty(tokens * heads, dim, dtype=dtype)
    grad, dx = torch.randn(tokens * heads, dim).to(dtype), torch.empty(tokens * heads, dim, dtype=dtype)
    moves = torch.tensor([[r * some, r * some * tokens, some, tokens, heads, some] for r in range(ranks)]).flatten()

    def copy():
        _amcore.exchange_copy(out, flat_x, moves, reverse=False, runs=True)
        return out

    def add():
        _amcore.exchange_sum(dx, grad, grad[:0], moves, [], own_after=0, reverse=True, runs=True)
        return dx

    def groups(t):
        return t.unflatten(1, (ranks, some)).transpose(0, 1)

    def same(outcomes):
        for name, found in outcomes.items():
            assert torch.equal(found.flatten(), groups(x).flatten()), f"{name}: other rows"

    def back(outcomes):
        want = grad.view(ranks, tokens, some, dim).transpose(0, 1).flatten()
        for name, found in outcomes.items():
            assert torch.equal(found.flatten(), want), f"{name}: other rows"

    shape, kind = f"{tokens}x{heads} heads of {dim} to {ranks}", str(dtype).removeprefix("torch.")
    floor = 2 * out.nbytes if 2 * out.nbytes > CACHE else 0
    inputs = {"x": x, "grad": grad}
    there = Peer("torch.transpose", torch.__version__, lambda i: lambda: groups(i["x"]).contiguous())
    home = Peer(
        "torch.transpose", torch.__version__,
        lambda i: lambda: i["grad"].view(ranks, tokens, some, dim).transpose(0, 1).contiguous(),
    )  # fmt: skip
    yield Case("exchange", "copy-heads", shape, kind, copy, same, [there], inputs, floor_bytes=floor)
    yield Case("exchange", "sum-heads", shape, kind, add, back, [home], inputs, floor_bytes=floor)


def _index_add(inputs, dtype):
    """In float32, as ours adds."""
    total = inputs["own"].float()
    if total is inputs["own"]:
        total = total.clone()
    return total.index_add_(0, inputs["index"], inputs["grad"].float()).to(dtype)


SHAPES = {f"{name}-{r}": (lambda n=name, r=r: plan_cases(n, r)) for name in ("one-128k", "four-32k", "heavy-tail",
          "thousand-short") for r in (8, 32)}  # fmt: skip
SHAPES |= {
    "rows-fp32": lambda: row_cases(4, 512, 1024, torch.float32),
    "rows-bf16": lambda: row_cases(4, 512, 1024, torch.bfloat16),
    "heads-bf16": lambda: run_cases(8, 2048, 32, 128, torch.bfloat16),
    "heads-fp32": lambda: run_cases(4, 2048, 16, 64, torch.float32),
    "short-rows-bf16": lambda: row_cases(64, 16, 128, torch.bfloat16),
}

if __name__ == "__main__":
    main("exchange", SHAPES)
