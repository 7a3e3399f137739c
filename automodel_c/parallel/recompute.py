"""What activation checkpointing keeps, so that recomputation moves no rows and repeats no attention."""

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from automodel_c.ops import attention as _attention  # noqa: F401  registers its operator
from automodel_c.parallel import exchange as _exchange  # noqa: F401  registers its operator

KEPT = {torch.ops.automodel_c.exchange_rows.default, torch.ops.automodel_c.attention_forward.default}


def checkpoint_context_fn():
    """For ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False, context_fn=checkpoint_context_fn)``.

    The rows that came in and the outputs of attention are kept; everything else is computed again.
    """
    return create_selective_checkpoint_contexts(_policy)


def _policy(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
