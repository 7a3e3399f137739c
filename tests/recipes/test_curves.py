"""The losses of fifty steps are those of transformers with torch's AdamW, on one rank and over two."""

import pytest
import torch

from tests.numerics import assert_as_good_as
from tests.patch import models

from . import curves_worker as worker

SEEDS = range(2)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """(folders, float32 curves, float64 curves) of the seeds."""
    folders = [tmp_path_factory.mktemp("curves") for _ in SEEDS]
    plain, exact = [], []
    for seed, folder in zip(SEEDS, folders, strict=True):
        model = worker.checkpoint(folder, seed)
        exact.append(worker.by_transformers(models.in_float64(model), seed))
        plain.append(worker.by_transformers(model, seed))
    return folders, torch.stack(plain), torch.stack(exact)


@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (2, 1)], ids=["one-rank", "cp-2", "dp-2"])
def test_losses_of_fifty_steps(rank_pools, theirs, shape):
    folders, plain, exact = theirs
    assert (exact[:, -5:].mean(1) < 0.7 * exact[:, :5].mean(1)).all(), "nothing was learned"
    pool = rank_pools(shape[0] * shape[1])
    runs = [pool.run(worker.by_ours, str(folder), seed, shape) for seed, folder in zip(SEEDS, folders, strict=True)]
    for ranks in runs:
        assert all(torch.equal(curve, ranks[0]) for curve in ranks)
    assert_as_good_as(torch.stack([ranks[0] for ranks in runs]), plain, exact, name=str(shape), dtype=torch.float32)
