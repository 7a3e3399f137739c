"""A run of many ranks, built on none: it holds what the ranks of a run hold."""

import pytest

from automodel_c.cli import main
from automodel_c.models import qwen3_5
from automodel_c.recipes.config import load_recipe
from automodel_c.recipes.dry_run import PARTS, dry_run

from . import context_worker as worker
from .conftest import DIGITS, ROOT

CP2 = str(ROOT / "examples" / "digits_cp2.yaml")
LARGE = str(ROOT / "examples" / "qwen3_5_122b_128k.yaml")
TP4_PP4 = str(ROOT / "examples" / "qwen3_5_27b_tp4_pp4.yaml")
FRAMES = str(ROOT / "examples" / "qwen3_5_4b_cp2_frames.yaml")
MTP = "model.config.text_config.mtp_num_hidden_layers=1"


def total(ranks, key):
    return [sum(getattr(of, key) for of in rank.values()) for rank in ranks]


@pytest.mark.parametrize(
    "more",
    [
        ["distributed.ep_size=2"],
        ["distributed.ep_size=4", "freeze_config.freeze_vision_tower=true"],
        ["distributed.cp_size=1", "distributed.tp_size=2", "distributed.ep_size=2"],
        ["distributed.cp_size=1", "distributed.tp_size=2", "distributed.pp_size=2"],
    ],
)
def test_dry_run_is_what_ranks_hold(rank_pools, tiny, more):
    """Masters, moments and gradients of every rank after a step on four of them, to the byte."""
    overrides = [*tiny, MTP, "packed_sequence.pack_size=150", "step_scheduler.global_batch_size=8", *more]
    overrides += ["distributed.mp_policy.param_dtype=bfloat16", "rng.deterministic=false"]
    found = dry_run(load_recipe(CP2, overrides), 4)
    held = rank_pools(4).run(worker.held, CP2, overrides)
    assert [rank[0] for rank in held] == total(found.ranks, "masters")
    assert [rank[1] for rank in held] == total(found.ranks, "moments")
    assert [rank[2] for rank in held] == total(found.ranks, "gradients")
    assert found.largest[1] == max(rank[3] for rank in held) and found.at_once >= found.largest[1]
    assert sum(total(found.ranks, "masters")) == 4 * found.parameters
    frozen = found.ranks[0]["vision tower"].moments == 0
    parts = set().union(*found.ranks) if any("pp_size" in key for key in more) else set(found.ranks[0])
    assert parts == set(PARTS) and frozen == ("freeze_config.freeze_vision_tower=true" in more)


def test_dry_run_of_the_122b_on_128_ranks(capsys):
    """In well under two minutes, every byte is somewhere, and parts are as large as arithmetic says."""
    recipe = load_recipe(LARGE)
    found = dry_run(recipe, 128)
    assert found.seconds < 120 and len(found.ranks) == 128 and found.shape == (4, 32, 1, 1, 8)
    assert sum(total(found.ranks, "masters")) == sum(total(found.ranks, "gradients")) == 4 * found.parameters
    assert 125.0e9 < found.parameters < 125.2e9
    expert, width, hidden = 48 * 256 * 3, 1024, 3072
    for rank in found.ranks:
        assert rank["experts"].masters == expert * width * hidden * 4 // 128, "on each rank alike"
        assert 2 * rank["experts"].masters < rank["experts"].moments < 2 * rank["experts"].masters + 48 * 2 * 8
    assert found.ranks[0]["experts"].gathered == 256 // 8 * 3 * width * hidden * 2, "a layer's of one rank of ep, bf16"
    assert found.largest == ("embedding, head and final norm", 2 * (2 * 248320 * hidden + hidden))
    text = "\n".join(found.describe())
    assert "125,086,497,008 parameters on 128 ranks (dp 4 x cp 32), experts over 8" in text
    assert "a pack of 131,072 tokens, 4,096 a rank" in text and "0.000" not in text.split("MTP head")[1].split("\n")[0]


def test_dry_run_of_the_27b_over_tp_4_and_pp_4():
    """Of every weight each number is on one rank; stages differ by tower, embedding, head and prediction."""
    found = dry_run(load_recipe(TP4_PP4), 16)
    assert found.shape == (1, 1, 4, 4, 1) and found.kinds == 4 and found.microbatches == 16
    assert sum(total(found.ranks, "masters")) == 4 * found.parameters and 27.7e9 < found.parameters < 27.9e9
    held = total(found.ranks, "masters")
    assert all(len(set(held[first : first + 4])) == 1 for first in range(0, 16, 4)) and held[4] == held[8]
    first, inner, last = ({part for part, of in found.ranks[rank].items() if of.masters} for rank in (0, 4, 12))
    assert first == {"vision tower", "decoder", "embedding, head"} and inner == {"decoder"}
    assert last == {"decoder", "embedding, head", "MTP head"}
    decoder = {rank["decoder"].masters for rank in found.ranks}
    assert max(decoder) - min(decoder) <= 4 * 5120, "16 layers each, and the last norm"
    assert dry_run(load_recipe(TP4_PP4), 32).shape == (2, 1, 4, 4, 1)


