"""The recipe over ranks that share every pack, weights or experts: the same losses, weights and answers as one rank."""

import json
import time

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForImageTextToText

from automodel_c.cli import main
from automodel_c.models import qwen3_5
from automodel_c.recipes.calls import TransformersCalls, model_inputs
from automodel_c.recipes.config import load_recipe
from automodel_c.recipes.finetune_vlm import build
from automodel_c.recipes.runtime import start_ranks
from tests.models import packs
from tests.numerics import assert_as_good_as
from tests.patch import models
from tests.ranks import RanksFailed

from . import context_worker as worker
from .conftest import ROOT
from .test_step import assert_same_bits, assert_same_step

CP2 = str(ROOT / "examples" / "digits_cp2.yaml")
STEPS = 4
FRAMES = "distributed.multimodal.vision.frame_sharding"
SMALL = (  # four packs a step, each of about four conversations
    "packed_sequence.pack_size=150",
    "step_scheduler.global_batch_size=4",
    "step_scheduler.local_batch_size=1",
    f"step_scheduler.max_steps={STEPS}",
    "step_scheduler.ckpt_every_steps=null",
    "step_scheduler.val_every_steps=null",
    "lr_scheduler.lr_decay_steps=8",
    "dataset.limit=80",
    "validation_dataset.limit=11",
    f"{FRAMES}.min_tokens=0",
    f"{FRAMES}.min_frames=0",
    f"{FRAMES}.min_local_patch_rows=0",
    "optimizer.eps=1.0e-3",  # where a gradient is but rounding, its sign shall not decide a step
    "rng.deterministic=false",  # a switch of the whole process, which other tests share
)
AUXILIARY = (
    "model.config.text_config.output_router_logits=true",
    "model.config.text_config.router_aux_loss_coef=0.3",
)
PREDICTION = ("model.config.text_config.mtp_num_hidden_layers=1",)
LOADED = (
    "processor._target_=AutoProcessor.from_pretrained",
    "processor.words=null",
    "model.config=null",
    "model._target_=NeMoAutoModelForImageTextToText.from_pretrained",
)
SEEDS = range(2)
# ranks, how many seeds, then (cp, tp, pp, ep, last step) one after another, each from the one before
LAYOUTS = {
    "cp 2": (2, 2, [(2, 1, 1, 1, STEPS)]),
    "dp 2 x cp 2": (4, 2, [(2, 1, 1, 1, STEPS)]),
    "cp 2, then dp 2, then cp 2": (2, 1, [(2, 1, 1, 1, 1), (1, 1, 1, 1, 3), (2, 1, 1, 1, STEPS)]),
    "cp 2 with ep 2": (2, 2, [(2, 1, 1, 2, STEPS)]),
    "dp 2 with ep 2, then cp 2, then cp 2 with ep 2": (2, 1, [(1, 1, 1, 2, 1), (2, 1, 1, 1, 3), (2, 1, 1, 2, STEPS)]),
    "tp 2, then pp 2, then tp 2 with ep 2": (2, 1, [(1, 2, 1, 1, 1), (1, 1, 2, 1, 3), (1, 2, 1, 2, STEPS)]),
    "tp 2 x pp 2": (4, 1, [(1, 2, 2, 1, STEPS)]),
}


@pytest.fixture(scope="module")
def small(tiny):
    return [*tiny, *SMALL]


@pytest.fixture(scope="module")
def start(rank_pools, small, tmp_path_factory):
    """start(seed): the overrides of a run from random weights."""
    made = {}

    def get(seed):
        if seed not in made:
            folder = tmp_path_factory.mktemp("start") / "hf"
            overrides = [*small, *AUXILIARY, f"seed={seed}"]
            rank_pools(1).run(worker.first_weights, CP2, [*overrides, "distributed.cp_size=1"], folder)
            made[seed] = [*overrides, *LOADED, f"model.pretrained_model_name_or_path={folder}"]
        return made[seed]

    return get


