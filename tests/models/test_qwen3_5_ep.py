"""The model with experts that several gloo ranks share: loss and every gradient are one rank's; files and checkpoints.

The error rule as in test_qwen3_5_cp.
"""

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import MixedPrecisionPolicy

from automodel_c.models import qwen3_5
from automodel_c.parallel.experts import expert_range
from tests.models import cp_worker, packs
from tests.models import ep_worker as worker
from tests.models.cp_worker import PACKS
from tests.models.test_qwen3_5_cp import label_count, one_rank, plain, trained, truth  # noqa: F401
from tests.numerics import assert_as_good_as, ulp_of
from tests.patch import models
from tests.ranks import RanksFailed

CHOSEN = ("text", "clips", "tiny", "padding")  # the packs of a global batch
# (dp, cp), how many of all ranks share experts
LAYOUTS = {
    "one rank": ((1, 1), 1),
    "dp 2, ep 2": ((2, 1), 2),
    "cp 2, ep 2": ((1, 2), 2),
    "dp 2 x cp 2, ep 2 x ep_shard 2": ((2, 2), 2),
    "dp 4, ep 2 x ep_shard 2": ((4, 1), 2),
    "dp 2 x cp 2, ep 4": ((2, 2), 4),
}
layouts = pytest.mark.parametrize("layout", LAYOUTS)
SEEDS = range(3)  # of one model, one kind of parameter in twenty has an unlucky largest element


def ranks_of(layout):
    (dp, cp), _ = LAYOUTS[layout]
    return dp * cp


@layouts
def test_loss_and_gradients_are_one_ranks(rank_pools, plain, truth, layout):  # noqa: F811
    """And so is their norm, the same bits on every rank."""
    results = rank_pools(ranks_of(layout)).run(worker.steps, SEEDS, *LAYOUTS[layout], CHOSEN, label_count(CHOSEN))
    found, norms = ([of_seed[i] for of_seed in results[0]] for i in (0, 1))
    naive, exact = ([of("experts", seed, *CHOSEN) for seed in SEEDS] for of in (plain, truth))
    packs.compare(found, naive, exact, layout)
    for others in results[1:]:
        assert [other for _, other in others] == norms
    assert all(abs(a - b) <= ulp_of(float(b), "float32") for a, b in zip(norms, norms_of(found), strict=True))
    assert_as_good_as(torch.stack(norms), norms_of(naive).float(), norms_of(exact), name="norms")


def norms_of(draws):
    """float64 [n]: the norm of all gradients of each."""
    return torch.stack([torch.stack([v.double().norm() for k, v in of.items() if k != "loss"]).norm() for of in draws])


@pytest.mark.parametrize("name", ["experts", "frozen"])
@pytest.mark.parametrize("layout", ["dp 2, ep 2", "dp 4, ep 2 x ep_shard 2"])
def test_means_over_ranks(rank_pools, layout, name):
    """Where FSDP2 takes means, an expert's is over all ranks too, though fewer ranks reduce it."""
    found = rank_pools(ranks_of(layout)).run(worker.means, name, *LAYOUTS[layout], CHOSEN, label_count(CHOSEN))[0]
    for key, expected in trained(name, one_rank(name, 0, *CHOSEN)[0]).items():
        error = (found[key] - expected).norm() / expected.norm().clamp(min=1e-12)
        assert error < 1e-4, f"{key}: {error:.2e}"


def test_bf16_over_fp32_masters(ranks):
    """As near to one rank's float32 as ranks that hold every expert; gradients are held until the last microbatch."""
    seeds, count = range(12), label_count(CHOSEN)  # of the loss, one number a model, five are too few
    found, naive = (ranks.run(worker.in_bf16, seeds, (2, 1), ep, CHOSEN, count)[0] for ep in (2, 1))
    exact = [{k: x.double() for k, x in one_rank("experts", seed, *CHOSEN)[0].items()} for seed in seeds]
    packs.compare(found, naive, exact, "bf16")


