"""Reduce-scatter on two gloo ranks, and the sum of its parts alone, beside torch's.

python -m benchmarks.ops.bench_comm [--shape NAME ...] [--json PATH] [--min-ratio R] [--no-gate] [--ranks N]

Every row first passes its gate, the error rule against float64, ours and each peer's. Rounds are interleaved. A ratio
is the peer's median over ours; `self` is ours over ours, the spread inside which ratios are equal.
"""

import argparse
import json
import os
import platform
import statistics
import time

import torch
import torch.distributed as dist
import torch.multiprocessing

from automodel_c import _amcore
from automodel_c.parallel.fsdp_hooks import ReduceParts
from tests.numerics import measure as error_of

SHAPES = {"64K": 1 << 16, "1M": 1 << 20, "8M": 1 << 23}  # elements of a rank's slice
ROUNDS = 15


def peers_of_exchange(out, whole, group):
    """One rank's whole reduce-scatter, each way; the result lies in `out` [n]."""
    rank, world = group.rank(), group.size()
    native = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    bf16 = ReduceParts(wire_dtype=torch.bfloat16)
    ours = ReduceParts()

    def slice_of_all_reduce():
        copy = whole.clone()  # an all-reduce overwrites its input, a reduce-scatter does not
        dist.all_reduce(copy, group=group)
        out.copy_(copy.view(world, -1)[rank])

    return {
        "ours": lambda: ours(out, whole, group, dist.ReduceOp.SUM),
        "ours again": lambda: ours(out, whole, group, dist.ReduceOp.SUM),
        "ours, bf16 on the wire": lambda: bf16(out, whole, group, dist.ReduceOp.SUM),
        "torch reduce_scatter": lambda: native(out, whole, group=group),
        "torch all_reduce + slice": slice_of_all_reduce,
    }


def peers_of_sum(out, parts):
    """The arithmetic alone: parts [R, n] -> out [n]."""
    return {
        "ours": lambda: _amcore.comm_reduce_parts(out, parts, scale=1.0),
        "ours again": lambda: _amcore.comm_reduce_parts(out, parts, scale=1.0),
        "torch.sum": lambda: torch.sum(parts, 0, dtype=torch.float32, out=out),
    }


def refuse(peers, out, sent):
    """SystemExit unless each callable leaves in `out` what the error rule asks; sent [R, n]: what the ranks gave."""
    truth, wrong = sent.double().sum(0), []
    for name, call in peers.items():
        call()
        wire = torch.bfloat16 if "bf16" in name else sent.dtype
        plain = sent.to(wire).float().sum(0)
        if not error_of(out, plain, truth)["passes"]:
            wrong.append(name)
    if wrong:
        raise SystemExit(f"the gate is red for {wrong}: nothing is timed")


def measure(peers, meet):
    """{name: seconds of each round}, interleaved; `meet` lines the ranks up before every call."""
    times = {name: [] for name in peers}
    for _ in range(ROUNDS):
        for name, call in peers.items():
            meet()
            began = time.perf_counter_ns()
            call()
            times[name].append((time.perf_counter_ns() - began) / 1e9)
    return {name: seconds[3:] for name, seconds in times.items()}


def row(operation, shape, dtype, times):
    middle = {name: statistics.median(seconds) for name, seconds in times.items()}
    ours = middle.pop("ours")
    print(f"{operation:<15}{shape:<5}{dtype:<9}ours {1e3 * ours:8.3f} ms (min {1e3 * min(times['ours']):.3f})", end="")
    for name, seconds in middle.items():
        label = "self" if name == "ours again" else name
        print(f"   {label} {1e3 * seconds:.3f} ms ({seconds / ours:.2f}x)", end="")
    print(flush=True)
    ratios = {name: seconds / ours for name, seconds in middle.items()}
    return {"op": operation, "shape": shape, "dtype": dtype, "ms_median": 1e3 * ours, "ratio": ratios,
            "ms_min": {name: 1e3 * min(seconds) for name, seconds in times.items()}}  # fmt: skip


def rank_main(rank, options, port):
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=options.ranks)
    torch.set_num_threads(1)
    _amcore.set_num_threads(1)
    rows, world = [], options.ranks
    for shape in options.shape:
        n = SHAPES[shape]
        buffers = [torch.randn(world * n, generator=torch.Generator().manual_seed(r)) for r in range(world)]
        out = torch.empty(n)
        peers = peers_of_exchange(out, buffers[rank], dist.group.WORLD)
        if not options.no_gate:
            refuse(peers, out, torch.stack([b.view(world, n)[rank] for b in buffers]))
        times = measure(peers, dist.barrier)
        if rank == 0:
            rows.append(row("reduce_scatter", shape, "float32", times))
            for dtype in (torch.float32, torch.bfloat16):
                parts = torch.stack([b[:n] for b in buffers]).to(dtype)
                alone = peers_of_sum(out, parts)
                if not options.no_gate:
                    refuse(alone, out, parts)
                rows.append(row("reduce_parts", shape, str(dtype)[6:], measure(alone, lambda: None)))
        dist.barrier()
    if rank == 0:
        finish(rows, options)
    dist.barrier()
    dist.destroy_process_group()


def finish(rows, options):
    if options.json:
        head = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__,
                "ranks": options.ranks, "cores": os.cpu_count(), "isa": _amcore.build_info()["isa"]}  # fmt: skip
        with open(options.json, "w") as file:
            json.dump(head | {"rows": rows}, file, indent=1)
    slow = [(r["op"], r["shape"], name) for r in rows for name, x in r["ratio"].items() if x < (options.min_ratio or 0)]
    if slow:
        raise SystemExit(f"below --min-ratio {options.min_ratio}: {slow}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--json")
    parser.add_argument("--min-ratio", type=float)
    parser.add_argument("--no-gate", action="store_true")
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.multiprocessing.spawn(rank_main, (options, store.port), nprocs=options.ranks)


if __name__ == "__main__":
    main()
