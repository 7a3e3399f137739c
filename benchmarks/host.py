"""All that is measured over the GPUs of one host, one after another: python -m benchmarks.host --ranks 4

Attention and the gated delta rule over the ranks (bench_context_cuda), rows and reductions (bench_exchange_cuda),
frames (bench_frames_cuda), four layers over every mesh of the ranks (bench_slice_ranks), layers with all experts
(bench_layers), and the planner's predictions beside. Results in results/h200xRANKS; --list prints the commands alone.
A command that fails is told at the end, and the others run.
"""

import argparse
import shlex
import subprocess
import sys
import time
from pathlib import Path

RESULTS = Path("benchmarks/results")


def commands(ranks):
    """[(name, command, seconds it may take)]."""
    results = RESULTS / f"h200x{ranks}"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "-m"]
    for name, seconds in (("context", 120), ("exchange", 60), ("frames", 90)):
        module = f"benchmarks.parallel.bench_{name}_cuda"
        yield name, [sys.executable, "-m", module, "--ranks", str(ranks)], seconds
    for name, module, seconds in (("slice_ranks", "bench_slice_ranks", 240), ("layers", "bench_layers", 120)):
        yield name, [*torchrun, f"benchmarks.recipes.{module}", "--json", str(results / f"{name}.json")], seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, required=True, help="GPUs")
    parser.add_argument("--only", nargs="+", help="of these names alone")
    parser.add_argument("--list", action="store_true", help="print the commands, run none")
    options = parser.parse_args()
    failed = []
    for name, command, seconds in commands(options.ranks):
        if options.only and name not in options.only:
            continue
        print(f"== {name}: {shlex.join(command[1:])}", flush=True)
        if options.list:
            continue
        began = time.monotonic()
        try:
            status = subprocess.run(command, check=False, timeout=seconds).returncode
        except subprocess.TimeoutExpired:
            status = f"{seconds} s were not enough"
        print(f"== {name}: {time.monotonic() - began:.0f} s, {status or 'well'}", flush=True)
        failed += [name] if status else []
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
