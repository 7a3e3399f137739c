"""Draws fifty steps of training beside transformers with torch's AdamW: python -m benchmarks.recipes.curves.

Above the losses, which lie on each other; below how far each is from transformers in float64, one document at a time.
What tests/recipes/test_curves.py asserts of two seeds, drawn of one, into benchmarks/results/cpu/curves.png.
"""

import argparse
import tempfile
from pathlib import Path

from tests.patch import models
from tests.ranks import RankPool
from tests.recipes import curves_worker as worker

PICTURE = Path(__file__).parents[1] / "results/cpu/curves.png"
MESHES = {"one rank": (1, 1), "cp 2": (1, 2), "dp 2": (2, 1)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--picture", type=Path, default=PICTURE)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = worker.checkpoint(folder, options.seed)
        exact = worker.by_transformers(models.in_float64(model), options.seed)
        curves = {"transformers, float32": worker.by_transformers(model, options.seed)}
        for name, shape in MESHES.items():
            pool = RankPool(shape[0] * shape[1])
            curves[f"ours, {name}"] = pool.run(worker.by_ours, folder, options.seed, shape, timeout=600)[0]
            pool.close()
    for name, curve in curves.items():
        error = (curve - exact).abs()
        print(f"{name:24s} loss {curve[0]:.4f} -> {curve[-1]:.4f}, off by at most {error.max():.2e}")
    draw(curves, exact, options.picture)


def draw(curves, exact, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(9, 7), sharex=True, layout="constrained")
    steps = range(1, len(exact) + 1)
    for name, curve in curves.items():
        above.plot(steps, curve, linewidth=1.2, label=name)
        below.semilogy(steps, (curve - exact).abs().clamp(min=1e-9), linewidth=1.0, label=name)
    above.set_title("loss", loc="left", fontsize=10)
    below.set_title("distance from transformers in float64", loc="left", fontsize=10)
    below.set_xlabel("step")
    for axis in (above, below):
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
