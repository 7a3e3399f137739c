"""A rank with a bad argument, or with another than its peers have: every rank of the group raises, and names it.

Nothing is asked while all is well. The exchanges of a group are numbered. Ranks tag the messages of one with its number
and what it is (`Exchange.tag`), so that gloo matches only messages of ranks that agree: others wait, where sizes that
disagree would end the process. A rank that has waited for half a second says in the store what it waits for, looks at
what its peers say there, and looks again after every half second, for:

- a note under the number of this exchange, left by a rank that raised on its way there (`everywhere`);
- a peer that waits for something else under that number, or that went by something on its way there, a plan say, that
  this rank did not (`pass_by`: a line to the store, some ten microseconds, which nobody answers).

Rows on GPUs are carried by NCCL, which knows no tags: there ranks `meet` before, by messages that are tagged and empty,
or, on one machine, in memory that they share.

Whoever finds the latter leaves a note too. `guard` (faults.py) watches everything else that can go wrong with a
rank, and is told by these exceptions too.
"""

import atexit
import collections
import concurrent.futures
import contextlib
import dataclasses
import datetime
import functools
import hashlib
import json
import queue
import threading
import time
import traceback
import weakref

import torch
import torch.distributed as dist

from . import mailbox, nccl
from .faults import RankFailure, _lost_connection, _ports, _words, known_failure
from .sockets import cut_connections

_SPELL_S = 0.5
_LOOK_S, _PATIENT_S = 0.002, 0.01  # how often, and after how long, a wait lets others run
_LINGER_S = 3.0
_SAID, _KEPT = 16, 100  # of what a rank went by: how much it says, how much it remembers
_PATIENCE = datetime.timedelta(minutes=30)
_lines = weakref.WeakKeyDictionary()  # process group -> its _Line
_idle, _waited = [], set()  # hands without work; futures of the others'


@dataclasses.dataclass
class _Line:
    """One rank's way through a group: its global ``ranks``, where the store has what they say, how many exchanges this
    one entered, or failed to, and what it went by since, {index: words}."""

    ranks: list
    prefix: str
    number: int = 0
    path: dict = dataclasses.field(default_factory=dict)
    host: dist.ProcessGroup | None = None  # gloo between these ranks, where the group has none
    met: int = 0  # how often they met
    file: str = ""  # of the mailbox
    box: mailbox.Mailbox | None = None  # where they meet, once it is open; False: they have none


@dataclasses.dataclass(frozen=True, eq=False)
class Exchange:
    """One that this rank has entered. ``words``: what must be alike on all ranks, for people to read. ``path``: what it
    went by since the one before, and the words."""

    group: dist.ProcessGroup
    number: int
    words: str
    path: dict
    since: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def key(self):
        """Where notes about it lie in the store."""
        return _key(self.group, self.number)

    @property
    def tag(self):
        """31 bits of what the ranks must agree on."""
        digest = hashlib.blake2b(f"{self.number} {self.words}".encode(), digest_size=4).digest()
        return int.from_bytes(digest, "little") >> 1


def groups():
    """Those that this process exchanges rows in."""
    return list(_lines) if dist.is_initialized() else []


def watch(group):
    """Makes it one of `groups`."""
    if group not in _lines:
        ranks = dist.get_process_group_ranks(group)
        name = f"automodel_c/alarm/{group.group_name}/{ranks[0]}"  # groups that a mesh makes at once may share a name
        # so may those of process groups one after another
        life = shared_store().add(f"{name}/lives/{dist.get_rank()}", 1)
        _lines[group] = _Line(ranks, f"{name}/{life}")
    return _lines[group]


def enter(group, words):
    """The next `Exchange` of ``group``."""
    line = watch(group)
    entered = Exchange(group, line.number, words, _longer(line.path, words))
    line.number, line.path = line.number + 1, {}
    return entered


def pass_by(group, words):
    """Says what this rank goes by on its way to its next exchange, without waiting for anybody."""
    line = watch(group)
    line.path = _longer(line.path, words)
    _say(group, line.number, line.path)


def host_group(group):
    """A group of the same ranks that carries what is on the host: itself, where it has gloo. The first call waits for
    the other ranks' first."""
    line = watch(group)
    if line.host is None and not _has_gloo(group):
        store = dist.PrefixStore(f"{line.prefix}/host", shared_store().clone())
        line.host = dist.ProcessGroupGloo(store, group.rank(), group.size(), _PATIENCE)
    return line.host or group


