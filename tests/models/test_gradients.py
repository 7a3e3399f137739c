"""Loss and every gradient against transformers, by the error rule: its float32 is the twin, its float64 the truth."""

import copy

import pytest
import torch

from automodel_c.data.positions import pack_positions
from automodel_c.models import qwen3_5
from tests.models import packs
from tests.numerics import assert_as_good_as
from tests.patch import models

FAMILIES = ["qwen3_5", "qwen3_5_moe"]
SEEDS = range(2)


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_transformers(tmp_path, family):
    """Of packs, of each document alone, and of packs with padding."""
    runs = {name: [] for name in ("truth", "naive", "pack", "alone", "padded")}
    for seed in SEEDS:
        reference, model = packs.checkpoint(tmp_path / str(seed), family, seed=seed)
        exact = models.in_float64(reference)
        for documents in packs.PACKS.values():
            with models.Exact():
                runs["truth"].append(packs.theirs(exact, documents))
            runs["naive"].append(packs.theirs(reference, documents))
            runs["pack"].append(packs.ours(model, packs.pack(documents)))
            runs["alone"].append(packs.ours_alone(model, documents))
            runs["padded"].append(packs.ours(model, packs.pack(documents, padding=3)))
    for name in ("pack", "alone", "padded"):
        packs.compare(runs[name], runs["naive"], runs["truth"], name)


@pytest.mark.parametrize("family", FAMILIES)
def test_few_labels(tmp_path, family):
    """The last layer's MLP, the norm and the head see rows with a label alone."""
    documents, seen = [dict(d) for d in packs.PACKS["mixed"]], []
    for d in documents:
        d["labels"] = d["labels"].clone()
        d["labels"][:-3] = -100
    runs = {name: [] for name in ("truth", "naive", "pack", "padded")}
    for seed in SEEDS:
        reference, model = packs.checkpoint(tmp_path / str(seed), family, seed=seed)
        model.model.language_model.norm.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
        with models.Exact():
            runs["truth"].append(packs.theirs(models.in_float64(reference), documents))
        runs["naive"].append(packs.theirs(reference, documents))
        runs["pack"].append(packs.ours(model, packs.pack(documents)))
        runs["padded"].append(packs.ours(model, packs.pack(documents, padding=3)))
    assert set(seen) == {packs.label_count(documents)}
    for name in ("pack", "padded"):
        packs.compare(runs[name], runs["naive"], runs["truth"], name)


def test_given_positions_are_taken(tmp_path):
    documents = packs.PACKS["mixed"]
    _, model = packs.checkpoint(tmp_path, "qwen3_5")
    batch = packs.pack(documents)
    types = (batch["input_ids"] == packs.IMAGE).int() + 2 * (batch["input_ids"] == packs.VIDEO).int()
    expected = model({**batch, "mm_token_type_ids": types})[0]
    docs = torch.stack([batch["cu_seqlens"][:-1], batch["cu_seqlens"][1:]], 1).numpy()
    positions = pack_positions(types.numpy(), docs, batch["image_grid_thw"], batch["video_grid_thw"], 2, "test")
    assert torch.equal(model({**batch, "position_ids": torch.from_numpy(positions)})[0], expected)
    assert not torch.equal(model({**batch, "position_ids": torch.from_numpy(positions * 3)})[0], expected)


def test_auxiliary_loss_is_transformers(tmp_path):
    documents = [packs.document(30, ("image", 4, 4), 9, seed=1)]
    runs = {name: [] for name in ("truth", "naive", "pack")}
    for seed in range(8):
        options = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
        reference, model = packs.checkpoint(tmp_path / str(seed), "qwen3_5_moe", seed=seed, **options)
        if reference(**packs.as_row(documents[0])).aux_loss is None:
            pytest.skip("this version of transformers makes no auxiliary loss where only the configuration asks for it")
        with models.Exact():
            runs["truth"].append(packs.theirs(models.in_float64(reference), documents))
        runs["naive"].append(packs.theirs(reference, documents))
        runs["pack"].append(packs.ours(model, packs.pack(documents)))
        assert model(packs.pack(documents))[1]["aux_loss"] > 1
    packs.compare(runs["pack"], runs["naive"], runs["truth"], "auxiliary loss")


def test_auxiliary_loss_sees_real_tokens_and_its_option(tmp_path):
    _, model = packs.checkpoint(tmp_path, "qwen3_5_moe")
    documents = packs.PACKS["mixed"]
    batch = packs.pack(documents)
    loss, metrics = model(batch)
    assert metrics["aux_loss"] == 0 and loss == metrics["lm_loss"]
    model.aux_loss = "transformers"
    joined, metrics = model(batch)
    torch.testing.assert_close(joined, loss + 0.001 * metrics["aux_loss"])
    torch.testing.assert_close(model(packs.pack(documents, padding=3))[1]["aux_loss"], metrics["aux_loss"])
    one = qwen3_5.load(models.config("qwen3_5_moe", num_hidden_layers=1), aux_loss="per_layer")
    per_layer = one(batch)[1]["aux_loss"]
    one.aux_loss = "transformers"
    torch.testing.assert_close(one(batch)[1]["aux_loss"], 2 * per_layer)  # top_k times the layer's own
    model.aux_loss = "per_layer"
    with torch.no_grad():
        for layer in model.model.language_model.layers:
            layer.mlp.gate.weight.zero_()
    # equal probabilities: 1 a layer whatever the choice
    torch.testing.assert_close(model(batch)[1]["aux_loss"], torch.tensor(4.0))


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpointing_gives_the_same_bits(tmp_path, family):
    _, model = packs.checkpoint(tmp_path, family)
    batch = packs.pack(packs.PACKS["mixed"], padding=2)
    expected = packs.ours(model, batch)
    for value in (True, "full", "selective"):
        again = qwen3_5.load(tmp_path, activation_checkpointing=value)
        loss, _ = again(batch)
        again(packs.pack(packs.PACKS["text"]))[0].backward()  # before the first one's recomputation
        again.zero_grad()
        loss.backward()
        found = {"loss": loss.detach(), **packs.gradients(again)}
        for name, value in expected.items():
            assert torch.equal(found[name], value), name


