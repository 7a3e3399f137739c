"""What a rank does in test_interrupt: a run that a signal reaches on one rank."""

import os
from unittest import mock

import torch.distributed as dist

from automodel_c.recipes import finetune_vlm, step
from tests.recipes.context_worker import started


def run(recipe, overrides, number=None, rank=1, at=2, inside=True):
    """Trains; in step `at` the process of `rank` sends itself the signal `number`, within the step's work or after it.
    Returns (how it ended, its exit status, the name of the checkpoint that was made last)."""
    begun = finetune_vlm._row if not inside else step.accumulate_gradients
    times = 0

    def signalled(*args, **options):
        nonlocal times
        times += 1
        if number is not None and times == at and dist.get_rank() == rank:
            os.kill(os.getpid(), number)
        return begun(*args, **options)

    found = started(recipe, overrides)
    where = (step, "accumulate_gradients") if inside else (finetune_vlm, "_row")
    with mock.patch.object(*where, signalled), mock.patch.object(finetune_vlm, "draw_curves"):
        finetune_vlm.fit(found)
    left = found.interrupted
    return str(left) if left else None, left and left.status, found.checkpoints and found.checkpoints.saved
