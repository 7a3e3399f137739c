import numpy as np
import pytest
import torch
from PIL import Image

from automodel_c.data.clips import Clip
from automodel_c.data.collate import as_images, collate, collate_packed
from automodel_c.data.encode import encode_conversation
from automodel_c.data.packing import build_pack

ROWS = ("input_ids", "labels", "mm_token_type_ids")
MEDIA = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")


def _sample(processor, text, kinds=("image",)):
    """A conversation about images and clips of random pixels in the order of `kinds`."""
    pixels = np.random.default_rng(len(text)).integers(0, 256, (4, 32, 32, 3), dtype=np.uint8)
    content = [{"type": kind, kind: "x"} for kind in kinds] + [{"type": "text", "text": text}]
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "3"}]
    images = [Image.fromarray(pixels[i % 4]) for i in range(kinds.count("image"))]
    clips = [Clip(np.roll(pixels, i, 0), [0.25, 1.25]) for i in range(kinds.count("video"))]
    return encode_conversation(messages, images, processor, clips)


def _mixed(processor):
    return [
        _sample(processor, "a"),
        _sample(processor, "bc", ("video",)),
        _sample(processor, "", ()),
        _sample(processor, "def", ("video", "image", "video", "image")),
    ]


def test_collate_pads_right(processor):
    samples = _mixed(processor)
    before = [{k: v.clone() for k, v in s.items()} for s in samples]
    batch = collate(samples, processor)
    lengths = [len(s["input_ids"]) for s in samples]
    assert batch["attention_mask"].sum(1).tolist() == lengths
    for row, sample in enumerate(samples):
        n = lengths[row]
        for key in ROWS:
            assert torch.equal(batch[key][row, :n], sample[key])
        assert torch.equal(batch["position_ids"][:, row, :n], sample["position_ids"])
        assert (batch["labels"][row, n:] == -100).all() and (batch["mm_token_type_ids"][row, n:] == 0).all()
        assert all(torch.equal(v, sample[k]) for k, v in before[row].items()), "collate wrote to a sample"
    for key in MEDIA:
        assert torch.equal(batch[key], torch.cat([sample[key] for sample in samples]))
    assert len(batch["pixel_values"]) == 3 * 16 and len(batch["pixel_values_videos"]) == 3 * 32


def test_collate_without_padding(processor):
    assert collate([_sample(processor, "a")] * 2, processor)["attention_mask"] is None


def test_padding_is_told_by_lengths_never_by_ids(processor):
    """A token of the text that is the padding's stays a token, with its label."""
    samples = [_sample(processor, "a"), _sample(processor, "bc", ())]
    for sample in samples:
        sample["input_ids"][-2:] = sample["labels"][-2:] = processor.pad_token_id
    lengths = [len(sample["input_ids"]) for sample in samples]
    assert lengths[0] > lengths[1]
    for given in (samples, [build_pack([sample]) for sample in samples]):
        batch = collate(given, processor, **({"max_length": 60} if "doc_ids" in given[0] else {}))
        assert (batch["attention_mask"] > 0).sum(1).tolist() == lengths
        for row, n in enumerate(lengths):
            assert (batch["labels"][row, n - 2 : n] == processor.pad_token_id).all()
            assert (batch["labels"][row, n:] == -100).all()
    batch = collate_packed(samples, processor, max_length=60)
    assert batch["cu_seqlens"].tolist() == [0, lengths[0], sum(lengths)]
    assert (batch["labels"][: lengths[0]] != -100).sum() == (samples[0]["labels"] != -100).sum()


def test_collate_without_media(processor):
    batch = collate([_sample(processor, "a", ())], processor)
    assert len(batch["input_ids"]) == 2 and (batch["labels"][1] == -100).all()
    assert batch["image_grid_thw"].tolist() == [[1, 2, 2]] and (batch["pixel_values"] == 0).all()
    assert batch["mm_token_type_ids"][1, 0] == 1
    batch = collate([_sample(processor, "a", ("video",))], processor)
    assert len(batch["input_ids"]) == 1 and len(batch["pixel_values"]) == 0, "a video keeps the tower at work"


def test_collate_takes_the_types_that_a_sample_has(processor):
    sample = _sample(processor, "a", ("image", "video"))
    expected = sample.pop("mm_token_type_ids")
    assert torch.equal(collate([sample], processor)["mm_token_type_ids"][0], expected), "rebuilt from the ids"
    other = {**sample, "input_ids": torch.ones_like(expected), "mm_token_type_ids": expected}
    assert torch.equal(collate([other], processor)["mm_token_type_ids"][0], expected)
    with pytest.raises(ValueError, match="sample 0 has 2 mm_token_type_ids, its input_ids are"):
        collate([{**sample, "mm_token_type_ids": expected[:2]}], processor)


