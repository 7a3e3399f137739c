"""Every call of the leak list, many times: no memory and no reference may stay behind.

Watched: blocks of Python's allocator, bytes of malloc, resident memory, and the reference count of every argument.
AM_LEAK_ROUNDS sets how many times (2,000 here, 100,000 with `make leaks`).
"""

import contextlib
import ctypes
import gc
import itertools
import os
import sys
from pathlib import Path

import pytest

from automodel_c import _amcore, build_info
from tests.core.producers import Producer
from tests.leaks.calls import CALLS

ROUNDS = int(os.environ.get("AM_LEAK_ROUNDS", "2000"))
BATCHES = 4


class MallInfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks in_use".split()
    ] + [("more", ctypes.c_size_t * 2)]


def malloc_bytes():
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        return 0
    mallinfo2.restype = MallInfo
    return mallinfo2().in_use


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def leaves(arguments):
    for value in arguments:
        yield from leaves(value) if isinstance(value, list | tuple) else [value]


def repeat(method, args, kwargs, raises, rounds):
    """Calls it `rounds` times; what the hostile producers of the tests hold themselves is dropped after each call."""
    producers = [x for x in leaves([*args, *kwargs.values()]) if isinstance(x, Producer)]
    for _ in range(rounds):
        if raises is None:
            method(*args, **kwargs)
        else:
            with contextlib.suppress(raises):
                method(*args, **kwargs)
                raise AssertionError(f"{method.__name__} did not raise {raises.__name__}")
        for producer in producers:
            producer._held.clear(), producer.calls.clear()


def measure():
    gc.collect()
    return sys.getallocatedblocks(), malloc_bytes(), resident_bytes()


@pytest.fixture(autouse=True, scope="module")
def _quick_collections():
    """What exists already, torch above all, is no business of the collector's here."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _settings_restored():
    info = build_info()
    yield
    _amcore.set_isa(info["isa"])
    _amcore.set_num_threads(info["num_threads"])


def grown(before, after):
    return [new - old for old, new in zip(before, after, strict=True)]


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_nothing_stays_behind(call):
    method = getattr(_amcore, call.method)
    args, kwargs = call.make()
    objects = [x for x in leaves([*args, *kwargs.values()]) if not isinstance(x, int | float | str | None)]
    rounds = max(10, ROUNDS // BATCHES // call.slow)
    repeat(method, args, kwargs, call.raises, min(200, rounds))
    references = [sys.getrefcount(x) for x in objects]
    states = [measure()]
    for _ in range(BATCHES):
        repeat(method, args, kwargs, call.raises, rounds)
        states.append(measure())
    growth = [grown(before, after) for before, after in itertools.pairwise(states)]
    blocks, malloced, resident = map(min, zip(*growth, strict=True))  # a leak grows in every batch, a cache does not
    assert [sys.getrefcount(x) for x in objects] == references, "an argument's reference count changed"
    assert blocks < 50 + rounds // 10, f"at least {blocks} blocks of Python's allocator in each {rounds} calls"
    assert malloced < 2048 + 4 * rounds, f"at least {malloced} bytes of malloc in each {rounds} calls"
    assert resident < (1 << 17) + 8 * rounds, f"at least {resident} bytes resident in each {rounds} calls"


def test_producers_get_everything_back():
    producer = Producer()
    repeat(_amcore.index_array, (producer,), {}, None, 50)
    assert producer.deleted == 50


def test_the_watch_sees_a_leak():
    kept, address = [], []
    allocate = ctypes.CDLL(None).malloc
    allocate.restype = ctypes.c_void_p
    before = measure()
    for _ in range(2000):
        kept.append(object())
        address.append(allocate(100))
    blocks, malloced, _ = grown(before, measure())
    release = ctypes.CDLL(None).free
    release.argtypes = [ctypes.c_void_p]
    for one in address:
        release(one)
    assert blocks >= 2000 and (malloced >= 200_000 or malloc_bytes() == 0)
