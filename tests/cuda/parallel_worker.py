"""What a rank does in the tests of several ranks on GPUs."""

import functools
import itertools
import os
import signal
import time

import torch
import torch.distributed as dist

from automodel_c import _amcore
from automodel_c.models import qwen3_5
from automodel_c.parallel import ContextParallel, RankFailure, carry, exchange, faults, nccl, shard_vision, wire
from automodel_c.parallel import attention as cp_attention
from automodel_c.parallel.exchange import Route
from tests.models import packs
from tests.parallel import test_disagreements
from tests.parallel.test_frame_shard import GRID, ON, Tower, levels, pixels
from tests.patch import models
from tests.ranks import here

# head dims of the Hopper kernels, in a model that is small otherwise
REAL = {
    "hidden_size": 256, "head_dim": 256, "num_attention_heads": 4, "num_key_value_heads": 1,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
}  # fmt: skip
LENGTHS = [700, 60, 1500, 3, 290]


def moved(dtype, seed):
    """Rows along random moves there, and their gradients back: with this rank's x, its upstream gradient and Route."""
    group, generator = dist.group.WORLD, torch.Generator().manual_seed(seed)
    ranks, rank, rows = group.size(), group.rank(), 300
    order = torch.randperm(ranks * rows, generator=generator)  # of the rows put; every third is put nowhere
    ends = torch.arange(len(order)).remainder(3) > 0
    src, dst = (torch.randint(0, ranks, (len(order),), generator=generator) for _ in range(2))
    start = torch.randint(0, rows, (len(order),), generator=generator)
    moves = torch.stack([src, order // rows, start, order % rows, torch.ones_like(dst)], 1)[ends].numpy()
    x, dout = (torch.randn(ranks, rows, 2, 24, generator=generator).to(dtype)[rank] for _ in range(2))
    return x, dout, Route.of(moves, rank, ranks, rows, rows), group


def rows_and_gradients(dtypes, seed):
    """Whether a GPU's rows and sums have the CPU's bits, dtype by dtype; and that the wire counts the same."""
    same = []
    for dtype in dtypes:
        x, dout, route, group = moved(dtype, seed)
        found = []
        for device in (torch.device("cpu"), here()):
            leaf, before = x.clone().to(device).requires_grad_(), (wire.sent, wire.received)
            out = exchange.exchange(leaf, route, group)
            out.backward(dout.to(device))
            traffic = wire.sent - before[0], wire.received - before[1]
            found.append([out.detach().cpu(), leaf.grad.cpu(), torch.tensor(traffic)])
        same.append(all(torch.equal(a, b) for a, b in zip(*found, strict=True)))
    return same


def any_dtype(dtypes):
    group, same = dist.group.WORLD, []
    plan = ContextParallel(group).plan(tokens=4 * group.size())
    for dtype in dtypes:
        whole = torch.arange(4 * group.size() * 3).view(-1, 3).to(dtype)
        local = whole[4 * group.rank() :][:4].to(here())
        same.append(torch.equal(exchange.exchange(local, plan.gather_route, group).cpu(), whole))
    return same


def host_goes_on():
    """Whether an attention's forward and backward never wait for the device, once its tables are there."""
    cp, dtype = ContextParallel(dist.group.WORLD), torch.bfloat16
    plan = cp.plan(cu_seqlens=[0, 1000, 1200], scheme="balanced")
    leaves = [torch.randn(plan.local, n, 128, device=here(), dtype=dtype, requires_grad=True) for n in (4, 2, 2)]
    cp_attention(*leaves, plan).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = cp_attention(*leaves, plan)
        out.backward(torch.ones_like(out))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return True


@functools.cache
def real_model(dtype, over):
    """A model of real head dims, over the ranks' packs ("cp") or on this rank alone (None)."""
    mapping = models.config("qwen3_5_moe", **{"num_experts": 8} | REAL).to_dict()
    mapping["vision_config"]["out_hidden_size"] = REAL["hidden_size"]
    torch.manual_seed(5)
    options = {"cp": ContextParallel(dist.group.WORLD)} if over == "cp" else {}
    model = packs.well_conditioned(qwen3_5.load(mapping, dtype=torch.float32, **options))
    return model.to(here(), dtype)


def real_batch():
    generator = torch.Generator().manual_seed(11)
    ids = torch.randint(0, 80, (sum(LENGTHS),), generator=generator)
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0)
    return {"input_ids": ids, "labels": ids.roll(-1), "cu_seqlens": offsets}


def real(dtype, over):
    """{"loss": .., parameter: gradient}: this rank's parts (cp), or one rank's."""
    return packs.ours(real_model(dtype, over), real_batch())


def tower():
    """Tokens of shard_vision and the tower's gradients, beside those of one rank: largest differences."""
    found = []
    for group in (None, dist.group.WORLD):
        made = Tower("object").to(here())
        tokens = levels(shard_vision(made, pixels().to(here()), torch.tensor(GRID), group, ON))
        sum(t.square().sum() for t in tokens).div(1 if group is None else group.size()).backward()
        grads = [p.grad for p in made.parameters()]
        for g in grads if group is not None else ():
            dist.all_reduce(g)
        found.append([t.detach() for t in tokens] + grads)
    return [float((a - b).abs().max() / b.abs().max()) for a, b in zip(*found[::-1], strict=True)]


def outcomes(names, culprit):
    """As of tests.parallel.test_disagreements, what this rank raised, and that the device is not held up."""
    return test_disagreements.outcomes(names, culprit, after=torch.cuda.synchronize)


def sums(dtypes, sizes):
    """Whether this rank's sums through windows have the bits of comm_reduce_parts on the CPU, piece by piece or not."""
    group, same = dist.group.WORLD, []
    channel = carry.channel_of(group, here(), "sums")
    assert channel.has_windows
    for dtype, out_dtype, n in itertools.product(dtypes, dtypes, sizes):
        sent = [torch.randn(2, n, generator=torch.Generator().manual_seed(n + r)).to(dtype) for r in range(2)]
        out = torch.empty(n, dtype=out_dtype, device=here())
        channel.sum(out, sent[group.rank()].to(here()), 0.3)
        channel.join(out)
        expected = torch.empty(n, dtype=out_dtype)
        _amcore.comm_reduce_parts(expected, torch.stack([s[group.rank()] for s in sent]), scale=0.3)
        same.append(torch.equal(out.cpu(), expected))
    return same


def use_windows(whether):
    os.environ["AM_WINDOWS"] = whether


def has_windows():
    return nccl.communicator(dist.group.WORLD).has_windows


def long_messages(sizes):
    """Whether messages of several pieces arrive whole, both ways at once, one way alone, one after another."""
    group, rank = dist.group.WORLD, dist.get_rank()
    channel = carry.channel_of(group, here(), "messages")
    for n, ways in itertools.product(sizes, ((1, 1), (1, 0), (0, 1))):
        to, of = n * ways[rank], n * ways[1 - rank]
        sent = torch.randint(0, 255, (to,), dtype=torch.uint8, device=here(), generator=None)
        sent[: min(to, 8)] = rank
        arriving = torch.full((of,), 77, dtype=torch.uint8, device=here())
        peer = lambda bytes: [bytes * (r != rank) for r in range(2)]  # noqa: E731
        channel.exchange(arriving, sent, peer(to), peer(of))
        channel.join(arriving)
        sums = torch.zeros(2, dtype=torch.int64, device=here())
        sums[rank] = (sent.long() * (torch.arange(to, device=here()) % 8191 + 1)).sum()
        dist.all_reduce(sums)
        own = (arriving.long() * (torch.arange(of, device=here()) % 8191 + 1)).sum()
        assert int(own) == int(sums[1 - rank]), (n, ways)
    return True


def stress(seconds):
    """Exchanges, FSDP-like collectives of torch's and matrix products interleaved on streams; how many rounds."""
    cp, rounds = ContextParallel(dist.group.WORLD), 0
    plan = cp.plan(cu_seqlens=[0, 3000, 4096], scheme="balanced")
    q, k, v = (torch.randn(plan.local, n, 128, device=here(), dtype=torch.bfloat16) for n in (8, 2, 2))
    other, side = dist.new_group(list(range(cp.ranks))), torch.cuda.Stream()
    weights = torch.ones(1 << 22, device=here())
    expected = cp.gather(cp_attention(q, k, v, plan), plan)
    stop, began = False, time.monotonic()
    while not stop:
        with torch.cuda.stream(side):
            gathered = torch.empty(cp.ranks << 22, device=here())
            works = [dist.all_gather_into_tensor(gathered, weights, group=other, async_op=True)]
            reduced = torch.empty(1 << 22, device=here())
            works.append(dist.reduce_scatter_tensor(reduced, gathered, group=other, async_op=True))
        outs = [cp.gather(cp_attention(q, k, v, plan), plan) for _ in range(4)]
        for work in works:
            work.wait()
        if rounds % 16 == 0:
            assert all(torch.equal(out, expected) for out in outs) and bool((reduced == cp.ranks).all())
            late = torch.tensor(time.monotonic() - began > seconds, device=here()).int()
            dist.broadcast(late, 0)
            stop = bool(late)
        rounds += 1
    torch.cuda.synchronize()
    return rounds


def dies(how):
    """Under a guard, rank 1 ends in the middle of rank 0's exchange; what rank 0 raised, and after how long."""
    group, rank = dist.group.WORLD, dist.get_rank()
    plan = ContextParallel(group).plan(tokens=1 << 14)
    x = torch.ones(plan.local, 1024, device=here())
    exchange.exchange(x, plan.gather_route, group)
    torch.cuda.synchronize()
    began = time.monotonic()
    try:
        with faults.guard():
            if rank == 1 and how == "raises":
                raise ValueError("no more data")
            if rank == 1:  # it has met its peer, and then its device never comes
                torch.cuda._sleep(100_000_000_000)  # some 50 s
                exchange.exchange(x, plan.gather_route, group)
                os.kill(os.getpid(), signal.SIGKILL)
            exchange.exchange(x, plan.gather_route, group)
            torch.cuda.synchronize()
            while True:  # the device came back without rows: the guard is about to raise
                time.sleep(0.1)
    except (RankFailure, ValueError) as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - began


def communicators():
    """Opened once for a group, closed with it, and gone after an abort."""
    group, rank = dist.new_group([0, 1]), dist.get_rank()
    plan = ContextParallel(group).plan(tokens=8)
    x = torch.full((plan.local, 2), float(rank), device=here())
    first = exchange.exchange(x, plan.gather_route, group)
    opened = nccl.communicator(group)
    assert opened is not None and torch.equal(first, exchange.exchange(x, plan.gather_route, group))
    assert nccl.communicator(group) is opened and opened.is_ready()
    torch.cuda.synchronize()
    assert not opened.is_stalled(0.0)
    dist.barrier()
    nccl.abort(group)
    assert nccl.communicator(group) is None
    try:
        opened.is_ready()
    except ValueError as error:
        return str(error)
