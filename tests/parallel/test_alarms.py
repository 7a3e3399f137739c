"""The threads that wait for messages."""

import gc
import time
import weakref

import pytest
import torch.distributed as dist

from automodel_c.parallel import alarms


class Work:
    """Slow to go: one that has let go of the interpreter's lock by then may find the interpreter gone."""

    def __init__(self, alive, error=None):
        self.alive, self.error = alive, error
        alive.append(self.error)

    def wait(self):
        if self.error:
            raise self.error

    def __del__(self):
        time.sleep(0.05)
        self.alive.pop()


@pytest.mark.parametrize("error", [None, RuntimeError("closed")])
def test_nothing_of_the_works_outlives_the_wait(error):
    alive = []
    done = alarms.start(lambda: [Work(alive), Work(alive, error), Work(alive)])
    assert done.result(10) == ([error] if error else [])
    assert not alive


@pytest.mark.parametrize("note", [None, alarms.RankFailure(1, "closed")])
def test_a_failure_does_not_hold_itself(monkeypatch, note):
    """It would hold the tensors and the group too, and a process group made anew hangs while the old one lives."""
    monkeypatch.setattr(alarms, "_failure", lambda *_, **__: note and alarms.RankFailure(note.rank, note.message))
    monkeypatch.setattr(alarms, "_give_up", lambda exchange: None)

    class Held:
        done = None

    def fails():
        held = Held()
        held.done = alarms.start(lambda: [Work([], RuntimeError("lost"))])
        try:
            alarms.wait(held.done, None)
        except RuntimeError as error:
            assert isinstance(error, alarms.RankFailure) == bool(note)
            return weakref.ref(held)

    gc.collect()
    gc.disable()
    try:
        assert fails()() is None
    finally:
        gc.enable()


def numbers_of_a_new_process_group():
    """A note that an earlier process group left at the same store, under the same name and number, is not read."""
    group = dist.group.WORLD
    first = alarms.enter(group, "rows")
    alarms._leave(first, 0, "the first life's")
    del alarms._lines[group]  # as destroy_process_group and another init_process_group do
    again = alarms.enter(group, "rows")
    return first.number == again.number, alarms._failure(again)


def test_a_new_process_group_reads_no_old_notes(rank_pools):
    assert rank_pools(1).run(numbers_of_a_new_process_group) == [(True, None)]
