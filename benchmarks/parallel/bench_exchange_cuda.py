"""Rows between two GPUs beside torch's indexing and its all-to-all: python -m benchmarks.parallel.bench_exchange_cuda

Predicted before the first run (two H200s, NVLink, NCCL 2.28): a group of one send and one receive, launched from C
beside two events, takes 8 to 12 us of host time, where torch's call takes 40 to 50; the meeting ahead of it, a round of
empty gloo messages through a second thread, 100 to 200 us, so that the whole `exchange` takes 200 to 300 us of the
host, which hides only where the host is that far ahead. On the device 1 MiB of planned rows takes 30 to 35 us: packing
3, NCCL's kernel 17 to 20, unpacking 3, three hops between streams; the bar of 25 is missed. 64 MiB: NCCL at 280 GB/s,
240 us, and 31 us each to pack and to unpack (128 MiB of traffic at 4.3 TB/s): 220 GB/s delivered; 256 MiB 255 GB/s.
Torch's indexing does the same work in more launches: 0.9 of our rate. ReduceParts (its all-to-all, and one sum that
reads two parts and writes one, 47 us for 64 MiB) at 64 MiB: 200 GB/s, against 137 to 167 us of NCCL's own.

Found first (NCCL 2.28.9): comm_exchange 33 us, torch's call 89 on the same host; a meeting over gloo 386 us, in shared
memory 81 to 113, and the whole exchange 746 and 450 to 470. On the device 60, 122, 377 and 1,315 us for 1, 16, 64 and
256 MiB (178 and 204 GB/s for the last two), torch 69, 158, 415 and 1,468; NCCL alone 54, 104, 269 and 916, its rate
below what was predicted (250 and 293 GB/s); packing, unpacking and the copy of as many rows that stay take 108 us at 64
MiB. ReduceParts by torch's all-to-all 106, 205 and 619 us for 16, 64 and 256 MiB, NCCL's own reduce-scatter 99, 172 and
583. Since then rows go through windows (csrc/cuda/comm/window.h): 36, 108, 333 and 1,214 us, and 28, 77, 239 and 866
without packing; ReduceParts 70, 172 and 595, NCCL's 56, 161 and 559. What else was tried is told in window.cu.

Predicted for short messages on the caller's stream, by two kernels and one wait: 12 us of host time a call, of which 3
are Python's; 1 MiB in 20 us, 27 with packing. For sums that read the other rank's memory: 64 MiB, of which half is read
over NVLink at 370 GB/s after a copy of a first piece of 4 MiB, 91 us and 20 of hops and tails: 300 GB/s; 256 MiB 350.

Found, on a host busy with other work (torch's call 101 us, a meeting 99; exchange_cuda_busy.json):
joined at once 21 us, later 47. 1 MiB 49 us beside torch's 62, and 73 beside 72 with packing; 64 MiB 329 beside 300, 428
beside 445. Sums 118, 199 and 581 us, NCCL's 106, 182 and 583: other GPUs' memory is read at 280 GB/s, whatever the
number of blocks from 64 on (results/h200x2/exchange_variants.json).
"""

import numpy as np
import torch
import torch.distributed as dist

from automodel_c import _amcore
from automodel_c.parallel import alarms, nccl
from automodel_c.parallel.exchange import Route, exchange, exchange_back
from automodel_c.parallel.fsdp_hooks import ReduceParts
from benchmarks.parallel.pairs import host_seconds, main, seconds

ROW, RANGE = 1024, 64  # elements of bf16 a row: keys and values of two heads of 256; rows a move
MIB = 1 << 20


