"""Measures what the planner of context parallelism is told: python -m benchmarks.prices.

Seconds of one score of one head and one dim (attention forward and backward on one thread), of one byte through gloo
between two processes of this machine (both directions busy, packing and unpacking included), and of one more message.
Prints the file; --write keeps it as automodel_c/parallel/prices/cpu_gloo.json.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing

from automodel_c import _amcore, ops
from automodel_c.parallel.exchange import Route, exchange
from benchmarks.harness import machine

PATH = Path(__file__).parents[1] / "automodel_c/parallel/prices/cpu_gloo.json"
TOKENS, HEADS, KV_HEADS, DIM = 1024, 8, 2, 128


def least(call, rounds=31):
    """Seconds of the fastest call: a busy machine only ever adds."""
    call()
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times)


def seconds_of_a_score(dtype):
    q, k, v = (torch.randn(TOKENS, n, DIM).to(dtype).requires_grad_() for n in (HEADS, KV_HEADS, KV_HEADS))
    upstream = torch.ones(TOKENS, HEADS, DIM, dtype=dtype)
    seconds = least(lambda: torch.autograd.grad(ops.attention(q, k, v), (q, k, v), upstream))
    return seconds / (TOKENS * (TOKENS + 1) / 2 * HEADS * DIM)


def measure_wire(rank, port, answer):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.set_num_threads(1)
    times = []
    for rows in (1, 4096):
        moves = np.array([[0, 1, 0, 0, rows], [1, 0, 0, 0, rows]])
        route = Route.of(moves[np.argsort(moves[:, 1])], rank, 2, rows, rows)
        x = torch.randn(rows, 512)
        times.append(least(lambda route=route, x=x: exchange(x, route, dist.group.WORLD), rounds=101))
    if rank == 0:
        row_bytes = 512 * 4
        answer.put((times[0], (times[1] - times[0]) / (4095 * row_bytes)))
    dist.barrier()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prices", description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help=f"keep it as {PATH.name}")
    parser.add_argument("--port", type=int, default=29517)
    options = parser.parse_args()
    _amcore.set_num_threads(1)
    torch.set_num_threads(1)
    context = torch.multiprocessing.get_context("spawn")
    answer = context.SimpleQueue()
    ranks = [context.Process(target=measure_wire, args=(r, options.port, answer)) for r in range(2)]
    for process in ranks:
        process.start()
    message, byte = answer.get()
    for process in ranks:
        process.join()
    here = machine()
    kept = {
        "what": "seconds of a score (one head, one dim, both passes, one thread), of a byte, of a message",
        "measured_by": "python -m benchmarks.prices",
        "machine": f"{here['cpu']}, {here['cores']} cores, torch {here['torch']}, {here['build']['isa']}",
        "score": {str(t).removeprefix("torch."): seconds_of_a_score(t) for t in (torch.float32, torch.bfloat16)},
        "byte": byte / 2,  # a rank is busy with what it sends and with what it receives
        "message": message / 2,
    }
    text = json.dumps(kept, indent=1) + "\n"
    print(text, end="")
    if options.write:
        PATH.write_text(text)


if __name__ == "__main__":
    main()
