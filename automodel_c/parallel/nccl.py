"""The NCCL communicators that this process has open, one for every process group that rows on GPUs travel in.

They are the extension's own (`_amcore.comm_open`), beside those of torch. Kernels of several communicators may be under
way at once on a GPU; NCCL 2.26 and newer start them in the order in which the host called, where
NCCL_LAUNCH_ORDER_IMPLICIT is 1 before the first of them is made. It is set here, unless it was.
"""

import os
import time
import weakref

from automodel_c import _amcore

os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")

CHUNK, PLACES, ALL_PLACES = 16 << 20, 4, 256 << 20  # bytes: a place in a window; all, as many again for sums
MOST_RANKS = 16  # that share windows
SHORT = 2 << 20  # bytes of a message that travels best on the stream that waits for it

waiting = None  # since when the host has waited for its peers to come to an exchange
_open = weakref.WeakKeyDictionary()  # process group -> its Communicator


class Communicator:
    """One rank's end of a communicator, which begins to open. ``id``: of `_amcore.comm_id`, the same on every rank."""

    def __init__(self, group, id, device):
        self.number = _amcore.comm_open(id, rank=group.rank(), ranks=group.size(), device=device.index)
        self.since = None  # of the last exchange
        self.has_windows = False
        self._ranks = group.size()
        # what is read and written, by where it arrives: freed before `join`, it would be given to others meanwhile
        self._held = {}
        _open[group] = self
        close = weakref.finalize(self, _amcore.comm_close, self.number, abort=False)
        close.atexit = False  # NCCL is not to be called while the interpreter ends

    def is_ready(self):
        """Whether it is open; RuntimeError when NCCL found something wrong."""
        return _amcore.comm_state(self.number)[0]

    def exchange(self, arriving, sent, send_bytes, receive_bytes, joined=False):
        """Bytes to and from every rank, on a stream of its own behind the current one; the host goes on. ``joined``:
        and the current stream waits, so that `join` is not needed."""
        self._hold(arriving, sent)
        _amcore.comm_exchange(
            arriving, sent, comm=self.number, send_bytes=send_bytes, receive_bytes=receive_bytes, joined=joined
        )  # fmt: skip
        if joined:
            self._let_go(arriving)

    def window(self):
        """Memory that the other ranks of this machine write into: its handle, for `attach` on every rank."""
        chunk = min(CHUNK, ALL_PLACES // (PLACES * (self._ranks - 1)))
        return _amcore.comm_window(self.number, chunk=chunk // 4096 * 4096)

    def attach(self, handles):
        """Maps the windows of all ranks."""
        _amcore.comm_attach(self.number, handles="".join(handles))

    def sum(self, out, sent, scale):
        """out [n] = scale * the sum of every rank's row for this one, sent [ranks, n]; needs windows. As `exchange`."""
        self._hold(out, sent)
        _amcore.comm_sum(out, sent, comm=self.number, scale=scale)

    def join(self, arriving):
        """The current stream waits for what began to arrive there, and for all that was begun before."""
        _amcore.comm_join(arriving, comm=self.number)
        self._let_go(arriving)

    def _let_go(self, arriving):
        held = self._held.get(arriving.data_ptr())
        if held:
            held.pop(0)
        if not held:
            self._held.pop(arriving.data_ptr(), None)

    def _hold(self, arriving, sent):
        self.since = time.monotonic()
        self._held.setdefault(arriving.data_ptr(), []).append((arriving, sent))

    def is_stalled(self, seconds):
        """Whether what the last exchange began has been under way for so long."""
        if self.since is None or time.monotonic() - self.since < seconds:
            return False
        try:
            return _amcore.comm_state(self.number)[1]
        except (ValueError, RuntimeError):  # closed, or wrong: its user hears of it
            return False

    def abort(self):
        """Ends it, and what is under way, from any thread."""
        _amcore.comm_close(self.number, abort=True)


def communicator(group):
    """The one of ``group``, or None."""
    return _open.get(group)


def abort(group):
    """Ends the communicator of a group, if it has one: whoever waits for its messages goes on, without them."""
    if group in _open:
        _open.pop(group).abort()


def abort_all():
    """`abort` of every group."""
    for group in list(_open):
        abort(group)


def any_stalled(seconds):
    """Whether messages of some group have been under way, or the host has waited for its peers, for so long."""
    if waiting is not None and time.monotonic() - waiting > seconds:
        return True
    return any(one.is_stalled(seconds) for one in list(_open.values()))
