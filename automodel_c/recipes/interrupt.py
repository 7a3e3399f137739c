"""Ctrl-C and SIGTERM while training: the step is finished, a checkpoint saved, and every rank leaves with 128 + signal.

Who was asked travels in the two sums that a step makes anyway, at its beginning and before the weights change, so that
all ranks leave after the same step and nothing is sent besides. Asked twice, a rank leaves at once.
"""

import os
import signal
import threading
import time

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SAME_S = 1.0  # a scheduler tells the launcher and the ranks, and the launcher tells the ranks: that is once


class Interrupted(Exception):
    """A run that was asked to leave has left; `status` is the exit status for it."""

    def __init__(self, number, message):
        self.number = signal.Signals(number)
        super().__init__(f"ended by {self.number.name} {message}")

    @property
    def status(self):
        return 128 + self.number


class Interrupt:
    """``with Interrupt() as interrupt:`` around the steps of a run, in the main thread; elsewhere it hears nothing.

    The first SIGINT or SIGTERM is noted in `asked`; the next, a second later or more, raises KeyboardInterrupt, and
    from then on the signals do what they do by default. notice: whether this rank tells the user so.
    """

    def __init__(self, *, notice=False):
        self.asked, self.notice = None, notice
        self._since, self._previous = None, {}

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *_):
        while self._previous:
            signal.signal(*self._previous.popitem())

    def _note(self, number, _):
        if self.asked is not None:
            if time.monotonic() - self._since < _SAME_S:
                return
            for each in SIGNALS:
                signal.signal(each, signal.SIG_DFL)
            raise KeyboardInterrupt
        self.asked, self._since = signal.Signals(number), time.monotonic()
        if self.notice:  # print may be what the signal interrupted
            os.write(2, f"\n{self.asked.name}: leaving after this step and a checkpoint; again: now\n".encode())

    def flags(self, like):
        """What this rank adds to a sum over ranks: one number a signal, of the dtype and on the device of `like`."""
        flags = like.new_zeros(len(SIGNALS))
        if self.asked is not None:
            flags[SIGNALS.index(self.asked)] = 1
        return flags


NEVER = Interrupt()  # for steps that nobody interrupts


def agreed(sums):
    """The signal that the summed `flags` of all ranks tell of, a list of numbers; None where no rank was asked."""
    return next((number for number, count in zip(SIGNALS, sums, strict=True) if count), None)


def stay_apart(_worker=None):
    """In a process that loads data: what is sent to the terminal's or the rank's process group is not for it."""
    os.setpgrp()
