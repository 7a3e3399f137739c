"""What a rank does in the tests of context parallelism, and the packs that they are run on."""

import functools
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from automodel_c.ops import _alloc
from automodel_c.parallel import ContextParallel, wire
from automodel_c.parallel import attention as cp_attention
from tests.guards import CheckedAllocator, Guards
from tests.ranks import here

HEADS, DIM = (4, 2), 16

# name -> documents (lengths and gaps as ids), for any number of ranks
PACKS = {
    "two-of-three": [1, 1, 1, 2, 2, 2, 0, 0],
    "inside": [1] * 8 + [2] * 8 + [3] * 8 + [4] * 8 + [5] * 8 + [6] * 8,
    "straddling": [1] * 6 + [2] * 6 + [3] * 4 + [4] * 17 + [5] * 3,
    "one": [1] * 41,
    "padding-only-ranks": [1] * 5 + [2] * 2 + [0] * 41,
    "gaps": [0] * 3 + [1] * 20 + [0] * 2 + [1] * 13 + [7] * 1 + [0] * 2,
    "uneven": [1] * 90 + [2] * 3 + [3] * 1 + [4] * 60 + [5] * 5,
    "one-token": [1],
    "only-padding": [0] * 7,
    "empty": [],
}


def inputs(tokens, dtype=torch.float32, heads=HEADS, dim=DIM, seed=0):
    """q, k, v, dout of the whole pack, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    counts = (heads[0], heads[1], heads[1], heads[0])
    return [torch.randn(tokens, n, dim, generator=generator).to(dtype) for n in counts]


@functools.cache
def groups(name):
    """The group that this rank is in: "world", or an axis of a mesh of dp 2 x cp 2 ranks."""
    if name == "world":
        return dist.group.WORLD
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))[name].get_group()


def run(*args, poison=False, **options):
    """`measured`; with ``poison`` padding holds NaN, and operators get poisoned memory between canaries."""
    if not poison:
        return measured(*args, **options)
    allocator = CheckedAllocator(Guards())
    with mock.patch.multiple(_alloc, empty=allocator.empty, workspace=allocator.workspace):
        results = measured(*args, poison=True, **options)
    allocator.guards.check()
    return results


def measured(ids, dtype=torch.float32, group="world", heads=HEADS, dim=DIM, seed=0, causal=True, poison=False, **kinds):
    """(out, dq, dk, dv) of the whole pack; bytes on the wire: forward, in all, as planned; rows that migrated."""
    cp = ContextParallel(groups(group))
    plan = cp.plan(doc_ids=ids, tokens=len(ids), **kinds)
    whole = [x.to(here()) for x in inputs(len(ids), dtype, heads, dim, seed)]
    local = [cp.shard(x, plan, fill=float("nan") if poison else 0) for x in whole]
    if poison:
        padding = cp.shard(torch.tensor([i == 0 for i in ids], dtype=torch.bool, device=here()), plan, fill=True)
        for x in local:
            x[padding] = float("nan")
    q, k, v = (x.requires_grad_() for x in local[:3])
    before = wire.sent, wire.received, wire.messages
    out = cp_attention(q, k, v, plan, causal=causal)
    forward = wire.sent - before[0], wire.received - before[1], wire.messages - before[2]
    out.backward(local[3])
    total = wire.sent - before[0], wire.received - before[1]
    said = plan.attention(*heads, dim, dtype, causal=causal).traffic()
    said = tuple(int(said[key][plan.rank]) for key in ("sent", "received", "messages"))
    if poison:
        rows = [out.detach()[padding], *(x.grad[padding] for x in (q, k, v))]
        assert all(bool((r == 0).all()) for r in rows), "padding rows of out and of the gradients are 0"
    results = [cp.gather(x, plan) for x in (out.detach(), q.grad, k.grad, v.grad)]
    return results, forward, total, said, plan.attention(*heads, dim, dtype, causal=causal).migrated


def run_all(cases, **options):
    """`run` of every (ids, causal)."""
    return [run(ids, causal=causal, **options) for ids, causal in cases]
