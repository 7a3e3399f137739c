"""Exchanges as a GPU makes them, on the CPU: rows are looked up in tables, and peers meet before the bytes travel.

A fake channel carries the bytes by gloo, so that every step but NCCL's own and the kernels is the one of a GPU.
"""

import contextlib
import os
import signal
import threading
import time
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from automodel_c.parallel import RankFailure, alarms, carry, exchange, faults, mailbox, nccl
from tests.parallel import context_worker, gdn_worker, test_context_conv, test_experts
from tests.parallel.test_context_gdn import check_bytes
from tests.ranks import RanksFailed


class Channel:
    """In place of `nccl.Communicator`."""

    def __init__(self, group):
        self.group, self.works = group, []

    def exchange(self, arriving, sent, send_bytes, receive_bytes, joined=False):
        incoming, outgoing = arriving.split(receive_bytes), sent.split(send_bytes)
        self.works = carry._post(self.group, incoming, outgoing, 7)
        if joined:
            self.join(arriving)

    def join(self, arriving):
        for work in self.works:
            work.wait()


def by_tables(x, sends, receipts, own, own_after, runs, **sizes):
    return exchange._Tables(sends, receipts, own, own_after, runs, device=x.device, **sizes)


def over_a_channel(packed, arriving, rows_to, rows_from, group_name, words, at_once=False):
    group = carry._resolve_process_group(group_name)
    row = packed.dtype.itemsize * packed.shape[1:].numel()
    sizes = [[n * row for n in rows] for rows in (rows_to, rows_from)]
    with mock.patch.object(carry.nccl, "communicator", Channel):
        words = f"{words}, rows {list(packed.shape[1:])} of {packed.dtype}"
        return carry._by_nccl(packed, arriving, *sizes, group, words, at_once)


@contextlib.contextmanager
def as_on_a_gpu():
    with (
        mock.patch.object(exchange, "_mover", by_tables),
        mock.patch.object(exchange, "carry", over_a_channel),
    ):
        yield


def both(module, name, *args, **options):
    """What a worker finds as on the CPU and as on a GPU."""
    worker = getattr({"attention": context_worker, "gdn": gdn_worker, "conv": test_context_conv}[module], name)
    plain = worker(*args, **options)
    with as_on_a_gpu():
        return plain, worker(*args, **options)


CALLS = {
    **{
        f"attention, {scheme}, {layout}": ("attention", {"scheme": scheme, "layout": layout})
        for scheme in ("home", "balanced", "heads")
        for layout in ("contiguous", "round_robin")
    },
    "attention, bf16": ("attention", {"dtype": torch.bfloat16, "scheme": "heads"}),
    "gdn": ("gdn", {}),
    "gdn, bf16": ("gdn", {"dtype": torch.bfloat16}),
    "conv": ("conv", {}),
    "conv, round robin": ("conv", {"layout": "round_robin"}),
}


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", CALLS)
def test_bits_and_bytes_are_those_of_the_cpu(rank_pools, world, name):
    module, options = CALLS[name]
    packs = context_worker.PACKS if module == "attention" else gdn_worker.PACKS
    for pack in ("straddling", "one", "gaps", "inside", "empty"):
        for plain, found in rank_pools(world).run(both, module, "run", packs[pack], **options):
            assert all(torch.equal(a, b) for a, b in zip(plain[0], found[0], strict=True))
            assert plain[1:4] == found[1:4]
    if module != "attention":
        check_bytes([found for _, found in rank_pools(world).run(both, module, "run", packs["one"], **options)])


def experts(*args):
    plain = test_experts.over_ranks(*args)
    with as_on_a_gpu():
        return plain, test_experts.over_ranks(*args)


@pytest.mark.parametrize("world", [2, 3])
def test_experts_are_those_of_the_cpu(rank_pools, seed, world):
    for plain, found in rank_pools(world).run(experts, 90, torch.bfloat16, seed, False):
        for a, b in zip(plain[0] + plain[1], found[0] + found[1], strict=True):
            assert torch.equal(a, b)
        assert plain[2:] == found[2:]


def differ(how):
    """What this rank raises where rank 1 passes other rows, or raises before they travel."""
    group, rank = dist.new_group([0, 1]), dist.get_rank()
    plan = context_worker.ContextParallel(group).plan(tokens=8)
    x = torch.ones(plan.local, 2, dtype=torch.float64 if rank and how == "dtype" else torch.float32)
    x = x[:1] if rank and how == "rows" else x
    try:
        with as_on_a_gpu():
            exchange.exchange(x, plan.gather_route, group)
    except Exception as error:
        return type(error), str(error), getattr(error, "rank", None)


