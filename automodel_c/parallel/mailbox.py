"""Where ranks of one machine tell each other which exchange they are in: numbers in memory that all of them see.

A round of empty gloo messages, with a thread that waits for it, takes some hundred microseconds; this takes a few. Each
rank has two numbers, for even and odd meetings: a rank comes to the next only when all have come to this one, so that
none is ever two ahead.
"""

import mmap
import os
import secrets
import struct
import tempfile
import time

import numpy as np

_SPINS = 200  # looks before a pause, in which other threads run
_PAUSE_S = 50e-6


class Mailbox:
    """One rank's view. Opened in two steps, between which, and after which, the ranks meet in another way."""

    def __init__(self, rank, ranks, name):
        """``name``: the file of `create`. A rank that does not see it has no memory in common with the others."""
        self.rank, self.peers, self._map = rank, [r for r in range(ranks) if r != rank], None
        try:
            with open(name, "r+b") as file:
                self._map = mmap.mmap(file.fileno(), 3 * 8 * ranks)
        except (OSError, ValueError):
            return
        self._cells = np.frombuffer(self._map, np.int64).reshape(ranks, 3)  # process, then of even and odd meetings
        self._cells[rank, 0] = os.getpid()

    def is_shared(self):
        """Whether all ranks see it and each other's processes; the same on every rank, once all have opened it."""
        if self._map is None:
            return False
        return all(self._cells[:, 0] > 0) and not any(map(self._is_gone, self.peers))

    def enter(self, number, tag):
        """Says that this rank is at a meeting. number: of the meeting, tag: 31 bits of what it is."""
        self._cells[self.rank, 1 + number % 2] = _cell(number, tag)

    def has_all(self, number, tag):
        """Whether all ranks are there, and for the same; a short while is waited."""
        wanted, column = _cell(number, tag), 1 + number % 2
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
            with open(f"/proc/{self._cells[peer, 0]}/stat", "rb") as file:
                return file.read().rpartition(b")")[2].split()[0] in (b"Z", b"X")
        except OSError:
            return True


def create(ranks):
    """The name of a new file for `Mailbox`, "" where there can be none."""
    try:
        folder = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
        name = f"{folder}/automodel_c-{os.getpid()}-{secrets.token_hex(8)}"
        with open(name, "xb") as file:
            file.write(struct.pack(f"{3 * ranks}q", *[0] * 3 * ranks))
        return name
    except OSError:
        return ""


def remove(name):
    """Of a file that all have opened: the memory stays while somebody uses it."""
    try:
        os.unlink(name)
    except OSError:
        pass


def _cell(number, tag):
    return (number + 1) << 31 | tag