@contextlib.contextmanager
def everywhere(*groups):
    """Around a rank's way to its next exchange in ``groups`` (None: one rank): its exception is raised on every rank.

    Here it is raised unchanged, on the others as a `RankFailure`. Where all ranks fail alike the group stays usable;
    where one fails, its peers cut their connections, and new groups are needed to go on.
    """
    try:
        yield
    except RankFailure:
        raise
    except Exception as error:
        # a lost connection means that another rank failed, which is looked for
        told = getattr(error, "_told", [])
        untold = [group for group in groups if group is not None and group not in told]
        if untold and not _lost_connection(error):
            error._told = [*told, *untold]
            _tell(untold, error)
        raise


def start(post):
    """Has a thread call ``post``, which returns c10d Works, and wait for them; the future of what went wrong, a list.

    gloo takes a time-out of its own wait as the end of all connections, so a wait in spells needs a thread.
    """
    done = concurrent.futures.Future()
    _waited.add(done)
    done.add_done_callback(_waited.discard)
    try:
        hand = _idle.pop()
    except IndexError:
        hand = _Hand()
    hand.todo.put((post, done))
    return done


def meet(exchange):
    """Waits until all ranks are in this exchange; RankFailure where one is in another.

    The first three times over gloo, while a `mailbox` is opened, then in that, where all ranks have it in common.
    """
    line = watch(exchange.group)
    if line.box and line.met > 2:
        line.box.enter(line.met, exchange.tag)
        until(functools.partial(line.box.has_all, line.met, exchange.tag), exchange, line.box.gone)
        line.met += 1
        return
    if line.met == 0 and exchange.group.rank() == 0:
        line.file = mailbox.create(exchange.group.size())
        shared_store().set(_key(exchange.group, "mailbox"), line.file)
    wait(start(functools.partial(_greet, exchange.group, exchange.tag)), exchange)
    if line.met == 0:
        name = shared_store().get(_key(exchange.group, "mailbox")).decode()
        line.box = mailbox.Mailbox(exchange.group.rank(), exchange.group.size(), name)
    elif line.met == 1:
        line.box.say()
    elif line.met == 2:
        line.box = line.box if line.box.is_shared() else False
        if exchange.group.rank() == 0:
            mailbox.remove(line.file)
    line.met += 1


def until(ready, exchange, gone=lambda: []):
    """Looks again and again until ``ready()``; RankFailure where a peer left a note at this exchange, is in another, or
    is ``gone()``, and where a guard knows of one that failed elsewhere."""
    began, failure = (looked := time.monotonic()), None
    try:
        while not ready():
            now = time.monotonic()
            if now - began > _PATIENT_S:
                time.sleep(_LOOK_S)
            if now - looked > _SPELL_S:
                nccl.waiting, looked = began, now
                failure = known_failure()
                if failure:
                    raise failure
                failure = _failure(exchange) or _death(exchange, gone())
                if failure:
                    _give_up(exchange)
                    raise failure
    finally:
        nccl.waiting = None
        del failure  # see `wait`


def _death(exchange, gone):
    """Of those of the group's ranks that are gone, a note about the first."""
    if not gone:
        return None
    rank = watch(exchange.group).ranks[gone[0]]
    return _leave(exchange, rank, "stopped without a message (killed?)")


def fail(exchange, error):
    """Tells the others, who are in this exchange, what this rank raises in it."""
    if isinstance(error, RankFailure):
        return
    error._told = [*getattr(error, "_told", []), exchange.group]
    _leave(exchange, dist.get_rank(), _words(error))
    _linger([exchange])


def wait(done, exchange):
    """Waits for what `start` began, the messages of an `Exchange`. They end or fail together."""
    cause = failure = None
    try:
        while not failure:
            try:
                errors = done.result(_SPELL_S)
            except TimeoutError:
                failure = _failure(exchange)
                continue
            if not errors:
                return
            cause = errors.pop()
            # a RuntimeError: a peer is gone, perhaps after it left a note
            failure = _failure(exchange, last=True) if isinstance(cause, RuntimeError) else None
            if not failure:
                raise cause
        _give_up(exchange)
        raise failure from cause
    finally:
        # an exception that its own frame holds keeps the group until the collector comes, and with an old process
        # group alive a new one may talk to it
        del cause, failure


def _give_up(exchange):
    """After a failure nothing more goes between the ranks of the group."""
    _linger([exchange])
    nccl.abort(exchange.group)
    cut_connections(_ports(shared_store()))


