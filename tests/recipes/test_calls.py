"""Our own definition and transformers' in the recipe: the same losses and answers from the same weights."""

import pytest
import torch

from automodel_c import ops
from automodel_c.recipes.calls import OwnCalls, TransformersCalls
from automodel_c.recipes.config import load_recipe
from automodel_c.recipes.evaluate import evaluate
from automodel_c.recipes.finetune_vlm import _loader, _step, build
from automodel_c.recipes.runtime import start_ranks
from automodel_c.recipes.step import accumulate_gradients, global_counts

from .conftest import DIGITS

PARTS = (
    "model.text_config={output_router_logits: true, router_aux_loss_coef: 0.3}",
    "processor._target_=AutoProcessor.from_pretrained",
    "processor.words=null",
    "model.config=null",
    "model._target_=NeMoAutoModelForImageTextToText.from_pretrained",
)


@pytest.fixture
def own_rank(monkeypatch):
    for key, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("MASTER_PORT", "29539")


def _first_step(run):
    batches = [next(batch) for batch in [iter(_loader(run))] for _ in range(run.sampler.microbatches)]
    labels, tokens = global_counts(run.model, batches, run.runtime)
    losses = accumulate_gradients(run.model, batches, labels, runtime=run.runtime, per_microbatch=True)
    return {"labels": labels, "tokens": tokens, **{name: value.item() for name, value in losses.items()}}


def test_definitions_agree(finished, tiny, own_rank):
    """Counts, losses and the held-out answers, with every operator setting, from one exported directory."""
    folder = f"model.pretrained_model_name_or_path={finished[0] / 'hf'}"
    told, answers = {}, {}
    for operators in ("automodel_c", "patched", "transformers"):
        plain = ("packed_sequence.enabled=false", "loss_fn._target_=MaskedCrossEntropy")  # transformers packs nothing
        overrides = [*tiny, *PARTS, folder, *plain, f"model.operators={operators}"]
        recipe = load_recipe(DIGITS, overrides)
        with start_ranks(recipe) as runtime:
            run = build(recipe, runtime)
            assert isinstance(run.model, torch.distributed.fsdp.FSDPModule)
            told[operators] = _first_step(run)
            answers[operators] = evaluate(run.model, run.held_out, run.processor, batch_size=5, runtime=runtime)
    ours = told["automodel_c"]
    assert set(ours) == {"labels", "tokens", "lm", "aux"} and ours["aux"] > 1
    for operators in ("patched", "transformers"):
        theirs, evaluation = told[operators], answers[operators]
        assert (theirs["labels"], theirs["tokens"]) == (ours["labels"], ours["tokens"])
        assert theirs["lm"] == pytest.approx(ours["lm"], rel=1e-5)
        assert (evaluation.right, evaluation.total, evaluation.parts) == (
            answers["automodel_c"].right, 21, answers["automodel_c"].parts,
        )  # fmt: skip
        assert evaluation.loss == pytest.approx(answers["automodel_c"].loss, rel=1e-5)


@pytest.mark.parametrize("operators", ["automodel_c", "transformers"])
def test_what_stands_for_a_bad_sample_is_not_scored(tiny, own_rank, operators):
    plain = ("packed_sequence.enabled=false", "loss_fn._target_=MaskedCrossEntropy")
    recipe = load_recipe(DIGITS, [*tiny, *plain, f"model.operators={operators}"])
    with start_ranks(recipe) as runtime:
        run = build(recipe, runtime)
        good = [run.held_out[i] for i in range(3)]
        mixed = [good[0], run.processor.dummy_sample(), *good[1:]]
        expected, apart, together = (
            evaluate(run.model, samples, run.processor, batch_size=size, runtime=runtime)
            for samples, size in ((good, 1), (mixed, 1), (mixed, 4))
        )
    assert apart == expected and expected.total == 3
    assert (together.right, together.total, together.parts) == (expected.right, 3, expected.parts)


def test_collate_has_no_padding_but_what_is_asked_for(tiny):
    recipe = load_recipe(DIGITS, [*tiny, "packed_sequence.collate_max_length=80"])
    with start_ranks(recipe) as runtime:
        run = build(recipe, runtime)
        packs = [run.dataset[i] for i in range(3)]
        batch = OwnCalls.collate(packs, run.processor)
        assert len(batch["input_ids"]) == OwnCalls.tokens(batch) == sum(len(pack["input_ids"]) for pack in packs)
        padded = next(iter(_loader(run)))
        assert len(padded["input_ids"]) == 4 * 80 > OwnCalls.tokens(padded)
        with pytest.raises(ValueError, match=r"collate_max_length=40: a pack has \d+ tokens"):
            OwnCalls.collate(packs, run.processor, max_length=40)
        tokens = TransformersCalls.tokens(TransformersCalls.collate(packs, run.processor))
        assert tokens == OwnCalls.tokens(batch)


@pytest.mark.parametrize("frozen", ["freeze_vision_tower", "freeze_language_model", "freeze_embeddings"])
def test_frozen_parts_stay(tiny, frozen):
    names = {
        "freeze_vision_tower": ("model.visual.",),
        "freeze_language_model": ("model.language_model.", "lm_head.", "mtp."),
        "freeze_embeddings": ("model.language_model.embed_tokens.",),
    }[frozen]
    more = ("model.config.text_config.mtp_num_hidden_layers=1", "distributed.activation_checkpointing=full")
    recipe = load_recipe(DIGITS, [*tiny, *more, f"freeze_config.{frozen}=true"])
    with start_ranks(recipe) as runtime:
        run = build(recipe, runtime)
        assert run.model.mtp.recompute == "full"
        assert run.model.model.visual.recompute == (frozen != "freeze_vision_tower" and "full"), "it keeps nothing"
        before = {name: p.full_tensor().clone() for name, p in run.model.named_parameters()}
        batches = [next(batch) for batch in [iter(_loader(run))] for _ in range(run.sampler.microbatches)]
        _step(run, 2, batches)
        for name, p in run.model.named_parameters():
            assert torch.equal(p.full_tensor(), before[name]) == name.startswith(names), name


def test_gates_stay_fp32(tiny, monkeypatch):
    """In bfloat16 too: A_log and dt_bias reach their operator, and the optimizer, as they are on disk."""
    seen = []

    def spy(a, b, A_log, dt_bias):
        seen.append((a.dtype, A_log.dtype, dt_bias.dtype))
        return gate(a, b, A_log, dt_bias)

    gate = ops.gdn_gate
    monkeypatch.setattr(ops, "gdn_gate", spy)
    losses = {}
    for dtype, recompute in (("float32", "false"), ("bfloat16", "false"), ("bfloat16", "full")):
        overrides = (f"model.torch_dtype={dtype}", f"distributed.activation_checkpointing={recompute}")
        recipe = load_recipe(DIGITS, [*tiny, *overrides])
        with start_ranks(recipe) as runtime:
            run = build(recipe, runtime)
            seen.clear()
            losses[dtype, recompute] = _first_step(run)["lm"]
            assert set(seen) == {(getattr(torch, dtype), torch.float32, torch.float32)}
            gates = [p for name, p in run.model.named_parameters() if name.endswith(("A_log", "dt_bias"))]
            assert gates and all(p.grad.dtype == torch.float32 and p.grad.full_tensor().any() for p in gates)
    assert losses["bfloat16", "full"] == losses["bfloat16", "false"]
    assert losses["bfloat16", "full"] == pytest.approx(losses["float32", "false"], rel=0.01)