@pytest.mark.parametrize("ep", [1, 2])
@pytest.mark.parametrize("held", [False, True], ids=["each microbatch", "held"])
def test_float32_gradients_of_experts(ranks, ep, held):
    """As near to float32 as those that are rounded for each microbatch, and nearer where that is what is left of the
    error: the experts' own, of one layer's last products."""
    seeds, count = range(4), label_count(CHOSEN)
    run = lambda **options: ranks.run(worker.in_bf16, seeds, (2, 1), ep, CHOSEN, count, held, **options)[0]  # noqa: E731
    found, naive = run(fp32_expert_grads=True), run()
    exact = [{k: x.double() for k, x in one_rank("experts", seed, *CHOSEN)[0].items()} for seed in seeds]
    packs.compare(found, naive, exact, "fp32")
    for ours, theirs in zip(found, naive, strict=True):
        assert torch.equal(ours["loss"], theirs["loss"])
        for key, wide in ours.items():
            if ".experts." not in key:
                assert torch.equal(wide, theirs[key]), key
            else:
                assert (wide != theirs[key]).any() and (wide - theirs[key]).norm() < 0.01 * wide.norm(), key


def test_float32_gradients_of_what_has_none(rank_pools):
    for message in rank_pools(1).run(worker.not_wide)[0]:
        assert message.startswith("ValueError: parallelize_qwen3_5: fp32_expert_grads: ")


@pytest.mark.parametrize(("ranks", "ep"), [(1, 1), (2, 1), (2, 2)])
def test_bf16_weights_and_float32_gates(rank_pools, ranks, ep):
    for (loss, grads), (sharded, theirs) in rank_pools(ranks).run(worker.of_bf16_weights, (ranks, 1), ep):
        assert torch.equal(sharded, loss)
        assert {key: x.dtype for key, x in theirs.items()} == {key: x.dtype for key, x in grads.items()}
        assert {x.dtype for x in theirs.values()} == {torch.float32, torch.bfloat16}
        assert ranks > 1 or all(torch.equal(theirs[key], x) for key, x in grads.items())


@pytest.mark.parametrize("ep", [1, 2])
def test_an_output_dtype_is_that_of_the_outputs_alone(ranks, ep):
    for found in ranks.run(worker.outputs, (2, 1), ep):
        without = found.pop(None)
        assert all(x.dtype == torch.float32 for x in without)
        for dtype, (loss, aux, grad) in found.items():
            assert torch.equal(loss, without[0].to(dtype)) and torch.equal(aux, without[1].to(dtype))
            assert torch.equal(grad, without[2])


@pytest.mark.parametrize("layout", ["dp 2, ep 2", "cp 2, ep 2"])
def test_recomputation_and_another_forward_change_no_bit_and_move_no_rows(rank_pools, layout):
    rank_pools(2).run(worker.bits, *LAYOUTS[layout], "mixed", "clips")


@pytest.mark.parametrize("layout", ["dp 2, ep 2", "dp 2 x cp 2, ep 4"])
def test_experts_without_a_token_and_ranks_with_padding_alone(rank_pools, layout):
    """Gradients of such experts are 0, to the bit, and no other; the rest are those of the ranks that have tokens."""
    check_unused(rank_pools(ranks_of(layout)).run(worker.unused, *LAYOUTS[layout])[0])


def test_float32_gradients_of_experts_without_a_token(ranks):
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    found, rounded = (
        ranks.run(worker.unused, (2, 1), 2, mp_policy=policy, fp32_expert_grads=wide)[0] for wide in (True, False)
    )
    assert all(torch.equal(x, rounded[key]) for key, x in found.items() if ".experts." not in key)
    check_unused({key: x for key, x in found.items() if ".experts." in key}, 0.1)


def check_unused(found, tolerance=1e-4):
    """Gradients are one rank's, and 0 where its are."""
    model = cp_worker.build("experts", 0)
    model.zero_grad(set_to_none=True)
    model({**PACKS["tiny"], "num_label_tokens": 4})[0].backward()
    empty = 0
    for key, p in ((key, p) for key, p in model.named_parameters() if key in found):
        error = (found[key] - p.grad).norm() / p.grad.norm().clamp(min=1e-12)
        assert error < tolerance, f"{key}: {error:.2e}"
        if ".experts." in key:
            without = [~x.flatten(1).any(1) for x in (p.grad, found[key])]
            assert torch.equal(*without), key
            empty += int(without[0].sum())
    assert empty > 0


