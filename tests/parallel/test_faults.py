"""Whatever happens to one rank, the others raise, soon, and name it."""

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from automodel_c.parallel import faults
from tests.ranks import RanksFailed

PROMISE_S = 30.0  # CONTRACTS.md; on idle cores it takes 2


@pytest.fixture
def three(rank_pools):
    """Three ranks, whose connections a test may break."""
    yield rank_pools(3)
    rank_pools(3).close()


def collective(group=None):
    dist.all_reduce(torch.ones(1000), group=group)


def busy_python():
    while True:
        sum(range(1000))


def busy_c():
    hashlib.pbkdf2_hmac("sha256", b"", b"", 1_000_000)  # seconds without the interpreter lock, not interruptible


def body(case, rank, pair):
    """What each rank does in a case; rank 1 is the one in trouble."""
    collective()
    if rank == 1:
        if case == "early":
            raise ValueError("bad argument")
        time.sleep(0.5)
        if case.startswith("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        if case == "exited":
            sys.exit(0)
        raise ValueError("bad argument")
    if case == "two":
        time.sleep(0.5)
        raise KeyError(f"mine, on rank {rank}")
    if case in ("subgroup", "killed subgroup"):
        time.sleep(60) if rank == 0 else collective(pair)
    if case in ("python", "sleep", "lock"):
        {"python": busy_python, "sleep": lambda: time.sleep(60), "lock": lambda: threading.Event().wait(60)}[case]()
    if case in ("c, then collective", "killed, collective later"):
        busy_c()
    collective()


def outcome(case):
    """(exception's name, its text, the rank it names, seconds, what the guard left behind) of this rank's guard."""
    rank, pair = dist.get_rank(), dist.new_group([0, 2])
    handler, threads = signal.getsignal(signal.SIGURG), threading.active_count()
    began, error = time.monotonic(), None
    try:
        with faults.guard():
            body(case, rank, pair)
    except BaseException as caught:
        error = caught
    took = time.monotonic() - began
    left = [signal.getsignal(signal.SIGURG) is not handler, threading.active_count() - threads]
    return type(error).__name__, str(error), getattr(error, "rank", None), took, left


def check(answers, message="ValueError: bad argument"):
    for rank, (name, text, named, took, left) in answers.items():
        assert took < PROMISE_S and left == [False, 0], (rank, took, left)
        if rank == 1:
            assert (name, text) == ("ValueError", "bad argument")
        else:
            assert (name, named) == ("RankFailure", 1) and message in text, (rank, name, text)


@pytest.mark.parametrize("case", ["early", "late", "python", "sleep", "lock", "c, then collective", "subgroup"])
def test_guard_when_a_rank_raises(three, case):
    check(dict(enumerate(three.run(outcome, case))))


@pytest.mark.parametrize("case", ["killed", "killed, collective later"])
def test_guard_when_a_rank_is_killed(three, case):
    with pytest.raises(RanksFailed) as failed:
        three.run(outcome, case, grace=20)
    assert failed.value.reports == {1: "died with exit code -9"}
    assert sorted(failed.value.results) == [0, 2]
    check(failed.value.results, "stopped without a message")


def test_guard_when_two_ranks_raise(three):
    answers = three.run(outcome, "two")
    firsts = {named for _, _, named, _, _ in answers if named is not None}
    assert len(firsts) == 1  # one name everywhere, and the first keeps its own exception
    first = firsts.pop()
    assert answers[first][:2] == (
        ("ValueError", "bad argument") if first == 1 else ("KeyError", f"'mine, on rank {first}'")
    )
    for rank, (name, text, _, took, left) in enumerate(answers):
        assert took < PROMISE_S and left == [False, 0]
        assert rank == first or (name == "RankFailure" and text.startswith(f"rank {first} failed: "))


class Speechless(Exception):
    def __str__(self):
        raise ValueError("no words")


ODD_MESSAGES = {
    "no text": (Speechless(), "Speechless: (its text cannot be had: ValueError)"),
    "huge": (ValueError("x" * 30_000_000), "x... (30000000 letters)"),
    "letters": (ValueError("Z\u00e4hler \ud800 \0 \U0001f600"), "ValueError: Z\u00e4hler \ud800 \0 \U0001f600"),
}


def odd_message(case):
    try:
        with faults.guard():
            if dist.get_rank() == 1:
                raise ODD_MESSAGES[case][0]
            collective()
    except faults.RankFailure as error:
        return error.rank, error.message
    except Exception as error:
        return type(error).__name__


@pytest.mark.parametrize("case", ODD_MESSAGES)
def test_guard_when_the_message_is_odd(three, case):
    error, words = ODD_MESSAGES[case]
    answers = three.run(odd_message, case, timeout=PROMISE_S)
    assert answers[1] == type(error).__name__
    for rank, message in (answers[0], answers[2]):
        assert rank == 1 and message.endswith(words) and len(message) < 20_000


def failure_of_an_inner_guard():
    try:
        with faults.guard():
            collective()
            if dist.get_rank() == 0:
                raise faults.RankFailure(1, "ValueError: bad argument")
            time.sleep(60)
    except faults.RankFailure as error:
        return error.rank, error.message


def test_guard_names_the_rank_that_an_inner_guard_named(three):
    assert three.run(failure_of_an_inner_guard) == [(1, "ValueError: bad argument")] * 3


def same_words():
    try:
        with faults.guard():
            collective()
            raise KeyError("no such key")
    except KeyError as error:
        return str(error), error.__notes__


def test_guard_when_all_ranks_fail_alike(three):
    answers = three.run(same_words)
    assert answers == [answers[0]] * 3 and answers[0][0] == "'no such key'"


def host_fails(killed):
    """Rank 0 hosts the store, fails and is gone at once; rank 1 asks the store once a second only."""
    rank = dist.get_rank()
    faults._POLL_S = 1.0 if rank == 1 else faults._POLL_S
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    port = [host.port if host else None]
    dist.broadcast_object_list(port)
    store = host or dist.TCPStore("127.0.0.1", port[0], is_master=False)
    try:
        with faults.guard(store):
            collective()
            if rank == 0 and killed:
                os.kill(os.getpid(), signal.SIGKILL)
            if rank == 0:
                raise ValueError("bad argument")
            time.sleep(60) if rank == 1 else collective()
    except faults.RankFailure as error:
        return error.rank, error.message
    except ValueError:
        os._exit(3)


@pytest.mark.parametrize("killed,code", [(False, 3), (True, -9)], ids=["raises", "killed"])
def test_guard_when_the_stores_host_fails(three, killed, code):
    with pytest.raises(RanksFailed) as failed:
        three.run(host_fails, killed, grace=20)
    assert failed.value.reports == {0: f"died with exit code {code}"}
    said = "stopped without a message (killed?)" if killed else "ValueError: bad argument"
    assert failed.value.results[2][0] == 0 and failed.value.results[2][1].startswith(said)
    assert failed.value.results[1][0] == 0 and failed.value.results[1][1].startswith(said)


def host_ends_well():
    """Rank 0 hosts the store and is gone while the others still compute."""
    faults._LINGER_S = 0.6
    rank = dist.get_rank()
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    port = [host.port if host else None]
    dist.broadcast_object_list(port)
    with faults.guard(host or dist.TCPStore("127.0.0.1", port[0], is_master=False)):
        collective()
        time.sleep(1.5 if rank else 0)
    if rank == 0:
        os._exit(0)
    return "good"


def test_guard_when_the_stores_host_ends_first(three):
    with pytest.raises(RanksFailed) as failed:
        three.run(host_ends_well, grace=20)
    assert failed.value.results == {1: "good", 2: "good"}


def leave_early():
    faults._LINGER_S = 0.6
    rank = dist.get_rank()
    try:
        with faults.guard():
            collective()
            if rank != 1:
                time.sleep(0.3)
                collective()
    except faults.RankFailure as error:
        return error.rank, error.message
    os._exit(0)


def test_guard_when_a_rank_leaves_before_the_others(three):
    with pytest.raises(RanksFailed) as failed:
        three.run(leave_early, grace=20)
    assert failed.value.results == {r: (1, "left before the others") for r in (0, 2)}


def never_returns():
    faults._GIVE_UP_S = 0.5
    with faults.guard():
        if dist.get_rank() == 1:
            raise ValueError("bad argument")
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGURG])
        time.sleep(60)


