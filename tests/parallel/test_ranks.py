"""The harness itself: results in order, every traceback, and no hang."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RanksFailed


def sums(n):
    x = torch.full((n,), float(dist.get_rank() + 1))
    dist.all_reduce(x)
    return x


def identity():
    return dist.get_rank(), os.getpid()


def both_raise(text):
    raise ValueError(f"{text} on rank {dist.get_rank()}")


def one_never_arrives():
    if dist.get_rank() == 1:
        raise ValueError("rank 1 stays away")
    dist.barrier()


def one_is_killed():
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return "survived"


def sleeper():
    time.sleep(600)


def unpicklable():
    return lambda: None


def test_run_keeps_the_ranks(ranks):
    first, second = ranks.run(identity), ranks.run(identity)
    assert [rank for rank, _ in first] == [0, 1]
    assert first == second and os.getpid() not in dict(first).values()
    assert all(torch.equal(x, torch.full((3,), 3.0)) for x in ranks.run(sums, 3))


@pytest.mark.parametrize("world", [3, 4])
def test_run_on_more_ranks(rank_pools, world):
    assert all(torch.equal(x, torch.full((2,), world * (world + 1) / 2)) for x in rank_pools(world).run(sums, 2))


def test_run_shows_every_traceback(ranks):
    with pytest.raises(RanksFailed) as failed:
        ranks.run(both_raise, "boom")
    for rank in (0, 1):
        assert f"ValueError: boom on rank {rank}" in failed.value.reports[rank]
        assert "in both_raise" in str(failed.value)


@pytest.mark.parametrize(
    "worker,limits,said",
    [
        pytest.param(
            one_never_arrives, {"grace": 0.5}, {1: "rank 1 stays away", 0: "in one_never_arrives"}, id="blocked"
        ),
        pytest.param(one_is_killed, {}, {0: "died with exit code -9"}, id="killed"),
        pytest.param(sleeper, {"timeout": 0.5}, {0: "in sleeper", 1: "in sleeper"}, id="timeout"),
        pytest.param(unpicklable, {}, {0: "pickle", 1: "pickle"}, id="unpicklable"),
    ],
)
def test_run_after_a_failure(ranks, worker, limits, said):
    before = time.monotonic()
    with pytest.raises(RanksFailed) as failed:
        ranks.run(worker, **limits)
    assert time.monotonic() - before < 20
    for rank, text in said.items():
        assert text in failed.value.reports[rank]
    assert ranks.run(sums, 1) == [torch.full((1,), 3.0)] * 2


def test_a_killed_rank_leaves_the_others_results(ranks):
    with pytest.raises(RanksFailed) as failed:
        ranks.run(one_is_killed)
    assert failed.value.results == {1: "survived"} and list(failed.value.reports) == [0]
