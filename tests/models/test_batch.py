"""What a batch may be: everything else is an error that names the key and both numbers."""

from types import SimpleNamespace

import pytest
import torch

from automodel_c.models import qwen3_5
from tests.models import packs
from tests.patch import models


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return qwen3_5.load(models.config("qwen3_5"))


def long(*values):
    return torch.tensor(values, dtype=torch.int64)


WRONG = {
    "a missing key": ({"input_ids": None}, ValueError, "input_ids is missing"),
    "no labels": ({"labels": None}, ValueError, "labels is missing"),
    "an unknown key": ({"image_grid_hws": long(1)}, ValueError, "unknown key batch.image_grid_hws.*image_grid_thw"),
    "a list": ({"input_ids": [1, 2]}, TypeError, "input_ids must be a tensor, not list"),
    "float ids": ({"input_ids": torch.zeros(42)}, TypeError, "input_ids is torch.float32"),
    "an id too large": ({"input_ids": torch.full((42,), 96)}, ValueError, r"input_ids\[0\] is 96, .* has 96 tokens"),
    "a negative id": ({"input_ids": -torch.ones(42).long()}, ValueError, r"input_ids\[0\] is -1"),
    "a batch axis": ({"input_ids": torch.zeros(1, 42).long()}, ValueError, "input_ids has 2 axes, 1 are needed"),
    "labels of another length": ({"labels": torch.zeros(41).long()}, ValueError, "labels has 41 tokens, .*has 42"),
    "float labels": ({"labels": torch.zeros(42)}, TypeError, "labels is torch.float32"),
    "offsets and ids": ({"doc_ids": torch.ones(42).long()}, ValueError, "one of cu_seqlens and doc_ids"),
    "offsets past the end": ({"cu_seqlens": long(0, 43)}, ValueError, "input_ids has 42 tokens, the pack ends at 43"),
    "ids of another length": (
        {"cu_seqlens": None, "doc_ids": torch.ones(41).long()}, ValueError, "has 42 tokens, the pack's doc_ids have 41",
    ),
    "positions of two axes": ({"position_ids": torch.zeros(2, 42).long()}, ValueError, "has 2 axes, 3 are needed"),
    "positions of another length": ({"position_ids": torch.zeros(3, 41).long()}, ValueError, "has 41 tokens, .*42"),
    "types of another length": ({"mm_token_type_ids": torch.zeros(41).long()}, ValueError, "has 41 tokens, .*42"),
    "types that disagree": (
        {"mm_token_type_ids": torch.zeros(42).long()}, ValueError, "marks 0 image tokens, input_ids has 12",
    ),
    "a row of pixels too few": (
        {"pixel_values": torch.zeros(47, 96)}, ValueError, "pixel_values has 47 rows, image_grid_thw asks for 48",
    ),
    "pixels without a grid": ({"image_grid_thw": None}, ValueError, "has 48 rows, image_grid_thw asks for 0"),
    "a grid without pixels": ({"pixel_values": None}, ValueError, "has 0 rows, image_grid_thw asks for 48"),
    "narrow pixels": ({"pixel_values": torch.zeros(48, 95)}, ValueError, "has 95 columns, a patch has 96"),
    "integer pixels": ({"pixel_values": torch.zeros(48, 96).long()}, TypeError, "pixel_values is torch.int64"),
    "an image too many": (
        {"image_grid_thw": long(1, 6, 8, 1, 2, 2).view(2, 3), "pixel_values": torch.zeros(52, 96)},
        ValueError, "input_ids has 12 image tokens, image_grid_thw asks for 13",
    ),
    "a video of nowhere": (
        {"video_grid_thw": long(1, 2, 2).view(1, 3), "pixel_values_videos": torch.zeros(4, 96)},
        ValueError, "input_ids has 0 video tokens, video_grid_thw asks for 1",
    ),
    "a grid of odd sides": (
        {"image_grid_thw": long(1, 3, 16).view(1, 3)}, ValueError, r"image_grid_thw\[0\] is \(1, 3, 16\)",
    ),
    "a grid of two columns": ({"image_grid_thw": long(6, 8).view(1, 2)}, ValueError, "has 2 columns, 3 are needed"),
    "an image across documents": (
        {"cu_seqlens": long(0, 20, 42)}, ValueError, "image_grid_thw asks for 12 image tokens at token 11",
    ),
    "a negative count": ({"num_label_tokens": -1}, ValueError, "num_label_tokens is -1"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_errors(model, name):
    changes, error, message = WRONG[name]
    batch = packs.pack([packs.document(10, ("image", 6, 8), 18, seed=1)])
    assert len(batch["input_ids"]) == 42
    with pytest.raises(error, match=message):
        model(batch | changes)


def test_a_batch_is_a_dict(model):
    with pytest.raises(TypeError, match="expected a dict, found Tensor"):
        model(torch.zeros(3))


def test_hooks_read_the_batch_and_may_give_another(model):
    batch, other = (packs.pack([packs.document(n, seed=n)]) for n in (9, 5))
    seen = []

    def hook(_, args):
        seen.append({**args[0]})
        return ({**other},)

    with model.register_forward_pre_hook(hook):
        loss = model(batch)[0]
    assert list(seen[0]) == list(batch) and seen[0]["input_ids"] is batch["input_ids"]
    assert torch.equal(loss, model(other)[0])


def test_image_tokens_in_padding_take_no_pixels(model):
    document = packs.document(10, ("image", 6, 8), 18, seed=1)
    padded = packs.pack([document], padding=4)
    assert (padded["input_ids"] == packs.IMAGE).sum() == 12 + 4
    expected = model(padded)[0]
    torch.testing.assert_close(expected, model(packs.pack([document]))[0])
    padded["input_ids"][-4:] = torch.tensor([-1, 10**9, 96, packs.VIDEO])
    assert torch.equal(model(padded)[0], expected)


def test_one_document_needs_no_description(model):
    batch = packs.pack([packs.document(12, seed=1)])
    expected = model(batch)[0]
    ids = torch.ones(12, dtype=torch.int32)
    for more in ({"cu_seqlens": None}, {"cu_seqlens": [0, 12]}, {"cu_seqlens": None, "doc_ids": ids}):
        assert torch.equal(model({**batch, **more})[0], expected)


def test_empty_media_are_none(model):
    batch = packs.pack([packs.document(12, seed=1)])
    empty = {"pixel_values": torch.zeros(0, 96), "image_grid_thw": torch.zeros(0, 3, dtype=torch.int64)}
    assert torch.equal(model({**batch, **empty})[0], model(batch)[0])


@pytest.mark.parametrize("options, error, message", [
    ({"cp": 2}, NotImplementedError, "cp=2: this model runs on one rank of cp"),
    ({"tp_size": 4}, NotImplementedError, "tp_size=4"),
    ({"ep": object()}, NotImplementedError, "one rank of ep"),
    ({"dtyp": torch.float32}, TypeError, "unexpected keyword argument 'dtyp'"),
    ({"dtype": torch.float16}, TypeError, "dtype is torch.float16"),
    ({"activation_checkpointing": "some"}, ValueError, "activation_checkpointing is 'some'"),
    ({"aux_loss": "sum"}, ValueError, "aux_loss is 'sum'"),
])  # fmt: skip
def test_options(options, error, message):
    with pytest.raises(error, match=message):
        qwen3_5.load(qwen3_5.CONFIGS["27B"], device="meta", **options)


def test_one_rank_is_no_parallelism():
    one, two = SimpleNamespace(ranks=1), SimpleNamespace(size=lambda: 2)
    config = qwen3_5.CONFIGS["35B-A3B"]
    qwen3_5.load(config, device="meta", cp=one, tp=1, ep_size=None, activation_checkpointing="full")
    with pytest.raises(NotImplementedError, match="runs on one rank of mesh so far"):
        qwen3_5.load(config, device="meta", cp=one, mesh=two)
