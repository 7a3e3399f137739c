"""Planning attention over ranks, and moving rows beside torch's indexing: python -m benchmarks.ops.bench_exchange."""

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
        return work, (work.rounds, work.keys, work.queries, work.outputs)

    def gate(outcomes):
        """Every row is computed once; balanced: nobody has more than 1.05 of the mean; auto: the cheapest was taken."""
        for work, _ in outcomes.values():
            spans = work.tasks[np.argsort(work.tasks[:, 2])][:, 2:4]
            assert spans[0, 0] == 0 and spans[-1, 1] == tokens and (spans[1:, 0] == spans[:-1, 1]).all()
            largest = work.costs.max() / work.costs.mean()
            assert work.plan.scheme != "balanced" or largest <= 1.05, f"largest cost is {largest:.3f} of the mean"
            assert work.tried[work.chosen][1] == min(seconds for _, seconds in work.tried)
        return {"largest_cost_in_means": float(largest), "rows_migrated": work.migrated}

    for scheme in ("balanced", "auto"):
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
        _amcore.exchange_copy(out, x, pack, reverse=False)
        return out

    def add():
        _amcore.exchange_sum(dx, grad, inputs["own"], pack, whole, own_after=0, reverse=True)
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
    "short-rows-bf16": lambda: row_cases(64, 16, 128, torch.bfloat16),
}

if __name__ == "__main__":
    main("exchange", SHAPES)
