"""SIGTERM: a run that is asked to end finishes its step, saves, and ends.

The sender waits as long as it likes (Slurm's grace, Kubernetes', 30 s of torchrun's launcher) and kills then. So does
the launcher when a rank has failed: ranks that SIGTERM ended at once could not say whom they heard of.
"""

import contextlib
import os
import signal
import threading

EXIT_STATUS = 128 + signal.SIGTERM


class Stopped(Exception):
    """The run ended early, as it was asked to. ``step``: the last one that was taken; ``saved``: its checkpoint, None
    where the recipe keeps none."""

    def __init__(self, step, saved):
        self.step, self.saved = step, saved
        super().__init__(f"ended by SIGTERM after step {step}; {f'saved {saved}' if saved else 'nothing is saved'}")


class _Asked:
    """Whether this rank was: another one may not have been."""

    def __init__(self):
        self.flag = False

    def __bool__(self):
        return self.flag


@contextlib.contextmanager
def asked_to_stop():
    """Inside, SIGTERM makes what this gives true, and does nothing else; processes that are forked inside end by it. In
    another thread than the main one no signal is taken, and it stays false."""
    asked = _Asked()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    owner = os.getpid()

    def take(_signal, _frame):
        if os.getpid() == owner:
            asked.flag = True
            return
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a worker of the data loader, which was forked with this
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, take)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGTERM, before)