@pytest.mark.parametrize(
    ("how", "words"), [("dtype", "rank 1 has gathered rows"), ("rows", "ValueError: exchange: x has 1 rows")]
)
def test_ranks_that_differ_raise_before_a_byte_travels(rank_pools, how, words):
    peer, odd = rank_pools(2).run(differ, how)
    rank_pools(2).close()
    assert peer[0] is RankFailure and peer[2] == 1 and words in peer[1]
    assert odd[0] is (RankFailure if how == "dtype" else ValueError)


class WithoutGloo:
    """A group whose backend carries what is on GPUs alone."""

    def __init__(self, group):
        self.group, self.group_name = group, group.group_name

    def rank(self):
        return self.group.rank()

    def size(self):
        return self.group.size()

    def _get_backend(self, device):
        raise RuntimeError("no backend for it")


def meets_in_a_group_of_its_own():
    group = WithoutGloo(dist.group.WORLD)
    with mock.patch.object(dist, "get_process_group_ranks", lambda _: [0, 1, 2]):
        for n in range(3):
            alarms.meet(alarms.enter(group, f"rows {n}"))
        host = alarms.host_group(group)
    return type(host), host is alarms.host_group(group), carry.has_nccl(group)


def test_a_group_without_gloo_meets_over_one_of_its_own(rank_pools):
    assert rank_pools(3).run(meets_in_a_group_of_its_own) == [(dist.ProcessGroupGloo, True, False)] * 3


def meetings(n):
    """Seconds of the fastest meeting; whether it is in memory that the ranks share, and whether a file is left."""
    group, took = dist.new_group([0, 1, 2]), []
    for i in range(n):
        began = time.perf_counter()
        alarms.meet(alarms.enter(group, f"rows {i % 7}"))
        took.append(time.perf_counter() - began)
    line = alarms.watch(group)
    return min(took), bool(line.box), os.path.exists(line.file)


def test_ranks_of_one_machine_meet_in_memory(rank_pools):
    for took, shared, left in rank_pools(3).run(meetings, 1000):
        assert shared and not left and took < 1e-2


def gone(how):
    """What the others raise where rank 1 ends, or raises, instead of coming to a meeting in memory."""
    group, rank = dist.new_group([0, 1, 2]), dist.get_rank()
    for i in range(3):
        alarms.meet(alarms.enter(group, f"rows {i}"))
    try:
        with alarms.everywhere(group):
            if rank == 1 and how == "raises":
                raise ValueError("no more data")
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            alarms.meet(alarms.enter(group, "other rows" if rank == 1 else "rows"))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_a_rank_that_does_not_come_to_a_meeting_in_memory(rank_pools):
    pool = rank_pools(3)
    peer, own, other = pool.run(gone, "raises")
    pool.close()
    assert own == "ValueError: no more data" and peer == other == "RankFailure: rank 1 failed: ValueError: no more data"
    with pytest.raises(RanksFailed) as failed:
        pool.run(gone, "killed", grace=20)
    assert set(failed.value.results.values()) == {"RankFailure: rank 1 failed: stopped without a message (killed?)"}


def without_a_mailbox():
    """A machine that cannot make the file, or whose other ranks do not see it, meets over gloo."""
    group = dist.new_group([0, 1])
    with mock.patch.object(alarms.mailbox, "create", lambda ranks: "" if ranks == 2 else None):
        for i in range(5):
            alarms.meet(alarms.enter(group, f"rows {i}"))
    blind = mailbox.Mailbox(dist.get_rank(), 2, "/nowhere")
    blind.say()
    return alarms.watch(group).box, blind.is_shared()


def test_ranks_without_common_memory_meet_over_gloo(rank_pools):
    assert rank_pools(2).run(without_a_mailbox) == [(False, False)] * 2


def one_is_blind():
    """Rank 1 cannot see the others' processes, though they see its: nobody takes the memory for shared."""
    group = dist.new_group([0, 1, 2])
    hidden = mock.patch.object(mailbox.Mailbox, "_is_gone", lambda *_: dist.get_rank() == 1)
    with hidden:
        for i in range(5):
            alarms.meet(alarms.enter(group, f"rows {i}"))
    return alarms.watch(group).box


