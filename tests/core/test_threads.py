"""Threads and processes around the extension: fork, concurrent calls, the GIL, and counts that change nothing."""

import os
import signal
import threading
import time
import warnings

import pytest
import torch

from automodel_c import _amcore, docs_from_ids

NUMBERS = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.01}
MANY = 1 << 18  # elements: several chunks of the pool


def adam(seed, n=MANY, steps=2):
    """The parameter after some steps on random gradients."""
    generator = torch.Generator().manual_seed(seed)
    state = [torch.randn(n, generator=generator), torch.zeros(n), torch.zeros(n), torch.zeros(1)]
    for _ in range(steps):
        gradient = torch.randn(n, generator=generator)
        _amcore.adam_step(*([x] for x in state), [gradient], **NUMBERS)
    return state[0]


@pytest.fixture
def two_threads():
    before = _amcore.build_info()["num_threads"]
    _amcore.set_num_threads(4)
    yield
    _amcore.set_num_threads(before)


def test_thread_count_changes_no_bit(threads, isa):
    with_many = adam(1)
    before = _amcore.build_info()["num_threads"]
    _amcore.set_num_threads(1)
    alone = adam(1)
    _amcore.set_num_threads(before)
    assert torch.equal(with_many, alone)


def in_child(work):
    """Exit status of a forked child that runs `work`; killed after a while, so that a hang is a failure."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork in a threaded process is the point
        child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)  # torch's own loops wait there for threads that stayed behind
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    until = time.monotonic() + 60
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "hang"


def test_fork_after_use(two_threads):
    expected = adam(2)

    def work():
        assert torch.equal(adam(2), expected)
        assert docs_from_ids([1, 1]).tolist() == [[0, 2]]

    torch.set_num_threads(torch.get_num_threads())
    for _ in range(3):
        assert in_child(work) == 0
    assert torch.equal(adam(2), expected)


def test_fork_while_other_threads_compute(two_threads):
    stop, failures = threading.Event(), []
    expected = adam(3)

    def busy():
        while not stop.is_set():
            if not torch.equal(adam(3), expected):
                failures.append("another result")

    def work():
        assert torch.equal(adam(3), expected)

    workers = [threading.Thread(target=busy) for _ in range(2)]
    for worker in workers:
        worker.start()
    try:
        outcomes = [in_child(work) for _ in range(4)]
    finally:
        stop.set()
        for worker in workers:
            worker.join()
    assert outcomes == [0] * 4 and not failures


class Documents(torch.utils.data.Dataset):
    """Each item is computed with the extension in a worker process."""

    def __len__(self):
        return 8

    def __getitem__(self, i):
        return torch.from_numpy(docs_from_ids([i + 1] * (i + 1))), adam(i, n=1 << 16, steps=1)


def test_data_loader_workers(two_threads):
    adam(4)
    loader = torch.utils.data.DataLoader(
        Documents(), batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=60
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        items = list(loader)
    assert [docs.tolist() for docs, _ in items] == [[[0, i + 1]] for i in range(8)]
    assert all(torch.equal(made, adam(i, n=1 << 16, steps=1)) for i, (_, made) in enumerate(items))


def test_concurrent_calls(two_threads):
    expected = [adam(seed) for seed in range(4)]
    results = [[] for _ in range(4)]

    def work(seed):
        for _ in range(5):
            results[seed].append(adam(seed))

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert all(torch.equal(x, expected[seed]) for seed in range(4) for x in results[seed])


def test_errors_keep_their_thread():
    """The text of a failure belongs to the thread that failed."""
    wrong = []

    def work(world):
        for _ in range(300):
            try:
                _amcore.frame_partition([1], -world, alpha=0, bisect=False)
            except ValueError as error:
                if f"world is -{world}," not in str(error):
                    wrong.append(str(error))

    workers = [threading.Thread(target=work, args=(world,)) for world in range(1, 5)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_the_gil_is_released(two_threads):
    """While a long call runs, another Python thread goes on; with the GIL held it could not take a single step."""
    n = 1 << 25
    state = [torch.zeros(n) for _ in range(3)] + [torch.zeros(1)]
    gradient = torch.ones(n)
    ticks, running = [], threading.Event()
    stop = threading.Event()

    def tick():
        running.set()
        while not stop.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.0002)

    ticker = threading.Thread(target=tick)
    ticker.start()
    running.wait()
    began = time.perf_counter()
    _amcore.adam_step(*([x] for x in state), [gradient], **NUMBERS)
    ended = time.perf_counter()
    stop.set()
    ticker.join()
    assert ended - began > 0.005
    assert sum(began < t < ended for t in ticks) >= 3
