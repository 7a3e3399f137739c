import pytest
import torch
from PIL import Image

from automodel_c.data.collate import collate
from automodel_c.data.encode import encode_conversation


def _sample(processor, text, images=1):
    content = [{"type": "image", "image": "x"}] * images + [{"type": "text", "text": text}]
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "3"}]
    return encode_conversation(messages, [Image.new("RGB", (32, 32))] * images, processor)


def test_collate_pads_right(processor):
    samples = [_sample(processor, "a"), _sample(processor, "abcdef")]
    before = [{k: v.clone() for k, v in s.items()} for s in samples]
    batch = collate(samples, processor)
    lengths = [len(s["input_ids"]) for s in samples]
    assert batch["attention_mask"].sum(1).tolist() == lengths
    for row, sample in enumerate(samples):
        n = lengths[row]
        assert torch.equal(batch["input_ids"][row, :n], sample["input_ids"])
        assert torch.equal(batch["position_ids"][:, row, :n], sample["position_ids"])
        assert (batch["labels"][row, n:] == -100).all()
        assert all(torch.equal(v, sample[k]) for k, v in before[row].items()), "collate wrote to a sample"
    assert len(batch["pixel_values"]) == 32 and len(batch["image_grid_thw"]) == 2


def test_collate_without_padding(processor):
    assert collate([_sample(processor, "a")] * 2, processor)["attention_mask"] is None


def test_collate_without_images(processor):
    batch = collate([_sample(processor, "a", images=0)], processor)
    assert len(batch["input_ids"]) == 2 and (batch["labels"][1] == -100).all()
    assert batch["image_grid_thw"].tolist() == [[1, 2, 2]] and (batch["pixel_values"] == 0).all()


def test_collate_patch_count(processor):
    sample = _sample(processor, "a")
    sample["pixel_values"] = sample["pixel_values"][:-1]
    with pytest.raises(ValueError, match="sample 1 has 15 rows of pixel_values, its image_grid_thw asks for 16"):
        collate([_sample(processor, "a"), sample], processor)