def test_guard_ends_a_rank_that_nothing_unblocks(three):
    with pytest.raises(RanksFailed) as failed:
        three.run(never_returns, grace=20)
    assert failed.value.reports[0] == failed.value.reports[2] == "died with exit code 1"
    assert (
        "ValueError: bad argument" in failed.value.reports[1]
        and "rank 1 was the first to fail" in failed.value.reports[1]
    )


def twice_well():
    before = threading.active_count(), signal.getsignal(signal.SIGURG), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with faults.guard():
            collective()
        with pytest.raises(SystemExit), faults.guard(group=dist.group.WORLD):
            collective()
            sys.exit(0)  # a good end too
    time.sleep(0.1)
    collective()
    after = threading.active_count(), signal.getsignal(signal.SIGURG), len(os.listdir("/proc/self/fd"))
    return after == before, (before, after)


def test_guard_of_a_good_run_leaves_nothing(rank_pools):
    assert all(same for same, _ in rank_pools(3).run(twice_well)), rank_pools(3).run(twice_well)


def test_guard_without_a_process_group():
    with pytest.raises(ZeroDivisionError), faults.guard():
        raise ZeroDivisionError
    with faults.guard():
        pass


def test_rank_failure_travels():
    import pickle

    copy = pickle.loads(pickle.dumps(faults.RankFailure(3, "no more memory")))
    assert isinstance(copy, RuntimeError) and (copy.rank, copy.message) == (3, "no more memory")
    assert str(copy) == "rank 3 failed: no more memory"


def fails_before_joining():
    """As torchrun's ranks start: the store is the launcher's, and there is no process group yet."""
    store = dist.distributed_c10d._get_default_store().underlying_store
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port), RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="1")
    try:
        with faults.guard():
            if rank == 1:
                raise ValueError("bad argument")
            dist.init_process_group("gloo")
    except faults.RankFailure as error:
        return error.rank, error.message
    except ValueError as error:
        return error.__notes__


def test_guard_before_the_process_group(three):
    waiting = (1, "ValueError: bad argument")
    assert three.run(fails_before_joining) == [waiting, ["rank 1 was the first to fail"], waiting]


def test_guard_under_torchrun():
    script = Path(__file__).with_name("torchrun_fault.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.returncode != 0
    assert "saw RankFailure: rank 1 failed: ValueError: bad argument" in done.stderr, done.stderr[-3000:]
