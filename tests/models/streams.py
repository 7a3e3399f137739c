"""CUDA's streams on the CPU, for code that asks for them whatever its tensors are on: operations are done one after
another there, so a stream is nothing and an event is always over. Collectives are done one by one: gloo, given several
at once, takes all of them for tensors of the first one's dtype."""

import contextlib
import importlib
import warnings
from unittest import mock

import torch
import torch.distributed as dist

from automodel_c.parallel.fsdp_hooks import gather_single


class Stream:
    """A torch.cuda.Stream, or an event of one."""

    def __init__(self, *_, **__):
        pass

    def wait_stream(self, _):
        pass

    wait_event = wait_stream

    def record_event(self, *_):
        return self

    def wait(self, *_):
        pass

    synchronize = record = wait

    def query(self):
        return True


def megatron_fsdp():
    """The package, without what it says about packages that it does without."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("megatron_fsdp")


@contextlib.contextmanager
def one_by_one(*_, **__):
    yield Stream()


def gather(output_tensor, input_tensor, group=None, async_op=False):
    return gather_single(output_tensor, input_tensor, group=group)


@contextlib.contextmanager
def on_cpu():
    """megatron_fsdp runs on the CPU meanwhile; yields it."""
    here, package = Stream(), megatron_fsdp()
    buffers = importlib.import_module("megatron_fsdp.param_and_grad_buffer")
    with (
        mock.patch.object(buffers, "_coalescing_manager", one_by_one),
        mock.patch.object(dist, "all_gather_into_tensor", gather),
        mock.patch.object(torch.cuda, "Stream", Stream),
        mock.patch.object(torch.cuda, "current_stream", lambda *_: here),
        mock.patch.object(torch.cuda, "stream", lambda _: contextlib.nullcontext()),
        mock.patch.object(torch.cuda, "current_device", lambda: 0),
        mock.patch.object(torch.cuda, "mem_get_info", lambda *_: (1, 1)),
        mock.patch.object(torch.cuda, "empty_cache", lambda: None),
        mock.patch.object(torch.Tensor, "cuda", lambda x, *_, **__: x),
    ):
        yield package
