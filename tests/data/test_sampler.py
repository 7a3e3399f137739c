from itertools import chain

import pytest

from automodel_c.data.sampler import GlobalBatchSampler


def _steps(ranks, **options):
    """The samples of every step, over all ranks."""
    per_rank = []
    for rank in range(ranks):
        sampler = GlobalBatchSampler(30, global_batch_size=8, dp_rank=rank, dp_size=ranks, **options)
        lists = list(sampler)
        assert len(lists) == len(sampler)
        n = sampler.microbatches
        per_rank.append([list(chain(*lists[i:i + n])) for i in range(0, len(lists), n)])
    return [sorted(chain(*parts)) for parts in zip(*per_rank, strict=True)]


def test_sampler_ranks_do_not_matter():
    one = _steps(1, local_batch_size=2, num_epochs=2, seed=3)
    assert one == _steps(2, local_batch_size=2, num_epochs=2, seed=3)
    assert one == _steps(4, local_batch_size=1, num_epochs=2, seed=3)
    assert len(one) == 6 and all(len(set(step)) == 8 for step in one)
    assert len(set(chain(*one[:3]))) == 24 and one[:3] != one[3:], "epochs differ, no sample twice in one"


def test_sampler_resumes():
    whole = _steps(2, local_batch_size=2, num_epochs=3, seed=1)
    assert _steps(2, local_batch_size=2, num_epochs=3, seed=1, first_step=4) == whole[4:]
    assert _steps(2, local_batch_size=2, num_epochs=3, seed=1, max_steps=5) == whole[:5]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"global_batch_size": 6, "local_batch_size": 2, "dp_size": 2}, r"global_batch_size=6 is no multiple of"),
        ({"global_batch_size": 64, "local_batch_size": 2}, r"30 samples, step_scheduler.global_batch_size=64"),
    ],
)
def test_sampler_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        GlobalBatchSampler(30, **options)
