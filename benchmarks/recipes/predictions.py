"""What the planner says of the slice: python -m benchmarks.recipes.predictions

Prints predictions beside the runs that there are, of one GPU (results/h200/slice.json) and of two
(results/h200x2/slice_ranks.json). Those of two GPUs are the ones that were committed before the runs, in
results/predictions/slice_ranks.json; --now makes them anew, with what the runs have taught since: how fast NCCL
gathers, and by how much kernels beside it take longer. --write keeps new ones. --layers prints and keeps those of
bench_layers on two, four and eight GPUs, in results/predictions/layers.json.
"""

import argparse
import json
from pathlib import Path

from automodel_c.recipes.planner import Machine, memory, timing
from benchmarks.ops.bench_attention_cuda import heavy_tailed
from benchmarks.recipes.slice_jobs import LAYER_PACKS, layers_prediction, projection, slice_job

RESULTS = Path(__file__).parents[1] / "results"
KEPT, LAYERS = RESULTS / "predictions/slice_ranks.json", RESULTS / "predictions/layers.json"
ONE = {"16K": [16384], "32K heavy": heavy_tailed(32768), "16K head": [16384], "128K heavy": heavy_tailed(131072)}
TWO = {"32K heavy": heavy_tailed(32768), "32K heavy x 2": heavy_tailed(65536), "32K": [32768], "32K x 2": [65536]}
MESHES = {"one": (1, 1, 1), "dp 2": (2, 1, 1), "ep 2": (2, 1, 2), "cp 2": (2, 2, 1), "cp 2 x ep 2": (2, 2, 2)}


def of_one():
    machine = Machine.load()
    for shape, lengths in ONE.items():
        yield {"mesh": "one", "shape": shape, **predicted(slice_job(lengths, head="head" in shape), machine)}


def of_two():
    machine = Machine.load(pair=True)
    for shape, lengths in TWO.items():
        alone = None
        for mesh, (world, cp, ep) in MESHES.items():
            if mesh != "one" and (cp > 1) != shape.endswith("x 2"):
                continue
            found = predicted(slice_job(lengths, world=world, cp=cp, ep=ep), machine)
            alone = alone or found
            yield {"mesh": mesh, "shape": shape, "speedup": round(world * found["rate"] / alone["rate"], 3), **found}


def predicted(job, machine):
    seconds, held = timing(job, machine), memory(job)
    return {
        "step_ms": round(seconds.step * 1e3, 2), "peak_gib": round(held.allocated / 2**30, 3),
        "rate": round(seconds.rate(job), 1),
        "ms": {part: round(s * 1e3, 3) for part, s in seconds.parts.items()},
        "hidden_ms": {part: round(s * 1e3, 3) for part, s in seconds.hidden.items()},
        "gib": {part: round(n / 2**30, 3) for part, n in held.parts.items()},
    }  # fmt: skip


def beside(rows, path):
    """Lines of predictions, with the run of the same name where the file has one."""
    runs = {}
    if path.exists():
        for row in json.loads(path.read_text())["rows"]:
            if row.get("variant", "ours") == "ours" and "ms" in row:
                runs[row.get("mesh", "one"), row["shape"]] = row
    for row in rows:
        line = f"{row['mesh']:12s} {row['shape']:14s} {row['step_ms']:8.1f} ms {row['peak_gib']:6.1f} GiB"
        line += f"  speedup {row['speedup']:.2f}" if "speedup" in row else ""
        run = runs.get((row["mesh"], row["shape"]))
        if run:
            line += f"   ran {run['ms']['step']:8.1f} ms ({row['step_ms'] / run['ms']['step'] - 1:+.1%})"
            line += f" {run['peak_gib']:6.1f} GiB ({row['peak_gib'] / run['peak_gib'] - 1:+.1%})"
            line += f" speedup {run['speedup']:.2f}" if "speedup" in run else ""
        yield line


def write_layers():
    rows = {}
    for world in (2, 4, 8):
        for name, lengths_of in LAYER_PACKS.items():
            lengths = lengths_of(16384 * world)
            found = layers_prediction(lengths, world) | {"projection": projection(lengths)}
            rows[f"{world} {name}"] = found
            print(f"{world} GPUs, {name}: {found['layers']} layers {found['step_ms']} ms {found['peak_gib']} GiB")
    LAYERS.write_text(
        json.dumps({"written_by": "python -m benchmarks.recipes.predictions --layers", "rows": rows}, indent=1) + "\n"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help=f"keep those of two GPUs as {KEPT.name}")
    parser.add_argument("--now", action="store_true", help="those of two GPUs anew, with what their runs have taught")
    parser.add_argument("--layers", action="store_true", help=f"write {LAYERS.name} alone")
    options = parser.parse_args()
    if options.layers:
        return write_layers()
    print("\n".join(beside(of_one(), RESULTS / "h200/slice.json")))
    anew = options.write or options.now or not KEPT.exists()
    kept = list(of_two()) if anew else json.loads(KEPT.read_text())["rows"]
    print("\n".join(beside(kept, RESULTS / "h200x2/slice_ranks.json")))
    if options.write:
        KEPT.parent.mkdir(parents=True, exist_ok=True)
        KEPT.write_text(
            json.dumps({"written_by": "python -m benchmarks.recipes.predictions", "rows": kept}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
