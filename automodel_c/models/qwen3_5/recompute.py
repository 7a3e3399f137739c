"""Activations that backward makes again."""

import threading

import torch
from torch.utils.checkpoint import checkpoint, noop_context_fn

from automodel_c.parallel.recompute import selective_context_fn

_thread = threading.local()


def run(module, recompute, *inputs, context_fn=noop_context_fn):
    """module(*inputs), whose activations are made again in backward where `recompute` says so: True or "full", but for
    what `context_fn` keeps, or "selective", see `selective_context_fn`."""
    if not recompute:
        return module(*inputs)
    context_fn = selective_context_fn if recompute == "selective" else context_fn
    told = context_fn if torch.compiler.is_compiling() else lambda: _told(*context_fn())
    return checkpoint(module, *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=told)


def made_again():
    """Whether this is the second forward of a module that `run` runs: what it returns nobody reads, backward wants what
    it saves on the way."""
    return getattr(_thread, "again", 0) > 0


def _told(first, again):
    return first, _Again(again)


class _Again:
    """Entered anew by every backward through the same graph, in whatever thread that runs."""

    def __init__(self, context):
        self.context = context

    def __enter__(self):
        self.context.__enter__()
        _thread.again = getattr(_thread, "again", 0) + 1

    def __exit__(self, *raised):
        _thread.again -= 1
        return self.context.__exit__(*raised)
