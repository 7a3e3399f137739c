"""A patched model's loss and gradients, by the error rule; of a pack, those of each document alone."""

import copy
import warnings

import pytest
import torch

import automodel_c
from automodel_c.data.collate import as_images
from automodel_c.data.positions import media_types
from tests.models.packs import compare
from tests.numerics import assert_as_good_as
from tests.patch import models

SEEDS = range(8)


@pytest.mark.parametrize(
    ("family", "make"),
    [("qwen3_5", models.uneven), ("qwen3_5_moe", models.uneven), ("qwen3_5", models.with_videos)],
)
def test_pack_equals_each_document_alone(family, make):
    documents = make()
    runs = {"truth": [], "naive": [], "alone": [], "pack": []}
    for seed in SEEDS:
        model = models.build(family, seed=seed)
        with models.Exact():
            runs["truth"].append(models.run_each(models.in_float64(model), documents))
        runs["naive"].append(models.run_each(model, documents))
        automodel_c.patch_transformers(model)
        runs["alone"].append(models.run_each(model, documents))
        runs["pack"].append(models.run(model, models.pack(documents)))
    for name in ("alone", "pack"):
        compare(runs[name], runs["naive"], runs["truth"], name)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_pack_of_videos_has_the_bits_of_their_frames_as_images(family):
    """Together with the rule on packs of images: each document of a pack of videos is as it is alone."""
    documents = [models.document(9, videos=[(2, 4, 4), (3, 2, 6)], seed=1), models.document(30, seed=2),
                 models.document(5, videos=[(1, 4, 2)], seed=3)]  # fmt: skip
    model = models.build(family)
    automodel_c.patch_transformers(model)
    batch = models.pack(documents)
    types = media_types(batch["input_ids"], models.IMAGE, models.VIDEO)
    nothing = {"pixel_values": torch.zeros(0, 96), "image_grid_thw": torch.zeros(0, 3, dtype=torch.int64)}
    images = as_images({**batch, **nothing, "mm_token_type_ids": types}, models.IMAGE)
    images = {key: images[key] for key in ("input_ids", "labels", "position_ids", "pixel_values", "image_grid_thw")}
    expected, found = models.run(model, images), models.run(model, batch)
    assert len(images["image_grid_thw"]) == 6 and "pixel_values" not in batch
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


def as_mask(documents, pad=0):
    """The pack with an indexed mask and padding in place of restarting positions."""
    batch = models.pack(documents)
    lengths = torch.tensor([len(d["input_ids"]) for d in documents])
    ids = torch.arange(1, len(documents) + 1).repeat_interleave(lengths)
    batch["attention_mask"] = ids[None]
    for key in ("input_ids", "labels", "position_ids", "attention_mask"):
        batch[key] = torch.nn.functional.pad(batch[key], (0, pad), value=-100 if key == "labels" else 0)
    return batch


