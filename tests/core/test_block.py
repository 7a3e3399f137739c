"""Tables of long lists wait for the next call."""

import resource

import torch

from automodel_c import _amcore


def faults():
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def test_a_second_long_list_faults_no_pages():
    """20,000 tensors in five lists are 12 MB of tables, more than 3,000 pages when they are mapped afresh."""
    lists = [[torch.zeros(i % 3) for i in range(20_000)] for _ in range(4)]
    steps = [torch.zeros(()) for _ in range(20_000)]
    numbers = {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.0}
    seen = []
    for _ in range(4):
        before = faults()
        _amcore.adam_step(*lists[:3], steps, lists[3], **numbers)
        seen.append(faults() - before)
    assert min(seen[1:]) < 500, seen
    assert all(step == 4 for step in steps)