@pytest.mark.parametrize("function", [collate, collate_packed])
def test_collate_counts(processor, function):
    """Tokens, grids and patches that disagree are told before anything is put together."""
    good, video = _sample(processor, "a"), _sample(processor, "a", ("video",))
    short = {**good, "pixel_values": good["pixel_values"][:-1]}
    with pytest.raises(ValueError, match="sample 1 has 15 rows of pixel_values, its image_grid_thw asks for 16"):
        function([good, short], processor)
    short = {**video, "pixel_values_videos": video["pixel_values_videos"][:-1]}
    with pytest.raises(ValueError, match="has 31 rows of pixel_values_videos, its video_grid_thw asks for 32"):
        function([good, short], processor)
    rows = ("input_ids", "labels", "mm_token_type_ids", "position_ids")
    for sample, grid, kind, whole in ((good, "image_grid_thw", 1, 4), (video, "video_grid_thw", 2, 8)):
        last = int((sample["mm_token_type_ids"] == kind).nonzero()[-1])
        cut = {**sample, **{key: sample[key][..., :last] for key in rows}}
        message = f"sample 1 has {whole - 1} tokens for its {grid}, which asks for {whole}"
        with pytest.raises(ValueError, match=message):
            function([good, cut], processor)
    with pytest.raises(ValueError, match="sample 0 has 7 tokens for its video_grid_thw"):
        function([build_pack([good, cut])], processor)


def test_collate_packed(processor):
    samples = _mixed(processor)
    packs = [build_pack(samples[:2]), samples[2], build_pack(samples[3:])]
    lengths = [len(s["input_ids"]) for s in samples]
    ends = np.cumsum(lengths)
    for given, pad in ((samples, 0), (packs, 0), (packs, 5)):
        batch = collate_packed(given, processor, max_length=sum(lengths) + pad if pad else None)
        assert set(batch) == {*ROWS, "position_ids", "cu_seqlens", *MEDIA}
        assert batch["cu_seqlens"].dtype == torch.int32 and batch["cu_seqlens"].tolist() == [0, *ends]
        total = int(ends[-1])
        for key in ROWS:
            assert batch[key].shape == (total + pad,)
            assert torch.equal(batch[key][:total], torch.cat([s[key] for s in samples]))
        assert torch.equal(batch["position_ids"][:, :total], torch.cat([s["position_ids"] for s in samples], 1))
        assert (batch["input_ids"][total:] == processor.pad_token_id).all() and (batch["labels"][total:] == -100).all()
        assert (batch["position_ids"][:, total:] == 0).all() and (batch["mm_token_type_ids"][total:] == 0).all()
        for key in MEDIA:
            assert torch.equal(batch[key], torch.cat([s[key] for s in samples]))


def test_collate_packed_leaves_out_what_is_not_there(processor):
    batch = collate_packed([_sample(processor, "a", ())], processor)
    assert set(batch) == {*ROWS, "position_ids", "cu_seqlens"} and batch["cu_seqlens"][0] == 0
    assert set(collate_packed([_sample(processor, "a", ("video",))], processor)) & {*MEDIA} == {*MEDIA[2:]}


def test_collate_packed_refuses(processor):
    with pytest.raises(ValueError, match="samples is empty"):
        collate_packed([], processor)
    sample = _sample(processor, "a")
    n = len(sample["input_ids"])
    with pytest.raises(ValueError, match=f"max_length={2 * n - 1}, the samples have {2 * n} tokens"):
        collate_packed([sample, sample], processor, max_length=2 * n - 1)


def test_as_images_follows_the_tokens(processor):
    """Of every run of media tokens, the patches at its place are those that were its own."""
    batch = collate(_mixed(processor), processor)
    images = as_images(batch, processor.image_token_id)
    assert len(images["video_grid_thw"]) == len(images["pixel_values_videos"]) == 0
    assert images["image_grid_thw"].tolist() == [[1, 4, 4]] * (3 + 3 * 2)
    token = batch["mm_token_type_ids"] > 0
    assert torch.equal(images["mm_token_type_ids"], token.long())
    assert (images["input_ids"][token] == processor.image_token_id).all()
    assert torch.equal(images["input_ids"][~token], batch["input_ids"][~token])
    kinds = batch["mm_token_type_ids"][token].reshape(-1, 4)[:, 0].tolist()
    left = {1: batch["pixel_values"].split(16), 2: batch["pixel_values_videos"].split(16)}
    left = {kind: iter(parts) for kind, parts in left.items()}
    for kind, found in zip(kinds, images["pixel_values"].split(16), strict=True):
        assert torch.equal(found, next(left[kind]))
    assert "pixel_values_videos" in batch and len(batch["video_grid_thw"]) == 3, "the batch is as it was"
    plain = collate([_sample(processor, "a")], processor)
    assert as_images(plain, processor.image_token_id) is plain
