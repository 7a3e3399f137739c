"""Eight gloo ranks, dp 4 x cp 2 with experts over ep 2 x ep_shard 4, train as one does: packs and media dealt out, all
activations made again, gradients reduced in each microbatch or held, step by step; they are killed, and four go on.

The error rule as in test_qwen3_5_cp, on every step's weights.
"""

import pytest
import torch

from tests.models import cp_worker, packs
from tests.models import eight_worker as worker
from tests.models.test_qwen3_5_cp import by_transformers, label_count, one_rank
from tests.ranks import RankPool, RanksFailed

SEED, STEPS, SAVED = 71, 5, 3  # a seed of its own: the weights of its model change
CHOSEN = ("text", "clips", "tiny", "padding", "tiny", "text", "text", "tiny")  # two microbatches a rank


@pytest.fixture(scope="module")
def eight():
    pool = RankPool(8)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("eight")


@pytest.fixture(scope="module")
def found(eight, folder):
    """[(weights, loss and gradients)] of every step."""
    arguments = SEED, (4, 2), 2, CHOSEN, label_count(CHOSEN), str(folder / "checkpoints"), STEPS, SAVED
    return whole(eight.run(worker.trained, *arguments, timeout=120))


def whole(ranks):
    """[(weights, loss and gradients)] of every step, from what the ranks hold of them."""
    found = []
    for step in zip(*ranks, strict=True):
        weights, gradients = (worker.joined([rank[i] for rank in step]) for i in (0, 1))
        found.append((weights, {"loss": step[0][2], **gradients}))
    return found


@pytest.fixture(scope="module")
def one_ranks(found, folder):
    """([the twin's loss and gradients], [those in float64]) on the weights of every step."""
    model, naive, exact = cp_worker.build("experts", SEED), [], []
    for number, (weights, _) in enumerate(found):
        model.load_state_dict(weights)
        ours = one_rank.__wrapped__("experts", SEED, *CHOSEN)[0]
        for of, dtype in ((naive, torch.float32), (exact, torch.float64)):
            of.append(by_transformers(folder / f"{number}{dtype}", dtype, "experts", SEED, *CHOSEN))
        naive[-1] = {key: ours[key] if key.startswith("mtp.") else value for key, value in naive[-1].items()}
    return naive, exact


def test_eight_ranks_are_one_over_five_steps(found, one_ranks):
    naive, exact = one_ranks
    assert len(found) == STEPS and len({float(of["loss"]) for of in exact}) == STEPS, "the weights change"
    packs.compare([of for _, of in found], naive, exact, "eight ranks")


def test_four_go_on_where_eight_were_killed(eight, rank_pools, found, one_ranks, folder):
    """The last whole checkpoint is what LATEST names; the weights are its bits, and the losses go on as they did."""
    checkpoints = folder / "checkpoints"
    with pytest.raises(RanksFailed) as failed:
        eight.run(worker.killed, SEED, (4, 2), 2, str(checkpoints), timeout=40, grace=20)
    assert sorted(failed.value.reports) == list(range(8)) and "exit code -9" in failed.value.reports[0]
    assert {path.name for path in checkpoints.iterdir()} == {"LATEST", f"step_{SAVED}", ".step_9.tmp"}
    arguments = SEED, (2, 2), 4, CHOSEN, label_count(CHOSEN), str(checkpoints), STEPS
    results = rank_pools(4).run(worker.resumed, *arguments)
    again = whole([steps for _, steps in results])
    assert {first for first, _ in results} == {SAVED} and len(again) == STEPS - SAVED
    weights, _ = found[SAVED]
    assert all(torch.equal(again[0][0][key], value) for key, value in weights.items())
    for (_, ours), (_, theirs) in zip(again, found[SAVED:], strict=True):
        torch.testing.assert_close(ours["loss"], theirs["loss"], rtol=1e-5, atol=0)
    for key, expected in one_ranks[0][SAVED].items():  # one draw: unlucky elements are for the test above
        error = (again[0][1][key] - expected).norm() / expected.norm().clamp(min=1e-12)
        assert error < 1e-4, f"{key}: {error:.2e}"
