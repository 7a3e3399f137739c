import pytest
import torch

from automodel_c.data.collate import collate
from automodel_c.data.packing import PackedDataset, build_pack, build_packs, knapsack, shift_sample
from automodel_c.models.patch.documents import find_documents
from automodel_c.recipes.schema import PackedSequence


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


def sample(length, images=0, start=1):
    return {
        "input_ids": torch.arange(start, start + length),
        "labels": torch.arange(100 + start, 100 + start + length),
        "position_ids": torch.arange(length).expand(3, length),
        "pixel_values": torch.full((16 * images, 4), float(start)),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * images, dtype=torch.int64).reshape(-1, 3),
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
    pack = build_pack([sample(3, images=1), sample(2, images=2, start=7)])
    assert pack["position_ids"].tolist() == [[0, 1, 2, 0, 1]] * 3
    assert pack["n_images"] == 3 and pack["pixel_values"][:, 0].tolist() == [1.0] * 16 + [7.0] * 32


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
    packs = [build_pack([sample(2, images=1), sample(1)]), build_pack([sample(3, images=2)])]
    batch = collate(packs, processor, max_length=4)
    assert batch["attention_mask"].tolist() == [[1, 1, 2, 0], [1, 1, 1, 0]]
    assert batch["labels"].tolist() == [[101, 102, 101, -100], [101, 102, 103, -100]]
    assert batch["position_ids"].shape == (3, 2, 4) and len(batch["pixel_values"]) == 48
    found = find_documents((2, 4), position_ids=batch["position_ids"], attention_mask=batch["attention_mask"])
    assert found.docs.tolist() == [[0, 2], [2, 3], [4, 7]]
    with pytest.raises(ValueError, match=r"packed_sequence\.collate_max_length=2: a pack has 3 tokens"):
        collate(packs, processor, max_length=2)
