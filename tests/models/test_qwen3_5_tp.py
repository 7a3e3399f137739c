"""The model over gloo ranks that split its heads and widths: loss and every gradient are one rank's.

The error rule as in test_qwen3_5_cp.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from automodel_c.models.qwen3_5.config import read_config
from automodel_c.models.qwen3_5.tensor import head_style, plan_of
from automodel_c.parallel import TensorParallel
from tests.models import cp_worker, packs
from tests.models import tp_worker as worker
from tests.models.test_qwen3_5_cp import label_count, one_rank, plain, truth  # noqa: F401
from tests.models.test_qwen3_5_ep import check_unused, norms_of
from tests.numerics import assert_as_good_as, ulp_of
from tests.patch import models

CHOSEN = ("text", "clips", "tiny", "padding")  # the packs of a global batch
# model, (dp, cp, tp), how many of all ranks share experts
LAYOUTS = {
    "tp 2": ("dense", (1, 1, 2), 1),
    "tp 4": ("key heads", (1, 1, 4), 1),
    "dp 2 x tp 2": ("dense", (2, 1, 2), 1),
    "cp 2 x tp 2": ("dense", (1, 2, 2), 1),
    "experts, tp 2": ("experts", (1, 1, 2), 1),
    "experts, tp 2, ep 2": ("experts", (1, 1, 2), 2),
    "experts, dp 2 x tp 2, ep 2": ("experts", (2, 1, 2), 2),
    "experts, cp 2 x tp 2, ep 4": ("experts", (1, 2, 2), 4),
    "experts, dp 2 x tp 2": ("experts", (2, 1, 2), 1),
    "experts, one rank": ("experts", (1, 1, 1), 1),
    "experts, tp 4, ep 4": ("experts of key heads", (1, 1, 4), 4),
    "experts, tp 4, ep 2 x ep_shard 2": ("experts of key heads", (1, 1, 4), 2),
}
SEEDS = range(5)
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_and_gradients_are_one_ranks(rank_pools, plain, truth, layout):  # noqa: F811
    """And so is their norm, the same bits on every rank; gradients reduced in each microbatch or held."""
    name, shape, ep = LAYOUTS[layout]
    ranks = rank_pools(shape[0] * shape[1] * shape[2])
    results = ranks.run(worker.steps, name, SEEDS, shape, ep, CHOSEN, label_count(CHOSEN), checkpointing=True)
    found, norms = ([of_seed[i] for of_seed in results[0]] for i in (0, 1))
    naive, exact = ([of(name, seed, *CHOSEN) for seed in SEEDS] for of in (plain, truth))
    packs.compare(found, naive, exact, layout)
    for others in results[1:]:
        assert [other for _, other in others] == norms
    assert all(abs(a - b) <= ulp_of(float(b), "float32") for a, b in zip(norms, norms_of(found), strict=True))
    assert_as_good_as(torch.stack(norms), norms_of(naive).float(), norms_of(exact), name="norms")


@pytest.mark.parametrize(
    ("shape", "ep"), [((1, 1, 1), 1), ((1, 1, 2), 1), ((1, 1, 2), 2), ((2, 1, 2), 2), ((2, 1, 2), 4)]
)
def test_experts_without_a_token_and_ranks_with_padding_alone(rank_pools, shape, ep):
    """Gradients of such experts are 0, to the bit, and no other; the router's, of whom each rank sees other tokens, are
    summed once."""
    check_unused(rank_pools(shape[0] * shape[1] * shape[2]).run(worker.unused, shape, ep)[0])


@pytest.mark.parametrize("shape", [(1, 1, 2), (1, 2, 2)])
@pytest.mark.parametrize("pack", ["mixed", "gaps", "text"])
def test_logits_are_one_ranks(rank_pools, shape, pack):
    """On every rank, of all tokens or of some, whether or not the ranks divide the tokens."""
    rows = [5, 0, 17, 5]
    model = cp_worker.build("dense", 0)
    with torch.no_grad():
        expected = model.logits({k: v for k, v in cp_worker.PACKS[pack].items() if k != "labels"})
    for whole, some in rank_pools(shape[1] * shape[2]).run(worker.logits, "dense", shape, pack, rows):
        torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(some, whole[rows])


def test_parts_sum_to_one_ranks(ranks):
    """Without FSDP2: parts of losses and of gradients of whole weights sum over the ranks, and split weights' gradients
    are the slices; labels are counted once."""
    (ours, splits), (theirs, _) = found = ranks.run(worker.parts, "dense", (1, 1, 2), "clips")
    expected, metrics = one_rank("dense", 0, "clips")
    assert ours["label_tokens"] == theirs["label_tokens"] == metrics["label_tokens"]
    for key in ours.keys() - splits.keys() - {"label_tokens"}:
        close(ours[key] + theirs[key], expected[key] if key in expected else metrics[key], key)
    for _, split in found:
        for key, (tensor, offsets, shape) in split.items():
            whole = expected[key]
            assert tuple(whole.shape) == shape and tensor.numel() * 2 == whole.numel()
            close(tensor, whole[tuple(slice(o, o + n) for o, n in zip(offsets, tensor.shape, strict=True))], key)
    assert any(key.startswith("mtp.") for key in splits) and ours["loss"] != theirs["loss"]


def close(found, expected, key):
    """But for rounding, which tests above hold to the error rule."""
    error = (found - expected).norm() / expected.norm().clamp(min=1e-12)
    assert error < 1e-4, f"{key}: {error:.2e}"


def test_where_weights_lie(rank_pools):
    """Split weights over the ranks of tp and, in each, of dp; all others over all of them."""
    found = rank_pools(4).run(worker.places, (2, 1, 2))[0]
    names = {key: {name.rsplit(".", 2)[-2] for name in of} for key, of in found.items()}
    assert {mesh for _, mesh in names} == {4}
    rows = names.pop(("(_StridedShard(dim=0, sf=2), Shard(dim=0))", 4))
    assert rows == {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
    assert names.pop(("(Shard(dim=0), Shard(dim=1))", 4)) == {"o_proj", "down_proj"}
    ((placements, rest),) = names.items()
    assert placements == ("(Shard(dim=0),)", 4) and {"q_norm", "in_proj_qkv", "embed_tokens"} <= rest


def test_what_cannot_be_split_is_refused(ranks):
    plan = "model.language_model.layers.*.mlp.up_proj"
    calls = [
        ("qwen3_5", {"num_key_value_heads": 1}, {}),
        ("qwen3_5", {"intermediate_size": 49}, {}),
        ("qwen3_5", {}, {"tp_plan": {plan: "sideways"}}),
        ("qwen3_5", {}, {"tp_plan": {plan.replace("up", "ip"): "colwise"}}),
        ("qwen3_5", {}, {"tp_plan": {plan: "rowwise"}}),
        ("qwen3_5", {}, {"tp_plan": {plan: "replicated"}}),
        ("qwen3_5", {}, {"tp_plan": {"layers.*.linear_attn.out_proj": "rowwise"}}),
        ("qwen3_5_moe", {}, {"tp_plan": {"layers.*.mlp.experts": "moe_tp_experts"}}),
        ("qwen3_5", {}, {"tp_plan": {"lm_head": "rowwise"}}),
        ("qwen3_5", {"vocab_size": 257}, {"tp_plan": {"lm_head": "colwise"}}),
    ]
    for messages in ranks.run(worker.refused, calls):
        expected = [
            "ValueError: load: num_key_value_heads is 1, no multiple of the 2 ranks of tp",
            "ValueError: load: intermediate_size is 49, no multiple of the 2 ranks of tp",
            f"ValueError: tp_plan: unknown parallel style 'sideways' of {plan}; one of colwise, rowwise, replicated",
            "ValueError: unknown key tp_plan.layers.*.mlp.ip_proj; the nearest known key is tp_plan.layers.*.mlp.up_",
            f"ValueError: tp_plan: {plan} is 'rowwise'; it may be 'colwise', or whole",
            "ValueError: tp_plan: weights of mlp are split together or not at all, found {'gate_proj': 'colwise'",
            "ValueError: tp_plan: layers.*.linear_attn.out_proj is 'rowwise'; it may be whole",
            "ValueError: unknown key tp_plan.layers.*.mlp.experts",
            "ValueError: tp_plan: lm_head is 'rowwise'; it may be 'colwise', or whole",
            "ValueError: load: vocab_size is 257, no multiple of the 2 ranks of tp",
            "NotImplementedError: load: pp=PipelineParallel(rank=0, ranks=2, chunks=1): tie_word_embeddings is True",
            "ValueError: load: 4 layers cannot be cut into 5 stages of a pipeline",
            "NotImplementedError: load: pp=2: this model runs on one rank of pp so far",
            "ValueError: parallelize_qwen3_5: the model was loaded over 2 ranks of tp, the mesh has {'dp': 2, 'cp': 1}",
            "NotImplementedError: distributed.tp_size=2 is not supported for this model; only 1 is",
            "TypeError: TensorParallel: mesh must be a DeviceMesh or None, not int",
            "ValueError: TensorParallel: mesh has 3 dimensions, 1 is needed",
        ]
        for message, words in zip(messages, expected, strict=True):
            assert message is not None and message.startswith(words), (message, words)


def test_a_head_that_is_the_embedding_stays_whole():
    text = read_config(models.config("qwen3_5")).text
    assert plan_of(text, None, head_style(True, 256, TensorParallel()))["lm_head"] == "replicated"
    assert plan_of(text, None, head_style(False, 256, TensorParallel()))["lm_head"] == "replicated"
    asked = plan_of(text, {"lm_head": "colwise"}, head_style(False, 256, TensorParallel()))
    assert asked["lm_head"] == "colwise"
    with pytest.raises(ValueError, match="tp_plan: lm_head is 'colwise'; it may be whole"):
        plan_of(text, {"lm_head": "colwise"}, None)


@pytest.mark.parametrize("head", ["colwise", "replicated"])
def test_a_plan_that_splits_attention_alone(ranks, head):
    """Its MLPs are whole, and perhaps its head, and their gradients parts."""
    plan = {f"layers.*.mlp.{name}_proj": "replicated" for name in ("gate", "up", "down")} | {"lm_head": head}
    found = ranks.run(worker.steps, "dense", [0], (1, 1, 2), 1, ("clips",), label_count(("clips",)), tp_plan=plan)
    for key, value in found[0][0][0].items():
        close(value, one_rank("dense", 0, "clips")[0][key], key)


def test_collectives_are_fused_with_products():
    """Every gather and every sum, forward and backward, of an MLP and of attention's products."""
    done = subprocess.run([sys.executable, "-m", "tests.models.async_tp"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    fused = {"all_gather_matmul": 2, "matmul_reduce_scatter": 2}
    assert found == dict.fromkeys(
        ("mlp", "attention"), fused | {"all_gather_into_tensor": 0, "reduce_scatter_tensor": 0}
    )


def test_compiled_products_have_the_same_gradients(ranks):
    found = ranks.run(
        worker.compiled_steps, "dense", [0], (1, 1, 2), 1, ("clips", "text"), label_count(("clips", "text"))
    )
    for key, value in found[0][0][0].items():
        close(value, one_rank("dense", 0, "clips", "text")[0][key], key)


def test_products_that_are_compiled(ranks):
    for found, expected in zip(ranks.run(worker.products, True), ranks.run(worker.products, False), strict=True):
        for at, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            close(ours, theirs, at)


@pytest.mark.parametrize(
    ("name", "shape", "ep"), [("dense", (2, 1, 2), 1), ("experts", (1, 1, 2), 2), ("dense", (1, 1, 2), 1)]
)
def test_means_over_ranks(rank_pools, name, shape, ep):
    """Where FSDP2 takes means, a split weight's is over all ranks too, though fewer ranks reduce it."""
    found = rank_pools(shape[0] * shape[2]).run(worker.means, name, shape, ep, CHOSEN, label_count(CHOSEN))[0]
    for key, expected in one_rank(name, 0, *CHOSEN)[0].items():
        close(found[key], expected, key)
