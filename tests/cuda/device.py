"""What every CUDA operator owes its caller: the current stream, no waiting, capture. Under plain_memory.

`run(*inputs)` gives a list of tensors, gradients among them.
"""

import math

import torch


def on_cuda(tensors):
    return [x.cuda() for x in tensors]


def same_bits(left, right):
    """Equal, NaN where NaN is."""
    return all(
        torch.equal(x.isnan(), y.isnan()) and torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0))
        for x, y in zip(left, right, strict=True)
    )


def assert_goes_to_the_current_stream(run, inputs):
    expected = run(*inputs)
    late = [torch.zeros_like(x) for x in inputs]
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(100_000_000)
        for x, y in zip(late, inputs, strict=True):
            x.copy_(y)
        assert same_bits(expected, run(*late))


def assert_does_not_wait(run, inputs):
    expected = run(*inputs)
    try:
        torch.cuda.set_sync_debug_mode("error")
        made = run(*inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert same_bits(expected, made)


def assert_can_be_captured(run, inputs, others):
    """A graph captured on `inputs` gives what `run` gives when its memory holds `others`."""
    kept = [x.clone() for x in inputs]
    expected = [run(*others), run(*kept)]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = run(*inputs)
    for values, wanted in zip((others, kept), expected, strict=True):
        for x, y in zip(inputs, values, strict=True):
            x.copy_(y)
        for x in made:
            x.fill_(math.nan)
        graph.replay()
        assert same_bits(wanted, made)