def test_every_description_of_the_documents_gives_the_same_bits():
    documents = models.uneven()
    model = models.build()
    automodel_c.patch_transformers(model)
    batch = models.pack(documents)
    expected = models.run(model, batch)
    offsets = torch.tensor([0, *(len(d["input_ids"]) for d in documents)]).cumsum(0)
    mask = as_mask(documents)
    plain = {**batch, "position_ids": torch.cat([batch["position_ids"][:1] * 0 + 7, batch["position_ids"]])}
    plain["position_ids"][0, 0] = torch.cat([torch.arange(len(d["input_ids"])) for d in documents])
    for name, other in {
        "cu_seqlens": {**batch, "cu_seqlens": offsets.int()},
        "cu_seq_lens_q": {**batch, "cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 70},
        "indexed mask": mask,
        "four axes": plain,
    }.items():
        found = models.run(model, other)
        for key, value in expected.items():
            assert torch.equal(found[key], value), (name, key, (found[key] - value).abs().max())


def test_padding_changes_no_gradient_of_a_document_by_more_than_rounding():
    documents = models.uneven()
    model = models.build()
    with models.Exact():
        truth = models.run_each(models.in_float64(model), documents)
    naive = models.run_each(model, documents)
    automodel_c.patch_transformers(model)
    padded = as_mask(documents, pad=5)
    padded["labels"][:, -5:] = 3
    compare([models.run(model, padded)], [naive], [truth], "padded")


@pytest.mark.parametrize("text_only", [False, True])
def test_rows_with_padding_equal_transformers(text_only):
    """An ordinary batch: two rows, one of them padded, 0/1 mask."""
    documents = [models.document(12, seed=1), models.document(7, seed=2)]
    ids = torch.nn.utils.rnn.pad_sequence([d["input_ids"] for d in documents], batch_first=True)
    labels = torch.nn.utils.rnn.pad_sequence([d["labels"] for d in documents], batch_first=True, padding_value=-100)
    mask = torch.tensor([[1] * 12, [1] * 7 + [0] * 5])
    batch = {"input_ids": ids, "labels": labels, "attention_mask": mask}
    runs = {"truth": [], "naive": [], "ours": []}
    for seed in SEEDS:
        model = models.build(text_only=text_only, seed=seed)
        with models.Exact():
            runs["truth"].append(models.run(models.in_float64(model), batch))
        runs["naive"].append(models.run(model, batch))
        automodel_c.patch_transformers(model)
        runs["ours"].append(models.run(model, batch))
    compare(runs["ours"], runs["naive"], runs["truth"], "rows")


def test_auxiliary_loss_is_transformers_with_indexed_masks_too():
    """Asked for in the call: multimodal models of transformers 5.12 and 5.16 do not read it in their configuration."""
    model = models.build(output_router_logits=True)
    mask = as_mask([models.document(9, seed=1)], pad=3) | {"output_router_logits": True}
    naive, by_config = models.run(model, mask), model(**{**mask, "output_router_logits": None}).aux_loss
    automodel_c.patch_transformers(model)
    assert (model(**{**mask, "output_router_logits": None}).aux_loss is None) == (by_config is None)
    documents = [models.document(5, seed=1), models.document(4, seed=2)]
    both = model(**as_mask(documents, pad=3), output_router_logits=True)
    assert both.aux_loss is not None
    torch.testing.assert_close(models.run(model, mask)["loss"], naive["loss"])
    ones = as_mask(documents, pad=3)
    ones["cu_seqlens"] = torch.tensor([0, 5, 9])
    ones.pop("attention_mask")
    first = model(
        **{k: v[..., :9] for k, v in ones.items() if k != "cu_seqlens"}, cu_seqlens=ones["cu_seqlens"],
        output_router_logits=True,
    )  # fmt: skip
    torch.testing.assert_close(both.aux_loss, first.aux_loss)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_checkpointing_makes_every_layer_again_and_gives_the_same_bits(family):
    documents = models.uneven()
    model = models.build(family)
    automodel_c.patch_transformers(model)
    expected = models.run(model, models.pack(documents))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the name that transformers 5.12 knows
        model.gradient_checkpointing_enable({"use_reentrant": False})
    other = models.pack([models.document(6, seed=8), models.document(4, seed=9)])
    model.zero_grad()
    loss = model(**models.pack(documents)).loss
    model(**other).loss.backward()  # another forward and backward before this one's recomputation
    model.zero_grad()
    again = []
    for layer in model.model.language_model.layers:
        layer.mlp.register_forward_pre_hook(lambda module, args: again.append(module))
    loss.backward()
    assert again == [layer.mlp for layer in reversed(model.model.language_model.layers)]
    for name, p in model.named_parameters():
        grad = torch.zeros_like(p) if p.grad is None else p.grad
        assert torch.equal(grad, expected[name]), name


def test_bfloat16_follows_the_rule():
    documents = models.uneven()
    model = models.build("qwen3_5").bfloat16()
    with models.Exact():
        truth = models.run_each(models.in_float64(model), documents)["loss"]
    naive = models.run_each(model, documents)["loss"]
    automodel_c.patch_transformers(model)
    found = models.run(model, models.pack(documents))
    assert all(torch.isfinite(value).all() for value in found.values())
    assert_as_good_as(found["loss"], naive, truth, name="loss", dtype=torch.bfloat16)


def test_a_copy_of_a_patched_model_is_patched_and_its_own():
    model = models.build()
    automodel_c.patch_transformers(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.lm_head.weight.zero_()
    batch = models.pack(models.uneven())
    assert twin(**batch).loss != model(**batch).loss
    assert automodel_c.patch_transformers(twin).root is twin
