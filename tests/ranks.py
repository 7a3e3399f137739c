"""Ranks that stay alive for the whole pytest session.

``RankPool(world)`` starts ``world`` processes once, joins them into one gloo group and then runs top-level
functions on all of them::

    def worker(n):                                  # runs on every rank, in the rank's main thread
        x = torch.full((n,), float(dist.get_rank()))
        dist.all_reduce(x)
        return x

    def test_sum(ranks):                            # the session fixture of two ranks
        assert all(torch.equal(x, torch.ones(3)) for x in ranks.run(worker, 3))

A call returns the ranks' results in rank order, or raises `RanksFailed` with what every rank said. A rank that died,
raised or ran past the time limit takes the pool down; the next call starts a new one. The ranks are forked from a
server that imported torch and transformers once, so a restart costs a fraction of a second. The store lives in the
pytest process: it survives the death of any rank.
"""

import dataclasses
import datetime
import faulthandler
import importlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import tempfile
import time
import traceback

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

TIMEOUT_S = 60.0  # one call
GRACE_S = 5.0  # for the other ranks, once one has failed

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(  # what is missing is left out
    [
        "pytest", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor",
        "transformers.models.qwen3_5_moe.modeling_qwen3_5_moe",
    ]
)  # fmt: skip


class RanksFailed(RuntimeError):
    """``reports`` maps a failed rank to its traceback, ``results`` every other rank to what it returned."""

    def __init__(self, reports, results):
        self.reports, self.results = reports, results
        super().__init__("\n".join(f"--- rank {r} ---\n{text}" for r, text in sorted(reports.items())))


@dataclasses.dataclass
class _Rank:
    process: multiprocessing.process.BaseProcess
    conn: multiprocessing.connection.Connection
    trace: str


class RankPool:
    """``world`` ranks on this machine under one process group; ``backend`` as in ``init_process_group``.

    ``device``: "cpu", or "cuda" where each rank's `here` is to be a GPU; on fewer GPUs than ranks they share them.
    Results come back on the CPU.
    """

    def __init__(self, world, backend="gloo", device="cpu"):
        self.world, self.backend, self.device = world, backend, device
        self._ranks = []

    def run(self, function, *args, timeout=TIMEOUT_S, grace=GRACE_S, **options):
        """Call the top-level ``function(*args, **options)`` on all ranks; results in rank order, or `RanksFailed`."""
        if not self._ranks or any(not r.process.is_alive() for r in self._ranks):
            self.close()
            self._start()
        call = pickle.dumps((f"{function.__module__}:{function.__qualname__}", args, options))
        reports, results = self._collect(call, timeout, grace)
        if reports:
            self.close()
            raise RanksFailed(reports, results)
        return [results[rank] for rank in range(self.world)]

    def close(self):
        """End the ranks; a later ``run`` starts new ones."""
        for rank in self._ranks:
            rank.conn.close()
        for rank in self._ranks:
            rank.process.join(0.2)
            rank.process.kill()
            rank.process.join()
            os.unlink(rank.trace)
        self._ranks = []

    def _start(self):
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(self.world):
            mine, theirs = _context.Pipe()
            handle, trace = tempfile.mkstemp(prefix="rank-")
            os.close(handle)
            process = _context.Process(
                target=_serve,
                args=(rank, self.world, self.backend, self.device, self._store.port, theirs, trace),
                name=f"rank {rank}",
                daemon=True,
            )
            process.start()
            theirs.close()
            self._ranks.append(_Rank(process, mine, trace))

    def _collect(self, call, timeout, grace):
        reports, results = {}, {}
        waiting = dict(enumerate(self._ranks))
        for rank in self._ranks:
            try:
                rank.conn.send_bytes(call)
            except OSError:
                pass  # it died just now: its pipe says so below
        deadline = time.monotonic() + timeout
        while waiting and time.monotonic() < deadline:
            ready = multiprocessing.connection.wait([r.conn for r in waiting.values()], deadline - time.monotonic())
            for number, rank in list(waiting.items()):
                if rank.conn in ready:
                    del waiting[number]
                    self._receive(number, rank, reports, results)
            if reports:
                deadline = min(deadline, time.monotonic() + grace)
        for number, rank in waiting.items():
            reports[number] = "still running when the time was up, at\n" + _stack_of(rank)
        return reports, results

    def _receive(self, number, rank, reports, results):
        try:
            good, value = pickle.loads(rank.conn.recv_bytes())
        except (EOFError, OSError):
            rank.process.join(1.0)
            good, value = False, f"died with exit code {rank.process.exitcode}"
        (results if good else reports)[number] = value


def _stack_of(rank):
    if rank.process.is_alive():
        os.kill(rank.process.pid, signal.SIGUSR1)
        time.sleep(0.3)
    with open(rank.trace) as file:
        return file.read()


def here():
    """The device of this rank; the CPU in a process that is none."""
    return _here[-1]


_here = [torch.device("cpu")]


def _serve(rank, world, backend, device, port, conn, trace):
    """A rank's main loop; it ends when the pytest process closes the pipe, or ends itself."""
    if device == "cuda":
        _here.append(torch.device("cuda", rank % torch.cuda.device_count()))
        torch.cuda.set_device(here())
    with open(trace, "w") as file:
        faulthandler.register(signal.SIGUSR1, file, all_threads=True)
        torch.set_num_threads(1)
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=10 * TIMEOUT_S)
        )
        while True:
            try:
                call = conn.recv_bytes()
            except (EOFError, OSError):
                os._exit(0)  # no atexit work: peers may be gone already
            conn.send_bytes(_answer(call))


def _answer(call):
    try:
        name, args, options = pickle.loads(call)
        module, function = name.split(":")
        found = getattr(importlib.import_module(module), function)(*args, **options)
        return pickle.dumps((True, tree_map_only(torch.Tensor, lambda x: x.cpu() if x.is_cuda else x, found)))
    except BaseException:  # whatever it is, the test must see it
        return pickle.dumps((False, traceback.format_exc()))


@pytest.fixture(scope="session")
def rank_pools():
    """``rank_pools(n)``: the session's pool of n ranks, started on first use."""
    pools = {}

    def get(world):
        if world not in pools:
            pools[world] = RankPool(world)
        return pools[world]

    yield get
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="session")
def ranks(rank_pools):
    """The session's two ranks."""
    return rank_pools(2)
