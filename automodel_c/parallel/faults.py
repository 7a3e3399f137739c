"""When one rank fails, every rank raises, and each names the first to fail.

::

    with faults.guard():
        train(...)

A successful step costs nothing: no collective is added. A thread asks the store four times a second whether anybody
left a note, and leaves a heartbeat there. It has its own connection, for a store client that waits blocks its others.

What a rank does when its body raises: it writes its rank and message to the store (the first note wins), cuts its
connections, waits until the others have read the note, and raises. What the others do when they read it: they cut
their connections, which ends a collective they are blocked in, and raise `RankFailure` in the main thread by way of
SIGURG, which ends a sleep, a lock or a Python loop. A call into C that returns late raises when it returns; one that
does not return within 20 s ends the process, after the message is printed. A rank that dies without a word is found by
its peers' broken connections and by its heartbeat, which stopped. On GPUs a peer's connections say nothing: where rows
have been on their way over NCCL for two seconds, heartbeats are looked at, and ten seconds without one mean a death.
Communicators, ours and torch's, are aborted with the connections, so that a host that waits for its device goes on.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist

from . import nccl
from .sockets import cut_connections

_POLL_S = 0.25  # notes and heartbeats
_SILENT_S = 1.5  # six missed heartbeats: after a lost connection, that rank is taken for dead
_LINGER_S = 5.0  # the longest wait for the others to have read the note, or to have left, before this rank goes
_STORE_TOO_S = 3.0  # when cutting the peers did not unblock the rank, it may wait for the store: cut that too
_GIVE_UP_S = 20.0  # blocked where nothing helps: end the process
_STALLED_S = 2.0  # rows on their way over NCCL for so long: is the peer alive?
_DEAD_S = 10.0  # heartbeats missed by a rank that others' GPUs wait for; another thread's call may hold it up
_LONGEST = 10_000  # letters of a note: the store refuses values of more than 8 MiB, and drops who sends one


class RankFailure(RuntimeError):
    """Rank ``rank`` (global, int; -1: the launcher) was the first to fail, with ``message`` (str)."""

    def __init__(self, rank, message):
        self.rank, self.message = rank, message
        super().__init__(f"rank {rank} failed: {message}" if rank >= 0 else message)

    def __reduce__(self):
        return type(self), (self.rank, self.message)


_guards = []  # the _Watch of every guard that this process is in, the innermost last


def known_failure():
    """A `RankFailure` where a guard of this process knows of one, else None. For threads that a guard does not
    interrupt: backward on a GPU runs in one, while the main thread waits for it and hears no signal."""
    found = next((watch.failure for watch in reversed(_guards) if watch.failure), None)
    return found and RankFailure(found.rank, found.message)


@contextlib.contextmanager
def guard(store=None, group=None):
    """Around a rank's main: turn the failure of any rank into an exception on every rank, within 30 s (2 s as a rule).

    ``store``: a torch.distributed store that all ranks share (default: the process group's, or before there is one
    that of torchrun). ``group``: the ranks that watch each other (default: all). Ranks enter and leave their guards in
    the same order. Without any store there is nobody to tell, and the guard does nothing.

    Raises `RankFailure` where another rank failed first, from the exception that this rank met, if any. The first rank
    to fail raises its own exception, unchanged but for a note; so does a rank that failed with the same words. Enter
    it in the main thread: elsewhere a rank that is not in a collective is not interrupted. After a failure the rank's
    gloo connections are gone: build new groups to go on.
    """
    if (store := store or _default_store()) is None:
        yield
        return
    watch = _Watch(store, group)
    watch.start()
    _guards.append(watch)
    try:
        try:
            yield
            watch.leave()
        finally:
            watch.over.set()
    except GeneratorExit:
        raise
    except BaseException as error:
        if (raised := watch.verdict(error)) is error:
            raise
        raise raised from error
    finally:
        _guards.remove(watch)
        watch.stop()


class _Watch:
    """One rank's end of a guard: the keys in the store, the thread that reads them, the handler that raises."""

    def __init__(self, store, group):
        self.rank, self.others = _membership(group)
        self.ports = _ports(store)
        self.store = store.clone()
        self.over = threading.Event()  # the body is no longer running: never interrupt again
        self.ended = threading.Event()  # the guard is left: no more heartbeats
        self.failure, self.gone = None, []  # the note, once this rank has read or written it
        self.left = 0  # how many ranks have ended well, at the last look
        self.main = threading.current_thread() if threading.current_thread() is threading.main_thread() else None
        name = "automodel_c/guard/" + (group.group_name if group is not None else "world")
        self.prefix = f"{name}/{self.store.add(f'{name}/entered/{self.rank}', 1)}"
        self.lock = threading.Lock()
        self.heard = {}  # rank -> its heartbeat and when it was new, while rows on GPUs are stalled
        self.thread = threading.Thread(target=self._loop, name="automodel_c faults", daemon=True)

    def start(self):
        if self.main:
            self.previous = signal.signal(signal.SIGURG, self._raise)
        self.thread.start()

    def stop(self):
        self.over.set()
        self.ended.set()
        self.thread.join()
        if self.main:
            signal.signal(signal.SIGURG, self.previous)

    def leave(self):
        """A normal end. Whoever failed meanwhile is still told."""
        self.over.set()
        with contextlib.suppress(RuntimeError):  # the store's host may have ended before us
            self._read()
            self.ended.set()
            self.thread.join()
            self.store.set(self._beat_key(self.rank), "left")
            self.store.add(f"{self.prefix}/left", 1)
            self._wait_for("left", 1 + len(self.others))
        if self.failure:
            raise self.failure

    def verdict(self, error):
        """The exception with which the guard ends, given the one that ended its body."""
        if isinstance(error, SystemExit) and not error.code:
            self.leave()
            return error
        try:
            self._settle(error)
        except RuntimeError:  # the store is gone: nobody can be asked or told
            if not self.failure and _lost_connection(error):
                self.failure = _store_lost()
        _cut(self.ports)
        with contextlib.suppress(RuntimeError):
            self._wait_for("seen", 1 + len(self.others) - len(self.gone))
        if self.failure is None or not isinstance(error, Exception):
            return error  # KeyboardInterrupt and the like stay what they are
        own = self.failure.rank == self.rank and not _lost_connection(error)  # else its peers found it at fault
        if own or self.failure.message == _words(error):
            error.add_note(f"rank {self.failure.rank} was the first to fail")
            return error
        return self.failure

    def _settle(self, error):
        if not self._read() and _lost_connection(error):
            self._find_silent()
        if self.failure:
            return
        if isinstance(error, RankFailure):  # from a guard inside this one: who failed is known
            self._write(error.rank, error.message)
        else:
            self._write(self.rank, _words(error))

    def _find_silent(self):
        """A peer's connection broke: wait for its note, or for its heartbeat to be missed."""
        before, deadline = self._beats(), time.monotonic() + _SILENT_S
        while time.monotonic() < deadline:
            if self._read():
                return
            time.sleep(_POLL_S)
        after = self._beats()
        silent = [r for r in self.others if after[r] == before[r]]
        if silent and not self._read():
            first = min(silent, key=lambda r: (after[r] is None, after[r] == "left", r))
            how = "left before the others" if after[first] == "left" else "stopped without a message (killed?)"
            self._write(first, how, gone=silent)

    def _find_dead(self):
        """While rows on GPUs are stalled: a peer whose heartbeat stopped is taken for dead."""
        if not nccl.any_stalled(_STALLED_S):
            self.heard = {}
            return
        now = time.monotonic()
        for rank, beat in self._beats().items():
            if self.heard.get(rank, (None, now))[0] != beat:
                self.heard[rank] = beat, now
        dead = [rank for rank, (beat, since) in self.heard.items() if beat != "left" and now - since > _DEAD_S]
        if dead:
            self._write(min(dead), "stopped without a message (killed?)", gone=dead)

    def _beats(self):
        keys = {r: self._beat_key(r) for r in self.others}
        return {r: self.store.get(k).decode() if self.store.check([k]) else None for r, k in keys.items()}

    def _beat_key(self, rank):
        return f"{self.prefix}/beat/{rank}"

    def _write(self, rank, message, gone=()):
        note = json.dumps({"rank": rank, "message": message, "gone": list(gone)})
        self._take(self.store.compare_set(f"{self.prefix}/note", "", note))

    def _read(self):
        if not self.failure and self.store.check([f"{self.prefix}/note"]):
            self._take(self.store.get(f"{self.prefix}/note"))
        return self.failure

    def _take(self, note):
        with self.lock:
            if self.failure is None:
                note = json.loads(note)
                self.gone = note["gone"]
                self.failure = RankFailure(note["rank"], note["message"])
                self.store.add(f"{self.prefix}/seen", 1)

    def _wait_for(self, key, count):
        """Until ``count`` ranks have said so, a few seconds at most: this rank may host the store that tells them."""
        deadline = time.monotonic() + _LINGER_S
        while self.store.add(f"{self.prefix}/{key}", 0) < count and time.monotonic() < deadline:
            time.sleep(0.02)

    def _loop(self):
        beat = 0
        try:
            while not self.ended.wait(_POLL_S if beat else 0):
                beat += 1
                self.store.set(self._beat_key(self.rank), str(beat))
                self._find_dead()
                if self._read():
                    break
                self.left = self.store.add(f"{self.prefix}/left", 0)
        except RuntimeError:  # the store is gone, and nobody had left: its host died
            if not self.left and not self.over.is_set():
                self.failure = self.failure or _store_lost()
        if self.failure:
            self._interrupt()

    def _interrupt(self):
        began, spare = time.monotonic(), self.ports
        if not self.over.is_set():
            _abort_nccl()
        while not self.over.is_set():
            cut_connections(spare)
            if self.main:
                signal.pthread_kill(self.main.ident, signal.SIGURG)
            self.over.wait(1.0)
            if time.monotonic() - began > _STORE_TOO_S:
                spare = ()
            if time.monotonic() - began > _GIVE_UP_S and not self.over.is_set():
                last_words = f"{self.failure}\nrank {self.rank} does not return from a call: ending it"
                print(last_words, file=sys.stderr, flush=True)
                os._exit(1)

    def _raise(self, signum, frame):
        if self.failure and not self.over.is_set():
            raise self.failure