@pytest.mark.parametrize("style", ["split", "grouped"])
def test_a_rank_reads_and_writes_its_own_experts(ranks, tmp_path, style):
    """Every rank reads its experts alone; the ranks write what they read, sharded by FSDP2 or not."""
    torch.manual_seed(3)
    mapping = models.config().to_dict()
    mapping["text_config"]["mtp_num_hidden_layers"] = 1
    model = qwen3_5.load(mapping)
    model.save_pretrained(tmp_path / "in", experts=style)
    whole = worker.experts_of(model)
    for rank, (experts, seen) in enumerate(ranks.run(worker.read, str(tmp_path / "in"), 2)):
        mine = slice(*expert_range(4, 2, rank))
        assert experts.keys() == whole.keys()
        assert all(torch.equal(part, whole[key][mine]) for key, part in experts.items())
        shapes = [shape for _, shape in seen]
        assert sum(torch.Size(shape).numel() for shape in shapes) == sum(p.numel() for p in whole.values()) // 2
        if style == "split":
            assert {int(key.split(".experts.")[1].split(".")[0]) for key, _ in seen} == set(range(4)[mine])
    states = ranks.run(worker.write, str(tmp_path / "in"), str(tmp_path / "out"), 2)
    assert states[1] == {} and all(torch.equal(states[0][key], p) for key, p in model.state_dict().items())
    written, given = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "in"))
    assert written.keys() == given.keys() and all(torch.equal(written[key], given[key]) for key in given)


def test_ranks_that_cannot_write_all_say_so(ranks, tmp_path):
    """Only the first one writes; the others do not wait for what does not come."""
    qwen3_5.load(models.config()).save_pretrained(tmp_path / "in")
    (tmp_path / "file").touch()
    found = ranks.run(worker.does_not_write, str(tmp_path / "in"), str(tmp_path / "file" / "out"), 2, timeout=30)
    for rank, (said, count) in enumerate(found):
        assert said[0].startswith("RankFailure: rank 0 failed: NotADirectoryError" if rank else "NotADirectoryError")
        assert said[1].startswith("ValueError: save: the weights are shards") and "export_hf" in said[1]
        assert count == 2


def test_equal_seeds_draw_equal_experts(rank_pools):
    torch.manual_seed(5)
    whole, number = worker.experts_of(qwen3_5.load(models.config().to_dict())), torch.rand(())
    for rank, (experts, after) in enumerate(rank_pools(4).run(worker.drawn, 2)):
        mine = slice(*expert_range(4, 2, rank % 2))
        assert all(torch.equal(part, whole[key][mine]) for key, part in experts.items()) and after == number


@pytest.mark.filterwarnings("ignore")  # torch's checkpoint code warns of itself when it saves and loads
def test_a_checkpoint_goes_to_any_number_of_ranks(rank_pools, tmp_path):
    """From dp 2 with ep 2 to four ranks with ep 2 and 4, and to one: weights and moments are the same bits, and
    training goes on as it would have."""
    saved, losses = rank_pools(2).run(worker.save, str(tmp_path), (2, 1), 2)[0]
    for shape, ep in (((4, 1), 2), ((2, 2), 4), ((1, 1), 1)):
        found, later = rank_pools(shape[0] * shape[1]).run(worker.resume, str(tmp_path), shape, ep)[0]
        assert found.keys() == saved.keys()
        for key, tensors in saved.items():
            assert all(torch.equal(a, b) for a, b in zip(tensors, found[key], strict=True)), (shape, ep, key)
        torch.testing.assert_close(torch.stack(later), torch.stack(losses), rtol=1e-5, atol=0)


def test_where_weights_lie(rank_pools):
    experts, rest, shapes = rank_pools(4).run(worker.placements, (2, 2), 2)[0]
    assert [str(p) for p in experts] == ["(Shard(dim=1), Shard(dim=0))"]
    assert [str(p) for p in rest] == ["(Shard(dim=0),)"]
    assert shapes == {(2, 16, 32), (2, 16, 16)}


