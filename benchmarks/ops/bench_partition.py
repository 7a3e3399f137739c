"""frame_partition beside the same methods in Python and NumPy: python -m benchmarks.ops.bench_partition."""

import bisect
import itertools
import platform

import numpy as np

from automodel_c import frame_partition
from automodel_c.reference import partition as reference
from benchmarks.harness import Case, main
from benchmarks.peers import Peer

ALPHA = 3456


def python_bisect(inputs):
    """The published method: running costs, bisect_right at each target, clamped."""
    patches, world = inputs["list"], inputs["world"]

    def run():
        running = list(itertools.accumulate(p * (p + ALPHA) for p in patches))
        cuts = [0]
        for r in range(1, world):
            within = bisect.bisect_right(running, running[-1] * r / world)
            cuts.append(min(max(within, cuts[-1] + 1), len(patches) - (world - r)))
        return [*cuts, len(patches)]

    return run


def numpy_bisect(inputs):
    patches, world = inputs["numpy"], inputs["world"]

    def run():
        running = np.cumsum(patches * (patches + ALPHA))
        within = np.searchsorted(running, running[-1] * np.arange(1, world) / world, side="right")
        cuts = [0]
        for r, cut in enumerate(within.tolist(), 1):
            cuts.append(min(max(cut, cuts[-1] + 1), len(patches) - (world - r)))
        return [*cuts, len(patches)]

    return run


def numpy_minimax(inputs):
    """Binary search over the bound, searchsorted for each part."""
    patches, world = inputs["numpy"], inputs["world"]

    def greedy(running, bound):
        cuts = [0]
        while cuts[-1] < len(patches) and len(cuts) <= world:
            cuts.append(int(np.searchsorted(running, running[cuts[-1]] + bound, side="right")) - 1)
        return cuts

    def run():
        cost = patches * (patches + ALPHA)
        running = np.concatenate([[0], np.cumsum(cost)])
        low, high = int(cost.max()), int(running[-1])
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if greedy(running, middle)[-1] == len(patches) else (middle + 1, high)
        return greedy(running, low)

    return run


def largest(patches, cuts):
    return max(reference.part_costs(patches, [int(cut) for cut in cuts], ALPHA))


def gate_bisect(inputs):
    truth = reference.bisect_cuts(inputs["list"], inputs["world"], ALPHA)

    def gate(outcomes):
        for name, cuts in outcomes.items():
            assert list(map(int, cuts)) == truth, f"{name}: other cuts than the reference"

    return gate


def gate_minimax(inputs):
    """All agree on the least largest cost, and no smaller bound can be met."""

    def gate(outcomes):
        bounds = {name: largest(inputs["list"], cuts) for name, cuts in outcomes.items()}
        assert len(set(bounds.values())) == 1, f"largest costs {bounds}"
        parts, cost = 1, 0
        for p in inputs["list"]:
            one = reference.frame_cost(p, ALPHA)
            parts, cost = (parts, cost + one) if cost + one < bounds["ours"] else (parts + 1, one)
        assert parts > inputs["world"] or bounds["ours"] == max(map(lambda p: p * (p + ALPHA), inputs["list"]))

    return gate


def cases(n, world, bar_s):
    patches = np.random.default_rng().lognormal(5.5, 0.8, n).astype(np.int64) + 1
    inputs = {"numpy": patches, "list": patches.tolist(), "world": world}

    def ours(method):
        return lambda: frame_partition(patches, world, alpha=ALPHA, method=method)

    shape = f"n={n} world={world}"
    rows = {
        "minimax": (gate_minimax, [Peer("numpy", np.__version__, numpy_minimax)]),
        "bisect": (
            gate_bisect,
            [Peer("python", platform.python_version(), python_bisect), Peer("numpy", np.__version__, numpy_bisect)],
        ),
    }
    for method, (gate, peers) in rows.items():
        yield Case("partition", method, shape, "int64", ours(method), gate(inputs), peers, inputs, bar_s=bar_s)


SHAPES = {
    "1k": lambda: cases(1_000, 8, 2e-3),
    "10k": lambda: cases(10_000, 32, 2e-3),
    "100k": lambda: cases(100_000, 256, 20e-3),
}

if __name__ == "__main__":
    main("partition", SHAPES)