@pytest.fixture(scope="module")
def runs(rank_pools, start, tmp_path_factory):
    """runs(ranks, parts, seed): (rows of metrics.jsonl, weights at the end, row of validation.jsonl)."""

    def run(ranks, parts, seed):
        folder, restored = tmp_path_factory.mktemp("run"), []
        for cp, tp, pp, ep, last in parts:
            more = [f"distributed.cp_size={cp}", f"{FRAMES}.enabled={str(cp > 1).lower()}", f"output_dir={folder}"]
            more += [f"distributed.ep_size={ep}", f"distributed.tp_size={tp}", f"distributed.pp_size={pp}"]
            overrides = [*start(seed), *more, *restored, f"step_scheduler.max_steps={last}"]
            said = rank_pools(ranks).run(worker.trained, CP2, overrides)
            sizes = [f" x {name} {n}" for name, n in (("cp", cp), ("tp", tp), ("pp", pp)) if n > 1]
            shape = f" (dp {ranks // (cp * tp * pp)}{''.join(sizes)})" if sizes else ""
            assert f"on {ranks} ranks{shape}" in said[0] and bool(sizes) == (" (dp" in said[0])
            assert (f", experts over {ep}" in said[0]) == (ep > 1)
            restored = [f"checkpoint.restore_from={folder}/checkpoints/step_{last}"]
        rows, held_out = (
            [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
            for name in ("metrics", "validation")
        )
        return rows, qwen3_5.load(folder / "hf").state_dict(), held_out[-1]

    return run


@pytest.fixture(scope="module")
def one_rank(runs):
    return [runs(1, [(1, 1, 1, 1, STEPS)], seed) for seed in SEEDS]


@pytest.fixture(scope="module")
def truth(start):
    return [exact_run([*start(seed), "distributed.cp_size=1", f"{FRAMES}.enabled=false"]) for seed in SEEDS]


def exact_run(overrides):
    """(losses, auxiliary losses, weights): the steps of a run in float64, with transformers and torch."""
    recipe = load_recipe(CP2, overrides)
    with start_ranks(recipe) as runtime:
        run = build(recipe, runtime)
    twin = AutoModelForImageTextToText.from_pretrained(
        recipe.model.pretrained_model_name_or_path, experts_implementation="eager"
    )
    twin = models.in_float64(twin.train())
    section, indices = recipe.optimizer, iter(run.sampler)
    optimizer = torch.optim.AdamW(
        twin.parameters(), betas=tuple(section.betas), eps=section.eps, weight_decay=section.weight_decay
    )
    losses, auxiliary = [], []
    for step in range(1, STEPS + 1):
        batches = []
        for _ in range(run.sampler.microbatches):
            documents = [run.dataset.dataset[i] for pack in next(indices) for i in run.dataset.packs[pack]]
            batches.append(TransformersCalls.collate(documents, run.processor))
        lm, aux = exact_gradients(twin, batches)
        torch.nn.utils.clip_grad_norm_(twin.parameters(), recipe.clip_grad_norm.max_norm)
        optimizer.param_groups[0]["lr"] = run.schedule(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(lm)
        auxiliary.append(aux)
    return torch.stack(losses), torch.stack(auxiliary), twin.state_dict()


def exact_gradients(twin, batches):
    labels = sum(int((batch["labels"] != -100).sum()) for batch in batches)
    total_lm = total_aux = 0
    for batch in batches:
        inputs = model_inputs(batch, "cpu", twin.config)
        inputs["pixel_values"] = inputs["pixel_values"].double()
        with models.Exact():
            outputs = twin(**inputs, use_cache=False)
            lm = F.cross_entropy(outputs.logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum") / labels
            aux = outputs.aux_loss / len(batches)
            (lm + 0.3 * aux).backward()
        total_lm, total_aux = total_lm + lm.detach(), total_aux + aux.detach()
    return total_lm, total_aux


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_and_weights_are_one_ranks(runs, one_rank, truth, layout):
    """The error rule on every loss of the curve and on all weights after the last step; what is counted is the same."""
    ranks, seeds, parts = LAYOUTS[layout]
    found, one_rank, truth = [runs(ranks, parts, seed) for seed in SEEDS[:seeds]], one_rank[:seeds], truth[:seeds]
    for (rows, _, held_out), (expected, _, expected_held_out) in zip(found, one_rank, strict=True):
        for key in ("step", "tokens", "num_label_tokens", "lr"):
            assert [row[key] for row in rows] == [row[key] for row in expected], key
        assert held_out["step"] == STEPS and held_out["accuracy"] == expected_held_out["accuracy"]
    for key, at in (("loss", 0), ("aux_loss", 1)):
        curves = [torch.tensor([row[key] for rows, _, _ in of for row in rows]) for of in (found, one_rank)]
        assert_as_good_as(*curves, torch.cat([of[at] for of in truth]), name=f"{layout}: {key}")
    packs.compare([w for _, w, _ in found], [w for _, w, _ in one_rank], [of[2] for of in truth], layout)


@pytest.fixture(scope="module")
def one_ranks_step(rank_pools, small):
    """(losses, counts and gradients of a global batch, Evaluation) on one rank."""
    overrides = [*small, *AUXILIARY, *PREDICTION, "distributed.cp_size=1"]
    found, held_out = rank_pools(1).run(worker.first_step, CP2, overrides)[0]
    return found[0], held_out


@pytest.mark.parametrize(
    "ranks, frames, more",
    [
        (2, "true", []),
        (2, "false", []),
        (4, "true", []),
        (4, "true", ["distributed.ep_size=2"]),
        (4, "true", ["distributed.tp_size=2", "distributed.ep_size=4"]),
        (2, "false", ["distributed.cp_size=1", "distributed.pp_size=2"]),
        (4, "true", ["distributed.pp_size=2", "distributed.ep_size=2"]),
    ],
)
def test_first_step_is_one_ranks(rank_pools, small, one_ranks_step, ranks, frames, more):
    """Losses, counts, every gradient and the held-out answers, reduced in every microbatch and deferred; what is
    recomputed in backward has the same bits."""
    expected, held_out = one_ranks_step
    overrides = [*small, *AUXILIARY, *PREDICTION, f"{FRAMES}.enabled={frames}", *more]
    results = rank_pools(ranks).run(worker.first_step, CP2, overrides)
    assert all(answers == results[0][1] for _, answers in results)
    found, answers = results[0]
    assert (answers.right, answers.total, answers.parts) == (held_out.right, 11, held_out.parts)
    assert answers.loss == pytest.approx(held_out.loss, rel=1e-6)
    assert_same_bits(found[0], found[2])
    assert_same_bits(found[1], found[3])
    for other in found[:2]:
        assert_same_step(other, expected)


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["distributed.ep_size=2"],
        ["distributed.cp_size=1", "distributed.tp_size=2"],
        ["distributed.cp_size=1", "distributed.pp_size=2"],
    ],
)
def test_export_of_a_shared_run(rank_pools, small, tmp_path, capsys, more):
    """One rank writes from the checkpoint of two what these wrote themselves."""
    small = [*small, *PREDICTION, *more]
    overrides = [*small, "step_scheduler.max_steps=1", f"output_dir={tmp_path / 'run'}"]
    rank_pools(2).run(worker.trained, CP2, overrides)
    assert main(["export", CP2, str(tmp_path / "run/checkpoints/step_1"), str(tmp_path / "hf"), *small]) == 0
    assert capsys.readouterr().out == f"wrote {tmp_path / 'hf'}\n"
    for path in (tmp_path / "run" / "hf").iterdir():
        assert (tmp_path / "hf" / path.name).read_bytes() == path.read_bytes(), path.name


def test_ranks_that_do_not_divide_the_experts(rank_pools, small, tmp_path):
    with pytest.raises(RanksFailed, match=r"distributed\.ep_size=2: the model has 3 experts, no multiple of it"):
        overrides = ["model.config.text_config.num_experts=3", "distributed.ep_size=2", f"output_dir={tmp_path}"]
        rank_pools(2).run(worker.trained, CP2, [*small, *overrides])


def test_train_names_the_rank_that_failed(rank_pools, small, tmp_path):
    """A tower that returns one token too few on rank 1 in the second step."""
    began = time.monotonic()
    with pytest.raises(RanksFailed) as info:
        rank_pools(2).run(worker.failing, CP2, [*small, f"output_dir={tmp_path}"], 1, 2, grace=30)
    own, other = info.value.reports[1], info.value.reports[0]
    assert "ValueError: model: the vision tower returned" in own
    assert "RankFailure: rank 1 failed: ValueError: model: the vision tower returned" in other
    assert time.monotonic() - began < 30
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1]


def test_the_example_shards_frames_and_documents(rank_pools, digits_folder):
    """Its own sizes and thresholds: every rank runs a part of the frames, and conversations lie across the middle."""
    overrides = [f"dataset.path_or_dataset={digits_folder}", f"validation_dataset.path_or_dataset={digits_folder}"]
    overrides += ["dataset.limit=120", "rng.deterministic=false"]
    ranks = rank_pools(2).run(worker.seen_frames, CP2, overrides, 4)
    straddling = 0
    for ours, theirs in zip(*ranks, strict=True):
        assert ours[:-1] == theirs[:-1], "both ranks see the same packs"
        tokens, edges, _, _, patches, _ = ours
        assert 0 < min(ours[-1], theirs[-1]) and ours[-1] + theirs[-1] == patches
        straddling += -(-tokens // 4) * 2 not in edges
    assert straddling >= 3
    images, clips = (sum(of[at] for of in ranks[0]) for at in (2, 3))
    assert images > 0 and clips > 0