def routes(nbytes):
    """(Route, x, what torch needs): each rank sends so many bytes to the other, every second range of its rows."""
    ranges, rank = max(1, nbytes // (2 * ROW * RANGE)), dist.get_rank()
    begin = np.arange(ranges) * 2 * RANGE
    sets = []
    for src in range(2):
        for dst in range(2):
            start = begin + (RANGE if src != dst else 0)
            at = np.arange(ranges) * RANGE + (src != dst) * ranges * RANGE
            sets.append(np.stack([np.full_like(at, src), np.full_like(at, dst), start, at, np.full_like(at, RANGE)], 1))
    rows = 2 * ranges * RANGE
    route = Route.of(np.concatenate(sets), rank, 2, rows, rows)
    index = torch.from_numpy((begin[:, None] + np.arange(RANGE)).flatten()).cuda()
    x = torch.randn(rows, ROW, device="cuda", dtype=torch.bfloat16)
    return route, x, index


def by_torch(x, index):
    half = len(x) // 2
    sent, arriving = x.index_select(0, index + RANGE), torch.empty(half, ROW, dtype=x.dtype, device="cuda")
    dist.all_to_all_single(arriving, sent, [half * (r != dist.get_rank()) for r in range(2)],
                           [half * (r != dist.get_rank()) for r in range(2)])  # fmt: skip
    return torch.cat([x.index_select(0, index), arriving])


def sizes():
    group = dist.group.WORLD
    for mib in (1, 16, 64, 256):
        route, x, index = routes(mib * MIB)
        out = exchange(x, route, group)
        assert torch.equal(out, by_torch(x, index)), "rows are where torch puts them"
        dout = torch.randn_like(out)
        channel, half = nccl.communicator(group), len(x) // 2
        packed, arriving = x[:half].view(torch.uint8).flatten(), torch.empty_like(x[:half]).view(torch.uint8).flatten()
        peer = [packed.numel() * (r != dist.get_rank()) for r in range(2)]

        def bare(channel=channel, packed=packed, arriving=arriving, peer=peer):
            joined = packed.numel() <= nccl.SHORT
            channel.exchange(arriving, packed, peer, peer, joined)
            if not joined:
                channel.join(arriving)

        calls = {
            "ours": lambda x=x, route=route: exchange(x, route, group),
            "back": lambda dout=dout, route=route: exchange_back(dout, route, group),
            "torch": lambda x=x, index=index: by_torch(x, index),
            "bare": bare,
            "bare_torch": lambda p=packed, a=arriving, s=peer: dist.all_to_all_single(a, p, s, s),
        }
        found = seconds(calls)
        yield {"what": "rows delivered", "MiB": mib, **{f"{name}_us": s * 1e6 for name, s in found.items()},
               "ours_GBs": mib * MIB / found["ours"] / 1e9, "bare_GBs": mib * MIB / found["bare"] / 1e9,
               "ratio": found["torch"] / found["ours"]}  # fmt: skip


def host():
    group = dist.group.WORLD
    route, x, index = routes(128 << 10)
    exchange(x, route, group)
    channel = nccl.communicator(group)
    sent = torch.zeros(1 << 16, dtype=torch.uint8, device="cuda")
    arriving = torch.empty_like(sent)
    peer = [(1 << 16) * (r != dist.get_rank()) for r in range(2)]
    numbers = np.array(peer)
    found = host_seconds({
        "comm_exchange": lambda: _amcore.comm_exchange(
            arriving, sent, comm=channel.number, send_bytes=numbers, receive_bytes=numbers
        ),
        "joined": lambda: _amcore.comm_exchange(
            arriving, sent, comm=channel.number, send_bytes=numbers, receive_bytes=numbers, joined=True
        ),
        "join": lambda: channel.join(arriving),
        "all_to_all_single": lambda: dist.all_to_all_single(arriving, sent, peer, peer),
        "meet": lambda: alarms.meet(alarms.enter(group, "rows")),
        "exchange": lambda: exchange(x, route, group),
        "by_torch": lambda: by_torch(x, index),
    })  # fmt: skip
    yield {"what": "host time of a call", **{f"{name}_us": s * 1e6 for name, s in found.items()}}


def reductions():
    for mib in (16, 64, 256):
        n = mib * MIB // 4  # of a whole gradient, of which a rank gets half
        sent, out = torch.randn(n, device="cuda"), torch.empty(n // 2, device="cuda")
        theirs = torch.empty_like(out)
        ours = ReduceParts()
        ours(out, sent, dist.group.WORLD, dist.ReduceOp.SUM)
        dist.reduce_scatter_tensor(theirs, sent)
        assert torch.equal(out, theirs), "two addends have one sum"
        found = seconds({
            "ours": lambda f=ours, o=out, s=sent: f(o, s, dist.group.WORLD, dist.ReduceOp.SUM),
            "nccl": lambda o=theirs, s=sent: dist.reduce_scatter_tensor(o, s),
        })  # fmt: skip
        yield {"what": "reduce-scatter, float32", "MiB": mib, "ours_us": found["ours"] * 1e6,
               "nccl_us": found["nccl"] * 1e6, "ours_GBs": mib * MIB / 2 / found["ours"] / 1e9,
               "ratio": found["nccl"] / found["ours"]}  # fmt: skip


def rows():
    yield from host()
    yield from sizes()
    yield from reductions()


if __name__ == "__main__":
    main("exchange_cuda", rows)
