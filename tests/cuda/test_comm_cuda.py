"""A communicator of one rank: opened, used, refused and closed. Two ranks: test_parallel_cuda."""

import time

import pytest
import torch

from automodel_c import _amcore

pytestmark = pytest.mark.cuda


def opened(**changes):
    number = _amcore.comm_open(_amcore.comm_id(), **{"rank": 0, "ranks": 1, "device": 0, **changes})
    for _ in range(3000):
        if _amcore.comm_state(number)[0]:
            break
        time.sleep(0.01)
    return number


@pytest.fixture
def comm():
    number = opened()
    yield number
    _amcore.comm_close(number, abort=False)


def nothing():
    return torch.empty(0, device="cuda")


def exchange(comm, sent=None, arriving=None, send_bytes=(0,), receive_bytes=(0,)):
    sent, arriving = (nothing() if x is None else x for x in (sent, arriving))
    _amcore.comm_exchange(
        arriving, sent, comm=comm, send_bytes=list(send_bytes), receive_bytes=list(receive_bytes)
    )  # fmt: skip


def test_one_rank_sends_nothing(comm):
    assert _amcore.comm_state(comm) == (True, False)
    exchange(comm)
    _amcore.comm_join(nothing(), comm=comm)
    torch.cuda.synchronize()
    assert _amcore.comm_state(comm) == (True, False)


def test_what_goes_behind_the_current_stream_is_under_way(comm):
    torch.cuda._sleep(200_000_000)
    exchange(comm)
    assert _amcore.comm_state(comm) == (True, True)
    torch.cuda.synchronize()
    assert _amcore.comm_state(comm) == (True, False)


def test_numbers_never_come_again(comm):
    other = opened()
    _amcore.comm_close(other, abort=True)
    _amcore.comm_close(other, abort=True)
    third = opened()
    assert len({comm, other, third}) == 3
    with pytest.raises(ValueError, match=f"comm_state: there is no communicator {other}"):
        _amcore.comm_state(other)
    with pytest.raises(ValueError, match="comm_exchange: there is no communicator"):
        exchange(other)
    with pytest.raises(ValueError, match="comm_join: there is no communicator"):
        _amcore.comm_join(nothing(), comm=other)
    _amcore.comm_close(third, abort=False)


def test_refused(comm):
    four = torch.zeros(4, device="cuda")
    with pytest.raises(ValueError, match="send_bytes has 2 numbers, there are 1 ranks"):
        exchange(comm, send_bytes=(0, 0), receive_bytes=(0, 0))
    with pytest.raises(ValueError, match="rank 0 sends to itself"):
        exchange(comm, four, four.clone(), (16,), (16,))
    with pytest.raises(ValueError, match="send_bytes are 0 in all, sent has 16 bytes"):
        exchange(comm, four)
    with pytest.raises(ValueError, match="arriving and sent share memory"):
        exchange(comm, four, four, (16,), (16,))


def test_a_device_that_is_not_there():
    number = _amcore.comm_open(_amcore.comm_id(), rank=0, ranks=1, device=torch.cuda.device_count() + 7)
    with pytest.raises(RuntimeError, match="cudaSetDevice"):
        for _ in range(3000):
            _amcore.comm_state(number)
            time.sleep(0.01)
    _amcore.comm_close(number, abort=False)


def test_one_that_waits_for_a_rank_that_never_comes_can_be_left():
    began = time.monotonic()
    number = _amcore.comm_open(_amcore.comm_id(), rank=0, ranks=2, device=0)
    time.sleep(0.5)
    assert _amcore.comm_state(number) == (False, False)
    with pytest.raises(ValueError, match="is not open yet"):
        exchange(number, send_bytes=(0, 0), receive_bytes=(0, 0))
    _amcore.comm_close(number, abort=True)
    assert time.monotonic() - began < 10