def _greet(group, tag):
    host, rank, nothing = host_group(group), group.rank(), torch.empty(0, dtype=torch.uint8)
    others = [peer for peer in range(group.size()) if peer != rank]
    works = [host.recv([nothing], peer, tag) for peer in others]
    return works + [host.send([nothing], peer, tag) for peer in others]


def _has_gloo(group):
    try:
        group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return False
    return True


class _Hand(threading.Thread):
    """A thread that waits on behalf of others."""

    def __init__(self):
        super().__init__(name="automodel_c exchange", daemon=True)
        self.todo = queue.SimpleQueue()
        self.start()

    def run(self):
        while True:
            post, done = self.todo.get()
            errors = _carry_out(post)
            # nothing of the Works may outlive this: they let go of the interpreter's lock as they go, and where it has
            # ended by then, which it may once anyone is told, taking the lock again aborts the process
            post = [traceback.clear_frames(error.__traceback__) for error in errors]
            done.set_result(errors)
            done = errors = None
            _idle.append(self)


def _carry_out(post):
    """Waits for the Works that ``post`` returns; what was raised, [] where all went well."""
    try:
        for work in post():
            work.wait()
    except BaseException as error:
        return [error]
    return []


@atexit.register
def _let_go():
    """A thread that comes back from gloo when the interpreter has gone would abort the process."""
    if _waited:
        cut_connections()
        concurrent.futures.wait(_waited.copy(), _LINGER_S)


def _tell(groups, error):
    """Leaves a note for each group."""
    failed = [enter(group, "failed") for group in groups]
    for exchange in failed:
        _leave(exchange, dist.get_rank(), _words(error))
    _linger(failed)


def _leave(exchange, rank=None, message=None):
    """The note at an exchange: this one, unless there is one."""
    note = shared_store().compare_set(exchange.key, "", json.dumps({"rank": rank, "message": message}))
    shared_store().add(f"{exchange.key}/seen", 1)
    return RankFailure(**json.loads(note))


def _linger(failed):
    """Stays until all ranks have read the notes at these exchanges, or left one too: this rank may host the store."""
    deadline = time.monotonic() + _LINGER_S
    while time.monotonic() < deadline:
        failed = [e for e in failed if shared_store().add(f"{e.key}/seen", 0) < e.group.size()]
        if not failed:
            return
        time.sleep(0.02)


def _failure(exchange, last=False):
    """Who failed, as far as the store knows; ``last``: nobody will say more."""
    if shared_store().check([exchange.key]):
        return _leave(exchange)
    _say(exchange.group, exchange.number, exchange.path)
    does = _first_difference(exchange)
    heard = len(does) == exchange.group.size() or time.monotonic() - exchange.since > _LINGER_S or last
    return _leave(exchange, *_disagreement(does)) if does and heard else None


def _first_difference(exchange):
    """{global rank: words} where the ways of ranks to the exchange part; of those that are there. Empty if none do."""
    store, paths = shared_store(), {}
    for rank in watch(exchange.group).ranks:
        key = _key(exchange.group, f"rank {rank}")
        number, path = json.loads(store.get(key)) if store.check([key]) else (None, [])
        paths[rank] = dict(path) if number == exchange.number else {}  # slower, or done here
    for index in exchange.path:
        does = {rank: path[index] for rank, path in paths.items() if index in path}
        if len(set(does.values())) > 1:
            return does
    return {}


def _disagreement(does):
    """(rank, message): the first that does not do what most do. Of two nobody can tell; the second is named."""
    most, _ = collections.Counter(does.values()).most_common(1)[0]
    odd = min(rank for rank, words in does.items() if words != most)
    others = " and ".join(str(rank) for rank, words in does.items() if words == most)
    return odd, f"ValueError: ranks disagree: rank {odd} has {does[odd]}, rank {others} {most}"


def _say(group, number, path):
    shared_store().set(_key(group, f"rank {dist.get_rank()}"), json.dumps([number, list(path.items())[-_SAID:]]))


def _longer(path, words):
    """A path, and words behind it."""
    last = max(path, default=-1)
    return {i: path[i] for i in path if i > last - _KEPT} | {last + 1: words}


def _key(group, what):
    return f"{watch(group).prefix}/{what}"


def shared_store():
    """The one that all ranks share."""
    return dist.distributed_c10d._get_default_store()