def test_dry_run_of_megatron_fsdp():
    recipe = load_recipe(FRAMES, ["distributed.strategy=megatron_fsdp"])
    with pytest.raises(NotImplementedError, match="strategy=fsdp2 alone, found megatron_fsdp"):
        dry_run(recipe, 8)


def test_dry_run_of_the_4b_over_cp_2():
    found = dry_run(load_recipe(FRAMES), 8)
    assert found.shape == (4, 2, 1, 1, 1) and found.kinds == 1 and 4.6e9 < found.parameters < 4.7e9
    assert found.ranks[0]["embedding, head"].masters == 248320 * 2560 * 4 // 8, "the head is tied"


def test_dry_run_counts_what_ranks_would_read(tmp_path, tiny):
    """The headers of a directory tell, and its keys are accounted for."""
    mapping = {key: dict(value) for key, value in qwen3_5.CONFIGS["35B-A3B"].items() if isinstance(value, dict)}
    mapping["text_config"] |= {
        "num_hidden_layers": 2, "full_attention_interval": 2, "num_experts": 4, "vocab_size": 320, "hidden_size": 64,
        "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    }  # fmt: skip
    mapping["vision_config"] |= {"depth": 1, "hidden_size": 64, "num_heads": 2, "out_hidden_size": 64}
    model = qwen3_5.load({"model_type": "qwen3_5_moe", **mapping})
    model.save_pretrained(tmp_path)
    overrides = ["step_scheduler.global_batch_size=8", "distributed.cp_size=2", "distributed.ep_size=2"]
    recipe = load_recipe(LARGE, [*overrides, f"model.pretrained_model_name_or_path={tmp_path}"])
    found = dry_run(recipe, 8)
    whole = 4 * sum(p.numel() for p in model.parameters())
    assert whole < found.files < 1.01 * whole and len(found.reads) == found.kinds
    assert whole / 8.5 < min(found.reads) <= max(found.reads) < whole / 7.5
    assert any("GiB of the model's files, which hold" in line for line in found.describe())
    recipe.model.text_config = {"mtp_expert_hf_layout": "grouped"}
    with pytest.raises(ValueError, match=r"mtp_expert_hf_layout='grouped': the files of .* are split"):
        dry_run(recipe, 8)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([LARGE, "--world", "128"], "--world goes with --check"),
        ([LARGE, "--world", "8", "--check", "--nproc", "2"], "and not with --nproc"),
        ([LARGE, "--world", "100", "--check"], "distributed.ep_size=8, but 100 ranks were started"),
        (
            [LARGE, "--world", "128", "--check", "model.text_config={moe_intermediate_size: 9}"],
            "no multiple of the 16",
        ),
        ([LARGE, "--world", "4096", "--check", "distributed.ep_size=1"], "global_batch_size=4 is no multiple"),
        ([LARGE, "--world", "128", "--check", "model.text_config={num_experts: 12}"], "12 experts, no multiple of it"),
        ([LARGE, "--world", "128", "--check", "model.text_config={experts: 12}"], "unknown key"),
        ([LARGE, "--world", "128", "--check", "distributed.enable_compile=true"], "enable_compile=True is not"),
        ([LARGE, "--world", "128", "--check", "model.pretrained_model_name_or_path=x/y"], "'x/y': expected a local"),
        ([DIGITS, "--world", "2", "--check", "model.operators=patched"], "--world needs model.operators: automodel_c"),
    ],
)
def test_dry_run_refuses(capsys, arguments, words):
    assert main(["train", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error and "Traceback" not in error


def test_dry_run_from_the_command_line(capsys, tiny):
    arguments = [DIGITS, *tiny, "--check", "--world", "2", "distributed.defer_fsdp_grad_sync=true"]
    assert main(["train", *arguments]) == 0
    out = capsys.readouterr().out
    assert "recipe is fine" in out and "on 2 ranks (dp 2 x cp 1), 2 microbatches a step" in out
    assert "gradients wait for the last microbatch unsharded" in out


@pytest.mark.parametrize("frozen", ["false", "true"])
def test_dry_run_of_gradients_that_wait(tiny, frozen):
    """Whole and in float32, of what is trained alone."""
    more = ["distributed.defer_fsdp_grad_sync=true", f"freeze_config.freeze_vision_tower={frozen}"]
    found = dry_run(load_recipe(DIGITS, [*tiny, *more]), 2)
    assert found.whole_gradients == sum(total(found.ranks, "gradients"))
    assert (found.whole_gradients < 4 * found.parameters) == (frozen == "true")
