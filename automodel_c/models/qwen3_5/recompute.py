"""Activations that backward makes again."""

import contextlib
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
    return getattr(_thread, "again", False)


def _told(first, again):
    return first, _again(again)


@contextlib.contextmanager
def _again(context):
    before, _thread.again = made_again(), True
    try:
        with context:
            yield
    finally:
        _thread.again = before
