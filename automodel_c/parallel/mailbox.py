"""Where ranks of one machine tell each other which exchange they are in: numbers in memory that all of them see.

A round of empty gloo messages, with a thread that waits for it, takes some hundred microseconds; this takes a few. Each
rank has two numbers, for even and odd meetings: a rank comes to the next only when all have come to this one, so that
none is ever two ahead.
"""

import atexit
import mmap
import os
import secrets
import tempfile
import time

import numpy as np

_SPINS = 200  # looks before a pause, in which other threads run
_PAUSE_S = 50e-6
_COLUMNS = 4


class Mailbox:
    """One rank's view. Three things are done one after another, and after each the ranks meet in another way: it is
    opened, each `says` whether it sees the others, and it `is_shared` where all do."""

    def __init__(self, rank, ranks, name):
        """``name``: the file of `create`. A rank that does not see it has no memory in common with the others."""
        self.rank, self.peers, self._map = rank, [r for r in range(ranks) if r != rank], None
        try:
            with open(name, "r+b") as file:
                self._map = mmap.mmap(file.fileno(), 8 * _COLUMNS * ranks)
        except (OSError, ValueError):
            return
        # of each rank: of even and odd meetings, its process, whether it sees the others
        self._cells = np.frombuffer(self._map, np.int64).reshape(ranks, _COLUMNS)
        self._cells[rank, 2] = os.getpid()

    def say(self):
        """Whether this rank sees all others' processes."""
        if self._map is not None and all(self._cells[:, 2] > 0) and not self.gone():
            self._cells[self.rank, 3] = 1

    def is_shared(self):
        """Whether all ranks see all others; the same on every rank."""
        return self._map is not None and bool(all(self._cells[:, 3] == 1))

    def enter(self, number, tag):
        """Says that this rank is at a meeting. number: of the meeting, tag: 31 bits of what it is."""
        self._cells[self.rank, number % 2] = _cell(number, tag)

    def has_all(self, number, tag):
        """Whether all ranks are there, and for the same; a short while is waited."""
        wanted, column = _cell(number, tag), number % 2
        missing = self.peers
        for _ in range(_SPINS):
            missing = [peer for peer in missing if self._cells[peer, column] != wanted]
            if not missing:
                return True
        time.sleep(_PAUSE_S)
        return False

    def gone(self):
        """Ranks of the group whose processes have ended."""
        return [peer for peer in self.peers if self._is_gone(peer)]

    def _is_gone(self, peer):
        try:
            with open(f"/proc/{self._cells[peer, 2]}/stat", "rb") as file:
                return file.read().rpartition(b")")[2].split()[0] in (b"Z", b"X")
        except OSError:
            return True


def create(ranks):
    """The name of a new file for `Mailbox`, "" where there can be none."""
    try:
        folder = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
        name = f"{folder}/automodel_c-{os.getpid()}-{secrets.token_hex(8)}"
        with open(name, "xb") as file:
            file.write(bytes(8 * _COLUMNS * ranks))
        atexit.register(remove, name)  # where they never met again
        return name
    except OSError:
        return ""


def remove(name):
    """Of a file that all have opened: the memory stays while somebody uses it."""
    try:
        os.unlink(name)
    except OSError:
        pass  # removed already


def _cell(number, tag):
    return (number + 1) << 31 | tag
