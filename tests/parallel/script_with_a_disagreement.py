"""A rank's main for test_disagreements.py: of each pair of ranks the second passes other rows than the first."""

import sys

import torch
import torch.distributed as dist

from automodel_c.parallel import ContextParallel, RankFailure

dist.init_process_group("gloo")
rank = dist.get_rank()
pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
cp = ContextParallel(pairs[rank // 2])
plan = cp.plan(tokens=8)
assert torch.equal(cp.gather(cp.shard(torch.arange(8), plan), plan), torch.arange(8))
try:
    cp.gather(torch.ones(plan.local, 1 + rank % 2, requires_grad=True), plan)
except RankFailure as error:
    if rank >= 2:
        raise
    print(f"caught {error}", file=sys.stderr)
    if rank == 1:
        dist.destroy_process_group()
