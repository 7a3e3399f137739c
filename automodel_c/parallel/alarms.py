"""A bad argument on one rank: every rank of the group raises, and each names it. Nothing is sent while all is well.

The rank that raises before an exchange leaves a note in the store, under the number of that exchange. The others are in
the exchange by then, or will be: they wait for it in short spells, look for the note after each, and raise. `guard`
(faults.py) watches everything else that can go wrong with a rank, and is told by these exceptions too.
"""

import contextlib
import datetime
import itertools
import json
import time
import weakref

import torch
import torch.distributed as dist

from .faults import RankFailure, _lost_connection, _ports, _words
from .sockets import cut_connections

_SPELL = datetime.timedelta(seconds=0.5)
_LINGER_S = 3.0
_numbers = weakref.WeakKeyDictionary()  # process group -> how many exchanges this rank has entered, or failed to


@contextlib.contextmanager
def everywhere(group):
    """Around a rank's way to its next exchange in ``group`` (None: one rank): its exception is raised on every rank.

    Here it is raised unchanged, on the others as a `RankFailure`. Where all ranks fail alike the group stays usable;
    where one fails, its peers cut their connections, and new groups are needed to go on.
    """
    try:
        yield
    except RankFailure:
        raise
    except Exception as error:
        if group is not None and not _lost_connection(error):  # then another rank failed, and is looked for
            _tell(group, error)
        raise


def wait(work, group):
    """Waits for an exchange (the async work of a collective that every rank of ``group`` enters)."""
    key = _key(group, _next(group))
    while True:
        try:
            work.wait(_SPELL)
            return
        except RuntimeError as error:
            if failure := _failure(key):
                cut_connections(_ports(_store()))
                raise failure from error
            if work.is_completed():
                work.wait()  # raises, unless it ended just after the spell
                return


def all_to_all(x, group):
    """x [ranks]: element r goes to rank r -> what each rank sent here. An exchange, as `wait` counts them."""
    out = torch.empty_like(x)
    wait(dist.all_to_all_single(out, x.contiguous(), group=group, async_op=True), group)
    return out


def _tell(group, error):
    """Leaves the note, and stays until the others have read it, or left one too: this rank may host the store."""
    key, store = _key(group, _next(group)), _store()
    store.compare_set(key, "", json.dumps({"rank": dist.get_rank(), "message": _words(error)}))
    seen, deadline = store.add(f"{key}/seen", 1), time.monotonic() + _LINGER_S
    while seen < group.size() and time.monotonic() < deadline:
        time.sleep(0.02)
        seen = store.add(f"{key}/seen", 0)


def _failure(key):
    store = _store()
    if not store.check([key]):
        return None
    note = json.loads(store.get(key))
    store.add(f"{key}/seen", 1)
    return RankFailure(note["rank"], note["message"])


def _next(group):
    return next(_numbers.setdefault(group, itertools.count()))


def _key(group, number):
    return f"automodel_c/alarm/{group.group_name}/{number}"


def _store():
    return dist.distributed_c10d._get_default_store()
