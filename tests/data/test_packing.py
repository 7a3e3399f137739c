import pytest
import torch

from automodel_c.data.collate import collate
from automodel_c.data.packing import PackedDataset, build_pack, build_packs, knapsack, shift_sample
from automodel_c.models.patch.documents import find_documents
from automodel_c.recipes.schema import PackedSequence

IMAGE, VIDEO = 90, 91


@pytest.mark.parametrize(
    ("lengths", "capacity", "expected"),
    [
        ([9, 1, 8, 2, 7, 3], 10, [[0, 1], [2, 3], [4, 5]]),
        ([3, 2, 4, 1], 5, [[2, 3], [0, 1]]),
        ([2, 10, 3], 5, [[2, 0]]),
        ([], 5, []),
        ([5, 5], 5, [[0], [1]]),
        ([0, 0], 0, [[0, 1]]),
    ],
)
def test_knapsack(lengths, capacity, expected):
    assert knapsack(lengths, capacity) == expected


def sample(length, images=0, start=1, videos=0, media=(0, 0)):
    """A document of `length` text tokens, `media` tokens of (images, videos) before them, and patches and grids of
    (1, 4, 4) images and (2, 4, 4) videos."""
    text = torch.arange(start, start + length)
    ids = torch.cat([torch.full((media[0],), IMAGE), torch.full((media[1],), VIDEO), text])
    return {
        "input_ids": ids,
        "labels": ids + 100,
        "position_ids": torch.arange(len(ids)).expand(3, -1),
        "pixel_values": torch.full((16 * images, 4), float(start)),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * images, dtype=torch.int64).reshape(-1, 3),
        "pixel_values_videos": torch.full((32 * videos, 4), start + 0.5),
        "video_grid_thw": torch.tensor([[2, 4, 4]] * videos, dtype=torch.int64).reshape(-1, 3),
    }


def test_shift_sample():
    before = {**sample(5, images=1), "attention_mask": torch.ones(5)}
    after = shift_sample(before)
    assert after["input_ids"].tolist() == [1, 2, 3, 4] and after["labels"].tolist() == [102, 103, 104, 105]
    assert after["position_ids"].shape == (3, 4) and after["attention_mask"].shape == (4,)
    assert after["pixel_values"] is before["pixel_values"] and len(before["input_ids"]) == 5


def test_build_pack():
    documents = [{"input_ids": torch.tensor(ids), "labels": torch.tensor(ids)} for ids in ([1, 2, 3], [4, 5])]
    pack = build_pack(documents)
    assert pack["input_ids"].tolist() == [1, 2, 3, 4, 5]
    assert pack["doc_ids"].tolist() == [1, 1, 1, 2, 2]
    assert pack["position_ids"].tolist() == [0, 1, 2, 0, 1]
    pack = build_pack([sample(3, images=1, videos=1), sample(2, images=2, start=7), sample(1, videos=2, start=3)])
    assert pack["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0]] * 3
    assert pack["n_images"] == 3 and pack["pixel_values"][:, 0].tolist() == [1.0] * 16 + [7.0] * 32
    assert pack["n_videos"] == 3 and pack["pixel_values_videos"][:, 0].tolist() == [1.5] * 32 + [3.5] * 64
    assert pack["video_grid_thw"].tolist() == [[2, 4, 4]] * 3


def test_build_pack_carries_the_types_of_tokens():
    documents = [
        {**sample(2), "mm_token_type_ids": torch.tensor([0, 2])},
        {**sample(1), "mm_token_type_ids": torch.tensor([1])},
    ]
    assert build_pack(documents)["mm_token_type_ids"].tolist() == [0, 2, 1]
    with pytest.raises(ValueError, match="1 of 2 samples have mm_token_type_ids"):
        build_pack([documents[0], sample(2)])


def test_packs_drop_or_refuse_long_samples():
    samples = [sample(9), sample(2)]
    packs = PackedDataset(samples, pack_size=6, drop_long_samples=True)
    assert len(packs) == 1 and packs[0]["input_ids"].tolist() == [1, 2] and packs.fill == 2 / 6
    with pytest.raises(ValueError, match="sample 0 has 9 tokens, a pack takes 6"):
        PackedDataset(samples, pack_size=6)
    with pytest.raises(ValueError, match="every sample is longer than 1 tokens"):
        PackedDataset(samples, pack_size=6, max_length=1, drop_long_samples=True)


def test_packs_keep_the_ratio_the_order_and_the_limit():
    samples = [sample(4, images=i) for i in (2, 0, 1, 0)]
    assert len(PackedDataset(samples, pack_size=9)) == 2
    assert len(PackedDataset(samples, pack_size=9, packing_ratio=0.8)) == 4
    ordered = PackedDataset(samples, pack_size=4, balance_media_tokens=True)
    assert [p["n_images"] for p in ordered] == [0, 0, 1, 2]
    clips = [sample(4, videos=1), sample(4, images=1), sample(4, images=1, videos=1), sample(4)]
    ordered = PackedDataset(clips, pack_size=4, balance_media_tokens=True)
    assert [(p["n_images"], p["n_videos"]) for p in ordered] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert len(PackedDataset(samples, pack_size=4, max_packs=3)) == 3


def test_build_packs_checks_its_section():
    samples = [sample(4)]
    assert build_packs(samples, PackedSequence(), shuffle=True) is samples
    with pytest.raises(ValueError, match=r"packed_sequence.pack_size: expected at least 1, found None"):
        build_packs(samples, PackedSequence(enabled=True), shuffle=True)
    with pytest.raises(ValueError, match=r"packed_sequence.packing_ratio: expected a number in \(0, 1\], found 2"):
        build_packs(samples, PackedSequence(enabled=True, pack_size=4, packing_ratio=2.0), shuffle=True)
    with pytest.warns(UserWarning, match="balance_media_tokens orders packs"):
        build_packs(samples, PackedSequence(enabled=True, pack_size=4, balance_media_tokens=True), shuffle=True)


def test_collate_packs(processor):
    packs = [build_pack([sample(2), sample(1)]), build_pack([sample(3)])]
    batch = collate([*packs, with_media(processor)], processor, max_length=17)
    assert batch["attention_mask"][:, :5].tolist() == [[1, 1, 2, 0, 0], [1, 1, 1, 0, 0], [1] * 5]
    assert batch["labels"][:2, :4].tolist() == [[101, 102, 101, -100], [101, 102, 103, -100]]
    assert batch["position_ids"].shape == (3, 3, 17)
    assert len(batch["pixel_values"]) == 16 and len(batch["pixel_values_videos"]) == 32
    found = find_documents((3, 17), position_ids=batch["position_ids"], attention_mask=batch["attention_mask"])
    assert found.docs.tolist() == [[0, 2], [2, 3], [17, 20], [34, 51]]
    with pytest.raises(ValueError, match=r"packed_sequence\.collate_max_length=2: a pack has 3 tokens"):
        collate(packs, processor, max_length=2)


def with_media(processor):
    """A pack of one document: an image of 4 tokens, a video of 2 * 4, and text."""
    made = sample(5, images=1, videos=1, media=(4, 8))
    made["input_ids"][:4], made["input_ids"][4:12] = processor.image_token_id, processor.video_token_id
    return build_pack([made])
