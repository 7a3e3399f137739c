"""A rank's main for test_disagreements.py: of each pair of ranks the second passes other rows than the first.

Rank 0 hosts the store, so it stays until the others need it no more.
"""

import sys

import torch
import torch.distributed as dist

from automodel_c.parallel import ContextParallel, RankFailure

dist.init_process_group("gloo")
rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
cp = ContextParallel(pairs[rank // 2])
plan = cp.plan(tokens=8)
assert torch.equal(cp.gather(cp.shard(torch.arange(8), plan), plan), torch.arange(8))
try:
    cp.gather(torch.ones(plan.local, 1 + rank % 2, requires_grad=True), plan)
except RankFailure as error:
    if rank >= 2:
        store.set(f"ended {rank}", "")
        raise
    print(f"caught {error}", file=sys.stderr)
    if rank == 0:
        store.wait(["ended 2", "ended 3"])
    else:
        dist.destroy_process_group()
