"""A rank's main for test_faults.py: rank 1 fails while rank 0 waits for it; argument: where rank 0 waits."""

import os
import signal
import sys

import torch
import torch.distributed as dist

from automodel_c.parallel import faults


def work(where):
    if where == "start":
        if os.environ["RANK"] == "1":
            raise ValueError("bad argument")
        dist.init_process_group("gloo")
    dist.init_process_group("gloo")
    with faults.guard():
        if dist.get_rank() == 1:
            raise ValueError("bad argument")
        dist.all_reduce(torch.ones(3))


signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends the others at once; this one has something to say
try:
    with faults.guard():
        work(sys.argv[1])
except faults.RankFailure as error:
    print(f"saw RankFailure: {error}", file=sys.stderr, flush=True)
    raise
