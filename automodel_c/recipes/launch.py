"""Ranks on this machine: what `automodel-c train --nproc N` starts and waits for."""

import logging
import os
import signal
import sys
import tempfile
import time

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes
from torch.distributed.elastic.multiprocessing.api import SignalException

from .interrupt import SIGNALS

_HOST = "127.0.0.1"
_POLL_S = 0.2
_LAST_WORDS_S = 10  # the longest that ranks may take to leave by themselves after one has failed
_CLOSE_S = 15  # and then after a SIGTERM


def run_ranks(arguments, ranks):
    """Runs `python <arguments>` as `ranks` ranks, in the environment that torchrun would give them.

    SIGINT and SIGTERM are passed on to the ranks, which end when they see fit; SIGHUP and SIGQUIT end them. Returns
    (the rank that failed first, its exit status), (None, 0) where none failed, (None, status) where SIGHUP or SIGQUIT
    came to this process; an exit status below 0 is a signal's number.
    """
    # what it says of failures, the caller says better
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)  # outlives any rank
    with tempfile.TemporaryDirectory(prefix="ranks_") as folder, _PassOn() as pass_on:
        context = start_processes(
            name="train",
            entrypoint=sys.executable,
            args=dict.fromkeys(range(ranks), tuple(arguments)),
            envs={rank: _environment(rank, ranks, store.port) for rank in range(ranks)},
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        try:
            pass_on.to(context.pids().values())
            return _wait(context)
        except SignalException as error:  # SIGHUP and SIGQUIT, which torch watches for
            context.close(error.sigval)
            return None, -error.sigval


def _wait(context):
    """What `run_ranks` returns, once all ranks have ended. After the first to fail the others have a while to find out
    who it was and to say so; torch's own wait would end them before."""
    processes, first, deadline = context.subprocess_handlers, (None, 0), float("inf")
    while time.monotonic() < deadline:
        statuses = {rank: of.proc.poll() for rank, of in processes.items()}
        if first == (None, 0) and (failed := [(rank, status) for rank, status in statuses.items() if status]):
            first, deadline = failed[0], time.monotonic() + _LAST_WORDS_S
        if None not in statuses.values():
            break
        time.sleep(_POLL_S)
    context.close(timeout=_CLOSE_S)
    return first


def _environment(rank, ranks, port):
    found = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "GROUP_RANK": 0,
        "GROUP_WORLD_SIZE": 1,
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_RUN_ID": os.getpid(),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", 1),
    }
    return {key: str(value) for key, value in found.items()}


class _PassOn:
    """Sends the ranks the signals that come to this process: a terminal's Ctrl-C does not reach them by itself."""

    def __init__(self):
        self.processes, self.early = [], []

    def __enter__(self):
        self.previous = {number: signal.signal(number, self._pass) for number in SIGNALS}
        return self

    def __exit__(self, *_):
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def to(self, processes):
        """From now on to these process ids; what came before goes there now."""
        for number in SIGNALS:
            signal.signal(number, self._pass)  # torch took them when it started the ranks
        self.processes = list(processes)
        for number in self.early:
            self._pass(number, None)

    def _pass(self, number, _):
        if not self.processes:
            self.early.append(number)
        for process in self.processes:
            try:
                os.kill(process, number)
            except ProcessLookupError:  # it has ended
                pass