def test_checkpointing_keeps_less(tmp_path):
    batch = packs.pack(packs.PACKS["mixed"])

    def kept(**options):
        model, total = qwen3_5.load(models.config(), **options), 0
        parameters = {p.data_ptr() for p in model.parameters()}

        def pack_hook(x):
            nonlocal total
            total += 0 if x.data_ptr() in parameters else x.numel()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack_hook, lambda x: x):
            model(batch)
        return total

    assert kept(activation_checkpointing=True) < kept() / 3


def test_without_media_the_tower_has_gradients_of_zero(tmp_path):
    _, model = packs.checkpoint(tmp_path, "qwen3_5_moe")
    documents = packs.PACKS["text"]
    loss, _ = model(packs.pack(documents))
    loss.backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert ("visual" in name) == (not p.grad.any()), name


def test_the_batch_is_as_it_was(tmp_path):
    _, model = packs.checkpoint(tmp_path, "qwen3_5_moe")
    batch = packs.pack(packs.PACKS["mixed"], padding=2)
    before = copy.deepcopy(batch)
    model(batch)[0].backward()
    assert batch.keys() == before.keys()
    assert all(torch.equal(batch[key], before[key]) and batch[key].dtype == before[key].dtype for key in batch)


def test_neighbours_and_padding_change_no_bit():
    model = qwen3_5.load(models.config("qwen3_5"))
    first, other, third = packs.document(20, seed=1), packs.document(33, seed=2), packs.document(33, seed=3)
    rows = range(20)
    with torch.no_grad():
        expected = model.logits(packs.pack([first, other], padding=2), rows)
        found = model.logits(packs.pack([first, third], padding=2), rows)
    assert torch.equal(found, expected)


def test_num_label_tokens_divides(tmp_path):
    _, model = packs.checkpoint(tmp_path, "qwen3_5")
    batch = packs.pack(packs.PACKS["text"])
    loss, metrics = model(batch)
    count = int(metrics["label_tokens"])
    assert count == packs.label_count(packs.PACKS["text"])
    for given in (4 * count, torch.tensor(4 * count)):
        torch.testing.assert_close(model({**batch, "num_label_tokens": given})[0], loss / 4)
    nothing = {**batch, "labels": torch.full_like(batch["labels"], -100)}
    found = packs.ours(model, nothing)
    assert not any(value.any() for value in found.values())


@pytest.mark.parametrize("tokens", [0, 1])
def test_packs_of_nothing(tmp_path, tokens):
    _, model = packs.checkpoint(tmp_path, "qwen3_5_moe")
    batch = {
        "input_ids": torch.zeros(tokens, dtype=torch.int64),
        "labels": torch.full((tokens,), -100),
        "cu_seqlens": torch.tensor([0, 0, 0]),
    }
    loss, metrics = model(batch)
    loss.backward()
    assert loss == 0 and metrics["label_tokens"] == 0
    assert not any(p.grad.any() for p in model.parameters())


def test_bfloat16_is_finite_and_the_gates_stay_float32(tmp_path):
    documents, found, naive, truth = packs.PACKS["mixed"], [], [], []
    for seed in SEEDS:
        reference, _ = packs.checkpoint(tmp_path, "qwen3_5", seed=seed)
        model = qwen3_5.load(tmp_path, dtype=torch.bfloat16)
        plain = copy.deepcopy(reference).bfloat16()
        for name, p in model.named_parameters():
            expected = torch.float32 if name.endswith(("A_log", "dt_bias")) else torch.bfloat16
            assert p.dtype == expected, name
        run = packs.ours(model, packs.pack(documents))
        assert all(torch.isfinite(value).all() for value in run.values())
        assert all(p.grad.dtype == p.dtype for p in model.parameters())
        with models.Exact():
            truth.append(packs.theirs(models.in_float64(plain), documents)["loss"])
        naive.append(packs.theirs(plain, documents)["loss"].float())
        found.append(run["loss"])
    assert_as_good_as(*map(torch.stack, (found, naive, truth)), name="loss", dtype=torch.bfloat16)


def test_casts_leave_the_gates_alone():
    model = qwen3_5.load(models.config())
    gate = model.model.language_model.layers[0].linear_attn
    before = gate.A_log.detach().clone()
    model.to(torch.bfloat16)
    assert model.lm_head.weight.dtype == torch.bfloat16 and gate.dt_bias.dtype == torch.float32
    assert torch.equal(gate.A_log, before)
    model.to("meta", torch.float32)
    assert gate.A_log.is_meta and model.lm_head.weight.dtype == torch.float32


def test_logits_of_chosen_rows(tmp_path):
    reference, model = packs.checkpoint(tmp_path, "qwen3_5_moe")
    documents = packs.PACKS["images"]
    batch = packs.pack(documents)
    batch.pop("labels")
    with torch.no_grad():
        whole = model.logits(batch)
        theirs = torch.cat([reference(**packs.as_row(d)).logits[0] for d in documents])
        torch.testing.assert_close(whole, theirs, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(model.logits(batch, [3, 0]), whole[[3, 0]])
