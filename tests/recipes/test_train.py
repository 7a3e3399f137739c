import json
import math
import re
import shutil
import time

import pytest
import torch

from automodel_c.data.sampler import GlobalBatchSampler
from automodel_c.models import qwen3_5
from automodel_c.recipes.calls import OwnCalls, TransformersCalls
from automodel_c.recipes.checkpoint import checkpoint_step
from automodel_c.recipes.config import load_recipe
from automodel_c.recipes.finetune_vlm import build
from automodel_c.recipes.runtime import start_ranks
from tests.models import packs
from tests.patch import models

from .conftest import DIGITS, data_at, run_cli, train_two_ranks


def _rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_train_metrics(finished):
    rows = _rows(finished[0] / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    for row in rows:
        assert type(row["step"]) is int and type(row["tokens"]) is int
        for key in ("loss", "grad_norm", "lr", "tokens_per_s", "memory"):
            assert type(row[key]) is float and math.isfinite(row[key]) and row[key] > 0, (key, row)
        assert row["num_label_tokens"] >= 32, "an answer is two tokens at least"
        assert 16 * 32 < row["tokens"] <= 16 * 64, "16 packs of at most 64 tokens, better than half full"
    assert rows[0]["lr"] == pytest.approx(1e-3) and rows[-1]["lr"] < rows[2]["lr"]


def test_train_output(finished):
    folder, done = finished
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert [row["step"] for row in _rows(folder / "validation.jsonl")] == [4, 6]
    checkpoints = folder / "checkpoints"
    assert sorted(p.name for p in checkpoints.iterdir()) == ["LATEST", "LOWEST_VAL", "step_3", "step_6"]
    assert all((checkpoints / name / ".metadata").is_file() for name in ("step_3", "step_6"))
    assert all((checkpoints / name).read_text() == "step_6\n" for name in ("LATEST", "LOWEST_VAL"))
    assert "held-out accuracy: " in done.stdout and " of 21)" in done.stdout
    assert re.search(r"\n  videos \S+ % \(\d of 7\), images \S+ % \(\d+ of 14\)", done.stdout)
    for row in _rows(folder / "validation.jsonl"):
        assert row["accuracy"] == pytest.approx((row["accuracy_video"] + 2 * row["accuracy_image"]) / 3)
    for word in ("loss ", " tokens/s", " GiB", "6/6"):
        assert done.stderr.rsplit("\r", 1)[-1].count(word) == 1, done.stderr


def test_train_names_the_rank_that_failed(digits_folder, tiny, tmp_path):
    """A picture that cannot be read, seen by rank 1 alone in its second step, ends both ranks within seconds."""
    shutil.copytree(digits_folder, tmp_path / "digits")
    path = tmp_path / "digits" / "train.jsonl"
    lines = path.read_text().splitlines()
    mine = iter(
        GlobalBatchSampler(len(lines), global_batch_size=16, local_batch_size=4, dp_rank=1, dp_size=2, seed=1234)
    )
    index = [next(mine) for _ in range(4)][2][0]
    messages = json.loads(lines[index])["messages"]
    messages[0]["content"][0] = {"type": "image", "image": "images/bad.png"}
    lines[index] = json.dumps({"messages": messages})
    path.write_text("\n".join(lines))
    (tmp_path / "digits" / "images" / "bad.png").write_bytes(b"not a picture")
    began = time.monotonic()
    apart = "packed_sequence.enabled=false"  # packs are planned from every sample, on both ranks, before the first step
    overrides = (*tiny, *data_at(tmp_path / "digits"), apart, "loss_fn._target_=MaskedCrossEntropy")
    done = run_cli("train", DIGITS, "--nproc", "2", *overrides, f"output_dir={tmp_path}/run")
    assert done.returncode == 1, done.stderr
    where = f"{path}, line {index + 1}"
    assert f"RankFailure: rank 1 failed: BadSample: {where}: UnidentifiedImageError: cannot identify" in done.stderr
    assert time.monotonic() - began < 120, "start, one step and the failure"


def test_train_resumes(finished, tiny, tmp_path):
    """From step 3 on, another process writes the same losses, to the bit."""
    folder = finished[0]
    shutil.copytree(folder, tmp_path / "run")
    train_two_ranks(
        *tiny,
        f"output_dir={tmp_path / 'run'}",
        f"checkpoint.restore_from={tmp_path / 'run' / 'checkpoints' / 'step_3'}",
        "checkpoint.is_async=true",
    )
    keys = ("step", "loss", "grad_norm", "lr", "tokens")
    before, after = ([[row[k] for k in keys] for row in _rows(f / "metrics.jsonl")] for f in (folder, tmp_path / "run"))
    assert after == before
    assert _rows(tmp_path / "run" / "validation.jsonl") == _rows(folder / "validation.jsonl")


def test_export_loads_into_transformers(finished, tiny):
    """The directory gives transformers, and our own definition to the bit, the model of the last checkpoint, which one
    rank can read as well."""
    from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

    folder = finished[0]
    exported, info = AutoModelForImageTextToText.from_pretrained(
        folder / "hf", output_loading_info=True, local_files_only=True, experts_implementation="eager"
    )
    assert not any(info.values()), info
    assert AutoTokenizer.from_pretrained(folder / "hf").chat_template
    assert AutoImageProcessor.from_pretrained(folder / "hf", backend="pil").patch_size == 8
    again = qwen3_5.load(folder / "hf")
    recipe = load_recipe(DIGITS, [*tiny, f"checkpoint.restore_from={folder / 'checkpoints' / 'step_6'}"])
    with start_ranks(recipe) as runtime, torch.no_grad():
        run = build(recipe, runtime)
        found, naive, truth = [], [], []
        exact = models.in_float64(exported)
        for sample in (run.held_out[i] for i in range(12)):
            batch = OwnCalls.collate([sample], run.processor)
            found.append({"logits": OwnCalls.answers(run.model, batch, runtime)[0]})
            assert torch.equal(OwnCalls.answers(again, batch, runtime)[0], found[-1]["logits"])
            row = TransformersCalls.collate([sample], run.processor)
            naive.append({"logits": TransformersCalls.answers(exported, row, runtime)[0]})
            wide = {k: v.double() if k.startswith("pixel") else v for k, v in row.items()}
            with models.Exact():
                truth.append({"logits": TransformersCalls.answers(exact, wide, runtime)[0]})
    packs.compare(found, naive, truth, "export")


def test_train_from_export(finished, tiny, tmp_path, capsys):
    """The export is a model directory that a recipe can start from."""
    from automodel_c.cli import main

    assert (
        main(
            [
                "train",
                DIGITS,
                *tiny,
                "--check",
                f"output_dir={tmp_path}",
                "model.config=null",
                "model._target_=NeMoAutoModelForImageTextToText.from_pretrained",
                f"model.pretrained_model_name_or_path={finished[0] / 'hf'}",
                "processor._target_=AutoProcessor.from_pretrained",
                "processor.words=null",
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    read = re.search(r"recipe is fine: .*; a rank read (\S+) to (\S+) MiB of the model's files", out)
    size = (finished[0] / "hf" / "model.safetensors").stat().st_size / 2**20
    assert read and float(read[1]) == float(read[2]) == pytest.approx(size, abs=0.1)


def test_export_of_a_checkpoint(finished, tiny, tmp_path, capsys):
    """`automodel-c export` writes what the run itself exported; another model's checkpoint is one line of complaint."""
    from automodel_c.cli import main

    step = str(finished[0] / "checkpoints" / "step_6")
    for name, checkpoint in (("hf", step), ("latest", "LATEST")):
        folder = tmp_path / name
        assert main(["export", DIGITS, checkpoint, str(folder), *tiny, f"output_dir={finished[0]}"]) == 0
        assert capsys.readouterr().out == f"wrote {folder}\n"
        for path in (finished[0] / "hf").iterdir():
            assert (folder / path.name).read_bytes() == path.read_bytes(), path.name
    for verb, more in (("export", [step, str(tmp_path / "other")]), ("train", [f"checkpoint.restore_from={step}"])):
        wider = [*more, *tiny, "model.config.text_config.hidden_size=64", f"output_dir={tmp_path}/run"]
        assert main([verb, DIGITS, *wider]) == 2
        assert f"checkpoint.restore_from='{step}' is not of this model" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("name", ["step_3", "epoch_3", "step_x"])
def test_checkpoint_step_refuses(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match=r"expected a folder called step_<n> that holds \.metadata"):
        checkpoint_step(tmp_path / name)
