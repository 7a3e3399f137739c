"""SIGTERM is noted in the process that asked, and nowhere else."""

import multiprocessing
import os
import signal
import threading
import time

import pytest

from automodel_c.recipes.stopping import Stopped, asked_to_stop


def test_sigterm_is_noted_and_the_handler_put_back():
    before = signal.getsignal(signal.SIGTERM)
    with asked_to_stop() as asked:
        assert not asked
        for _ in range(3):  # as a scheduler and a launcher both send it
            os.kill(os.getpid(), signal.SIGTERM)
        assert asked
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_handler_is_put_back_after_a_failure():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ValueError), asked_to_stop():
        raise ValueError
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_forked_worker_ends():
    """Else the data loader could not end the workers that it ends by force."""
    with asked_to_stop() as asked:
        worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        worker.start()
        time.sleep(0.2)
        worker.terminate()
        worker.join(10)
        assert worker.exitcode == -signal.SIGTERM and not asked


def test_another_thread_takes_no_signal():
    found = []

    def body():
        with asked_to_stop() as asked:
            found.append(bool(asked))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert found == [False]


def test_the_words():
    assert str(Stopped(3, "runs/a/step_3")) == "ended by SIGTERM after step 3; saved runs/a/step_3"
    assert str(Stopped(3, None)) == "ended by SIGTERM after step 3; nothing is saved"