def test_ranks_agree_whether_memory_is_shared(rank_pools):
    assert rank_pools(3).run(one_is_blind) == [False] * 3


def tables_that_are_kept():
    """How many Routes' tables are kept before and after they go."""
    plan = context_worker.ContextParallel(dist.group.WORLD).plan(tokens=8)
    with as_on_a_gpu():
        for _ in range(2):
            exchange.exchange(torch.ones(plan.local, 2), plan.gather_route, dist.group.WORLD)
        during = len(exchange._placed)
    del plan
    return during, len(exchange._placed)


def test_tables_go_with_their_route(rank_pools):
    pool = rank_pools(2)
    pool.close()
    assert pool.run(tables_that_are_kept) == [(1, 0)] * 2


def away_in_a_thread():
    """What rank 0 raises at a meeting in a thread, as backward on a GPU does, while its main thread hears no signal and
    rank 1 has failed elsewhere and lives on."""
    group, rank, store = dist.group.WORLD, dist.get_rank(), alarms.shared_store()
    raised = []
    for i in range(3):
        alarms.meet(alarms.enter(group, f"rows {i}"))

    def backward():
        try:
            alarms.meet(alarms.enter(group, "rows"))
        except RankFailure as failure:
            raised.append(str(failure))

    old = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGURG})
    try:
        with faults.guard():
            if rank == 1:
                raise ValueError("no more data")
            thread = threading.Thread(target=backward, daemon=True)
            thread.start()
            thread.join(12)
            raise RuntimeError("backward has ended")
    except (RankFailure, ValueError) as error:
        raised.append(str(error))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)
    if rank == 1:
        store.wait(["away over"])
    else:
        store.set("away over", "")
    return raised


def test_a_meeting_in_a_thread_ends_where_a_rank_failed_elsewhere(rank_pools):
    pool = rank_pools(2)
    other, own = pool.run(away_in_a_thread)
    pool.close()
    assert own == ["no more data"] and other == ["rank 1 failed: ValueError: no more data"] * 2
    assert faults.known_failure() is None


class Extension:
    """In place of `_amcore`: communicators that never open, and what is closed."""

    def __init__(self):
        self.closed = []

    def comm_id(self):
        return "00" * 128

    def comm_open(self, id, *, rank, ranks, device):
        return 7

    def comm_state(self, comm):
        raise RuntimeError("comm_state: ncclCommInitRank: no such device")

    def comm_close(self, comm, *, abort):
        self.closed.append((comm, abort))

    def comm_exchange(self, arriving, sent, *, comm, send_bytes, receive_bytes, joined):
        pass

    def comm_join(self, arriving, *, comm):
        pass


def opens_in_vain():
    """What is raised where a communicator does not open, what is closed then, and whether the group has one."""
    group, extension = dist.new_group([0]), Extension()
    with mock.patch.object(nccl, "_amcore", extension), mock.patch.object(carry, "_amcore", extension):
        entered = alarms.enter(group, "rows")
        try:
            carry._open(group, entered, torch.device("cuda", 0))
        except RuntimeError as error:
            return str(error), extension.closed[:1], nccl.communicator(group)


def test_a_communicator_that_does_not_open_is_closed(rank_pools):
    (found,) = rank_pools(1).run(opens_in_vain)
    assert found == ("comm_state: ncclCommInitRank: no such device", [(7, True)], None)


def test_what_an_exchange_reads_and_writes_is_kept_until_it_is_joined():
    """Where nobody joins it, its memory may not be another tensor's while NCCL writes to it."""
    group = mock.Mock(rank=lambda: 0, size=lambda: 2)
    with mock.patch.object(nccl, "_amcore", Extension()):
        channel = nccl.Communicator(group, "00" * 128, torch.device("cuda", 0))
        buffers = torch.zeros(8), torch.ones(8)
        kept = [weakref.ref(b) for b in buffers]
        channel.exchange(*buffers, [0, 32], [0, 32])
        other = torch.zeros(8), torch.ones(8)
        channel.exchange(*other, [0, 32], [0, 32])
        place = buffers[0].data_ptr()
        arriving, buffers = mock.Mock(data_ptr=lambda: place), None  # a view would keep it
        channel.join(other[0])
        assert all(ref() is not None for ref in kept)
        channel.join(arriving)
        assert all(ref() is None for ref in kept)
        nccl.abort(group)
