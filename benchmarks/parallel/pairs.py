"""Processes with a GPU each for a benchmark, and how they time something that all take part in."""

import argparse
import json
import os
import statistics
import subprocess
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results"
LEAD = 4_000_000  # cycles that the devices wait, so that all that is timed is on its stream when it begins
_spread = {}  # of what was timed since the last row: (90th - 10th percentile) / median


def main(name, worker):
    """Command line: `worker()` is run on all ranks, yields or returns rows (dicts), and rank 0's are printed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2, help="how many GPUs; 2 is meant")
    parser.add_argument("--json", type=Path, default=None, help=f"default: results/h200xRANKS/{name}.json; '-': none")
    options = parser.parse_args()
    ranks = options.ranks
    if not 2 <= ranks <= torch.cuda.device_count():
        raise SystemExit(f"{name}: {ranks} ranks, a GPU each: torch sees {torch.cuda.device_count()}")
    context = torch.multiprocessing.get_context("spawn")
    results = context.Queue()
    torch.multiprocessing.start_processes(_rank, (ranks, worker, results, _port()), nprocs=ranks, start_method="spawn")
    rows = results.get()
    path = options.json or RESULTS / f"h200x{ranks}/{name}.json"
    if str(path) != "-":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**_machine(), "rows": rows}, indent=1) + "\n")


def _port():
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _rank(rank, ranks, worker, results, port):
    torch.cuda.set_device(rank)
    os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    store = dist.TCPStore("127.0.0.1", port, world_size=ranks, is_master=rank == 0)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=ranks, device_id=torch.device("cuda", rank))
    rows = []
    for row in worker():
        row |= {"spread": dict(_spread)}
        _spread.clear()
        if rank == 0:
            shown = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items() if k != "spread"}
            print("  ".join(f"{k} {v}" for k, v in shown.items()), flush=True)
            rows.append(row)
    if rank == 0:
        results.put(rows)
    dist.barrier()
    torch.cuda.synchronize()
    time.sleep(0.5)  # the store's host goes last
    os._exit(0)


def _machine():
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True).stdout.split()
    return {"device": torch.cuda.get_device_name(0), "driver": driver[0] if driver else "", "torch": torch.__version__,
            "nccl": str(torch.cuda.nccl.version()), "commit": commit.stdout.strip()}  # fmt: skip


def together():
    """All devices wait for each other, on their streams."""
    flag = torch.zeros(1, device="cuda")
    dist.all_reduce(flag)


def seconds(calls, rounds=30, alone=False, lead=LEAD):
    """{name: median seconds of each call on the device, the slower rank's}, interleaved. alone: on rank 0 only, the
    other waits. lead: cycles that the device sleeps before, for the host to be ahead."""
    times = {name: [] for name in calls}
    for call in calls.values():
        if not alone or dist.get_rank() == 0:
            call()
    for _ in range(rounds):
        for name, call in calls.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            together()
            if not alone or dist.get_rank() == 0:
                torch.cuda._sleep(lead)
                begin.record()
                call()
                end.record()
                end.synchronize()
                times[name].append(begin.elapsed_time(end) / 1e3)
            else:
                times[name].append(0.0)
    return _slower(times)


def host_seconds(calls, rounds=200):
    """{name: median seconds of the host in each call, the slower rank's}, while the devices keep up."""
    times = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(5):
            call()
    for n in range(rounds):
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - began)
        if n % 10 == 0:
            torch.cuda.synchronize()
            together()
    return _slower(times)


def _slower(times):
    medians = {name: statistics.median(some) for name, some in times.items()}
    for name, some in times.items():
        tenths = statistics.quantiles(some, n=10)
        _spread[name] = (tenths[-1] - tenths[0]) / medians[name] if medians[name] else 0.0
    both = torch.tensor(list(medians.values()), dtype=torch.float64, device="cuda")
    dist.all_reduce(both, dist.ReduceOp.MAX)
    return dict(zip(medians, both.tolist(), strict=True))
