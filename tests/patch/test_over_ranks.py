"""A patched model whose ranks share every batch against one rank: loss and every gradient, by the error rule."""

import pytest
import torch

import automodel_c
from automodel_c.parallel import ContextParallel
from tests.models.packs import compare
from tests.patch import models, over_ranks
from tests.ranks import RanksFailed

SEEDS = range(4)


def alone(family, documents, seeds, **options):
    """(transformers in float32, in float64), each document alone, of each seed's model."""
    naive, truth = [], []
    for seed in seeds:
        model = models.build(family, seed=seed, **options)
        with models.Exact():
            truth.append(models.run_each(models.in_float64(model), documents))
        naive.append(models.run_each(model, documents))
    return naive, truth


def summed(parts):
    """The ranks' parts of each run added up."""
    return [{key: sum(part[key] for part in run) for key in run[0]} for run in zip(*parts, strict=True)]


@pytest.mark.parametrize(
    ("family", "batch", "world"),
    [
        ("qwen3_5_moe", "positions", 2),
        ("qwen3_5", "positions", 3),
        ("qwen3_5", "mask", 2),
        ("qwen3_5_moe", "mask", 3),
        ("qwen3_5", "videos", 2),
        ("qwen3_5_moe", "rows", 2),
    ],
)
def test_parts_of_loss_and_gradients_sum_to_one_ranks(rank_pools, family, batch, world):
    naive, truth = alone(family, over_ranks.BATCHES[batch][0], SEEDS)
    found = rank_pools(world).run(over_ranks.parts, family, SEEDS, batch, timeout=300.0)
    assert all(part["loss"] != 0 for part in found[0])
    compare(summed(found), naive, truth, f"{world} ranks")


@pytest.mark.parametrize(
    ("family", "hooks", "checkpointing", "shape"),
    [
        ("qwen3_5", False, False, (1, 2)),
        ("qwen3_5_moe", True, True, (1, 2)),
        ("qwen3_5_moe", False, True, (2, 2)),
    ],
    ids=["torch", "hooks-checkpointed", "dp2-checkpointed"],
)
def test_sharded_weights(rank_pools, family, hooks, checkpointing, shape):
    seeds = range(3)
    naive, truth = alone(family, models.uneven(), seeds, **over_ranks.SMALL)
    pool = rank_pools(shape[0] * shape[1])
    first, *others = pool.run(
        over_ranks.sharded, family, seeds, "positions", hooks, checkpointing, shape, timeout=300.0
    )
    for other in others:
        for one, two in zip(first, other, strict=True):
            assert [name for name, value in one.items() if not torch.equal(value, two[name])] == []
    compare(first, naive, truth, "sharded")


def test_checkpointing_gives_the_same_bits_and_may_keep_what_came_in(ranks):
    for plain, again, kept in ranks.run(over_ranks.recomputed, "qwen3_5_moe", "positions", timeout=300.0):
        assert kept == plain < again


def test_logits_are_the_whole_batchs_on_every_rank(ranks):
    batch = {key: value for key, value in over_ranks.BATCHES["rows"][1].items() if key != "labels"}
    model = models.build()
    automodel_c.patch_transformers(model)
    expected = model(**batch).logits
    expected.sum().backward()
    found = ranks.run(over_ranks.outputs, "qwen3_5_moe", "rows", timeout=300.0)
    for logits, _, _ in found:
        torch.testing.assert_close(logits, expected)
    for name, p in model.named_parameters():
        grad = torch.zeros_like(p) if p.grad is None else p.grad
        torch.testing.assert_close(sum(grads[name] for _, _, grads in found), grad, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("pad", [0, 7])
def test_auxiliary_loss_is_a_part_too(ranks, pad):
    batch = over_ranks.indexed([models.document(9, seed=1), models.document(30, seed=2)], pad=pad)
    model = models.build()
    model.config.get_text_config().router_aux_loss_coef = 0.5
    automodel_c.patch_transformers(model)
    expected = model(**batch, output_router_logits=True)
    expected.loss.backward()
    found = ranks.run(over_ranks.auxiliary, batch, None, timeout=300.0)
    torch.testing.assert_close(sum(aux for _, aux, _ in found), expected.aux_loss)
    torch.testing.assert_close(sum(loss for loss, _, _ in found), expected.loss)
    for name, p in model.named_parameters():
        grad = torch.zeros_like(p) if p.grad is None else p.grad
        torch.testing.assert_close(sum(grads[name] for _, _, grads in found), grad, rtol=1e-3, atol=1e-5)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # dynamo looks at every tensor it traces
def test_compiled_equals_eager(ranks):
    ranks.run(over_ranks.compiled, "qwen3_5_moe", "positions", timeout=300.0)


def test_undo_gives_the_same_bits_again(ranks):
    for table in ranks.run(over_ranks.undone, "qwen3_5_moe", "positions", timeout=120.0):
        assert "parallel.attention" in table and "left: each of the 2 ranks runs all of them" in table


def test_one_rank_shares_nothing():
    report = automodel_c.patch_transformers(models.build(), cp=ContextParallel(None))
    assert report.cp is None
    assert ("model.language_model", "documents of a pack", "Pack") in report.swapped


def test_refusals(ranks):
    words = [
        "patched already, with cp=ContextParallel(rank 0 of 2)",
        "output_hidden_states: of ranks that share a batch",
        "use_cache: ranks that share a batch have no cache",
        "use_cache: ranks that share a batch have no cache",
        "over the 2 ranks of cp every part that mixes tokens must run on operators",
        "head dim 24 has no kernel",
        "cp must be a ContextParallel or None, not ProcessGroup",
    ]
    said = ranks.run(over_ranks.refusals, timeout=120.0)[0]
    assert len(said) == len(words)
    for text, word in zip(said, words, strict=True):
        assert word in text


@pytest.mark.parametrize(
    ("change", "words"), [("shape", "attention_mask has shape [1, 151]"), ("documents", "a plan of 7 documents")]
)
def test_a_batch_that_is_odd_on_one_rank_is_raised_on_both(ranks, change, words):
    with pytest.raises(RanksFailed) as failed:
        ranks.run(over_ranks.odd_batch, 1, change, timeout=60.0, grace=20.0)
    assert set(failed.value.reports) == {0, 1}
    assert words in failed.value.reports[0]
