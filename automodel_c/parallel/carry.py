"""How packed rows get from one rank to the others: by gloo, by NCCL, or by gloo through the host's memory.

Rows on the CPU go by gloo, one tagged message from every rank to every other. Rows on a GPU go by NCCL where the group
has it, which knows no tags: there the tagged messages go ahead of the rows, empty, over gloo, and the host waits until
all ranks are in the same exchange, but never for the device. Where the group has no NCCL the rows themselves go by
gloo, copied to the host and back, for which the host does wait. The communicator of a group whose ranks are all on one
machine, and reach each other's memory, has windows (`nccl.Communicator.window`), and its rows go through those.
"""

import functools
import os
import socket

import torch
from torch.distributed.distributed_c10d import _resolve_process_group

from automodel_c import _amcore

from . import alarms, nccl


def carry(packed, arriving, rows_to, rows_from, group_name, words, at_once=False):
    """Begins to send `packed`, so many rows to each rank, and to receive `arriving`; a function that ends it, after
    which they are there (for the current stream). words: what all ranks must agree on. at_once: it is ended next."""
    group = _resolve_process_group(group_name)
    row = packed.dtype.itemsize * packed.shape[1:].numel()
    sizes = [[n * row for n in rows] for rows in (rows_to, rows_from)]
    words = f"{words}, rows {list(packed.shape[1:])} of {packed.dtype}"
    if not packed.is_cuda:
        return _by_gloo(packed, arriving, *sizes, group, words)
    if has_nccl(group):
        return _by_nccl(packed, arriving, *sizes, group, f"{words} on GPUs", at_once)
    return _through_host(packed, arriving, *sizes, group, f"{words} on GPUs, by way of the host")


def _by_gloo(packed, arriving, send_bytes, receive_bytes, group, words):
    outgoing, incoming = _bytes(packed).split(send_bytes), _bytes(arriving).split(receive_bytes)
    entered = alarms.enter(group, words)
    done = alarms.start(functools.partial(_post, group, incoming, outgoing, entered.tag))
    return functools.partial(alarms.wait, done, entered)


def _by_nccl(packed, arriving, send_bytes, receive_bytes, group, words, at_once=False):
    entered = alarms.enter(group, words)
    alarms.meet(entered)
    channel = nccl.communicator(group) or _open(group, entered, packed.device)
    joined = at_once and max(send_bytes) <= nccl.SHORT and max(receive_bytes) <= nccl.SHORT
    channel.exchange(_bytes(arriving), _bytes(packed), send_bytes, receive_bytes, joined)
    return _is_there if joined else functools.partial(channel.join, arriving)


def _is_there():
    pass


def _through_host(packed, arriving, send_bytes, receive_bytes, group, words):
    landing = torch.empty(arriving.shape, dtype=arriving.dtype)
    end = _by_gloo(packed.cpu(), landing, send_bytes, receive_bytes, group, words)

    def land():
        end()
        arriving.copy_(landing)

    return land


def has_nccl(group):
    """Whether it carries what is on GPUs by NCCL."""
    try:
        return group._get_backend(torch.device("cuda")).name() == "nccl"
    except RuntimeError:
        return False


def _open(group, entered, device):
    """A communicator of the group, whose ranks are all here, when it is open."""
    key = f"{entered.key}/nccl"
    try:
        if group.rank() == 0:
            alarms.shared_store().set(key, _amcore.comm_id())
        alarms.until(lambda: alarms.shared_store().check([key]), entered)
        channel = nccl.Communicator(group, alarms.shared_store().get(key).decode(), device)
        alarms.until(channel.is_ready, entered)
        if 1 < group.size() <= nccl.MOST_RANKS and os.environ.get("AM_WINDOWS") != "0":
            _open_windows(channel, group, entered)
        return channel
    except Exception as error:
        nccl.abort(group)
        alarms.fail(entered, error)
        raise


def _open_windows(channel, group, entered):
    """Windows of all ranks for each of them, or none: where one cannot, all go on without."""
    handle, machine = "", ""
    try:
        handle, machine = channel.window(), f"{socket.gethostname()} {_boot()}"
    except (RuntimeError, NotImplementedError):  # no memory that is shared, or no IPC
        pass
    notes = _told(group, entered, "window", f"{handle}\n{machine}")
    handles, machines = zip(*(note.split("\n") for note in notes), strict=True)
    usable = all(handles) and len(set(machines)) == 1
    try:
        if usable:
            channel.attach(handles)
    except (RuntimeError, NotImplementedError):  # no way from GPU to GPU
        usable = False
    channel.has_windows = all(note == "True" for note in _told(group, entered, "attached", str(usable)))
    if handle and not channel.has_windows:
        channel.attach([])


def _told(group, entered, what, note):
    """What every rank says, in the order of ranks."""
    keys = [f"{entered.key}/{what}/{rank}" for rank in range(group.size())]
    store = alarms.shared_store()
    store.set(keys[group.rank()], note)
    alarms.until(lambda: store.check(keys), entered)
    return [store.get(key).decode() for key in keys]


def _boot():
    """Which start of which machine this is: names of machines repeat."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def channel_of(group, device, words):
    """The communicator of a group that has NCCL, opened by its first call, for which all ranks come together."""
    found = nccl.communicator(group)
    if found is None:
        entered = alarms.enter(group, words)
        alarms.meet(entered)
        found = _open(group, entered, device)
    return found


def _post(group, incoming, outgoing, tag):
    """Receives and sends the buffers of all peers, nearest ranks first."""
    rank, ranks, group = group.rank(), group.size(), alarms.host_group(group)
    before, after = ([(rank + step * n) % ranks for n in range(1, ranks)] for step in (-1, 1))
    works = [group.recv([incoming[peer]], peer, tag) for peer in before]
    return [group.send([outgoing[peer]], peer, tag) for peer in after] + works


def _bytes(x):
    return x.flatten().view(torch.uint8)