def _cut(ports):
    """Ends what goes on between this rank and others, but for the stores at these ports."""
    _abort_nccl()
    cut_connections(ports)


def _abort_nccl():
    """Has a thread abort every communicator of NCCL, which may take its time."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        threading.Thread(target=_abort_all, name="automodel_c abort", daemon=True).start()


def _abort_all():
    nccl.abort_all()
    for group in list(dist.distributed_c10d._world.pg_map) if dist.is_initialized() else ():
        with contextlib.suppress(Exception):  # no NCCL in it, or aborted already
            backend = group._get_backend(torch.device("cuda"))
            if backend.name() == "nccl":
                backend.abort()


def _words(error):
    try:
        text = str(error)
    except Exception as worse:
        text = f"(its text cannot be had: {type(worse).__name__})"
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]}... ({len(text)} letters)"
    return f"{type(error).__name__}: {text}"


def _default_store():
    if dist.is_initialized():
        return dist.distributed_c10d._get_default_store()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    agent = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    return dist.PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", agent)


def _membership(group):
    if dist.is_initialized():
        rank, ranks = dist.get_rank(), dist.get_process_group_ranks(group or dist.group.WORLD)
    else:
        rank, ranks = int(os.environ["RANK"]), range(int(os.environ["WORLD_SIZE"]))
    return rank, [r for r in ranks if r != rank]


def _ports(*stores):
    """The ports of these stores and of the process group's, seen through any prefixes."""
    stores = [*stores, dist.distributed_c10d._get_default_store()] if dist.is_initialized() else list(stores)
    ports = set()
    for store in stores:
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        ports |= {store.port} if isinstance(store, dist.TCPStore) else set()
    return ports


def _lost_connection(error):
    if isinstance(error, (dist.DistBackendError, dist.DistNetworkError)):
        return True
    text = _words(error).lower()
    signs = ("gloo/", "connection closed", "connection reset", "broken pipe", "timed out waiting")
    return isinstance(error, RuntimeError) and any(sign in text for sign in signs)


def _store_lost():
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return RankFailure(-1, "the launcher, which hosts the store, is gone")
    return RankFailure(0, "stopped without a message (killed?); its store is gone")