@pytest.mark.parametrize(
    ("family", "text", "ranks", "ep", "words"),
    [
        ("qwen3_5_moe", {"num_experts": 5}, 2, 2, "load: num_experts is 5, no multiple of the 2 ranks of ep_group"),
        ("qwen3_5", {}, 2, 2, "load: ep_group has 2 ranks, the model has no experts"),
        ("qwen3_5_moe", {"hidden_size": 33}, 4, 2, "dim 1 of experts.down_proj is 33, no multiple of the 2 ranks"),
    ],
)
def test_models_that_ranks_cannot_share(rank_pools, family, text, ranks, ep, words):
    mapping = models.config(family).to_dict()
    mapping["text_config"] |= text
    mapping["vision_config"]["out_hidden_size"] = mapping["text_config"]["hidden_size"]
    for message in rank_pools(ranks).run(worker.refused, (ranks, 1), ep, mapping):
        assert message.startswith("ValueError") and words in message


def test_meshes_that_do_not_fit_the_model(ranks):
    for messages in ranks.run(worker.misfits):
        assert "loaded over 2 ranks of ep_group, moe_mesh has {}" in messages[0]
        assert "loaded over 1 ranks of ep_group, moe_mesh has {'ep_shard': 1, 'ep': 2}" in messages[1]
        assert "moe_mesh has dimensions ('dp', 'cp'), ('ep_shard', 'ep') is needed" in messages[2]
        assert "moe_mesh is over ranks [1, 0], mesh over [0, 1]" in messages[3]
        assert messages[4].startswith("NotImplementedError: distributed.ep_size=2 is not supported for this model")
        assert messages[5].startswith("TypeError: load: ep_group must be a process group or None, not int")
        assert messages[6].startswith("ValueError") and "mesh_dim_names is missing" in messages[6]


def test_a_model_over_other_ranks_than_its_mesh(rank_pools):
    for rank, messages in enumerate(rank_pools(4).run(worker.other_neighbours)):
        row, group = ([0, 1], [2, 3])[rank // 2], ([0, 2], [1, 3])[rank % 2]
        for name, message in zip(("ep", "cp"), messages, strict=True):
            assert message == (
                f"ValueError: parallelize_qwen3_5: {name} of the mesh has ranks {row}, the model's group has {group}"
            )


@pytest.mark.parametrize("case", ["missing", "left over", "grouped"])
def test_other_ranks_experts_are_accounted_for(ranks, tmp_path, case):
    qwen3_5.load(models.config()).save_pretrained(tmp_path, experts="grouped" if case == "grouped" else "split")
    tensors, layer = load_file(tmp_path / "model.safetensors"), "model.language_model.layers.0.mlp.experts"
    if case == "missing":
        words = f"missing: {layer}.3.up_proj.weight"
        del tensors[f"{layer}.3.up_proj.weight"]
    elif case == "left over":
        words = f"not the model's: {layer}.4.up_proj.weight"
        tensors[f"{layer}.4.up_proj.weight"] = torch.zeros(16, 32)
    else:
        words = f"{layer}.down_proj has shape [3, 32, 16] in model.safetensors, the model needs [4, 32, 16]"
        tensors[f"{layer}.down_proj"] = tensors[f"{layer}.down_proj"][:3].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(RanksFailed) as failed:
        ranks.run(worker.read, str(tmp_path), 2)
    assert sorted(failed.value.reports) == [0, 1]
    assert all(words in text for text in failed.value.reports.values())


def test_a_rank_that_fails_in_a_layer_makes_all_raise(rank_pools):
    with pytest.raises(RanksFailed) as failed:
        rank_pools(4).run(worker.fails, (2, 2), 2, 3, timeout=40, grace=25)
    assert sorted(failed.value.reports) == [0, 1, 2, 3]
    for rank, text in failed.value.reports.items():
        assert "the layer's own" in text and (rank == 3 or "RankFailure: rank 3" in text)


def test_a_bad_batch_is_raised_on_all_that_share_experts(rank_pools):
    with pytest.raises(RanksFailed) as failed:
        rank_pools(2).run(worker.fails_alone, 1, timeout=30, grace=20)
    assert sorted(failed.value.reports) == [0, 1]
    assert all("image_grid_thw asks for" in text for text in failed.value.reports.values())
