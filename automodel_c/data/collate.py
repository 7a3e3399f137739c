"""Encoded conversations into one right-padded microbatch."""

import torch

from .encode import IGNORE_INDEX


def collate(samples, processor, *, max_length=None):
    """Pads and joins samples of encode.encode_conversation or packs of packing.build_pack.

    Returns input_ids, labels int64 [B, L], position_ids int64 [3, B, L], pixel_values fp32 [patches, width],
    image_grid_thw int64 [n, 3], and attention_mask: int64 [B, L] with 1..n for the documents of packs, else bool
    [B, L], or None when nothing is padded. Samples are not written to.
    When no sample has an image, a row with a dummy image and no label is appended, so that every rank runs the
    vision tower and its gradients exist. L is max_length where given, else that of the longest. ValueError when a
    sample's patches disagree with its grid, or it is longer than max_length.
    """
    samples = list(samples)
    for index, sample in enumerate(samples):
        _check(sample, index)
    if not any(len(sample["image_grid_thw"]) for sample in samples):
        samples.append(processor.dummy_sample())
    packed = any("doc_ids" in sample for sample in samples)
    batch, length = len(samples), _length(samples, max_length)
    input_ids = torch.full((batch, length), processor.pad_token_id)
    labels = torch.full((batch, length), IGNORE_INDEX)
    position_ids = torch.zeros(3, batch, length, dtype=torch.int64)
    mask = torch.zeros(batch, length, dtype=torch.int64 if packed else torch.bool)
    for row, sample in enumerate(samples):
        n = sample["input_ids"].numel()
        input_ids[row, :n] = sample["input_ids"]
        labels[row, :n] = sample["labels"]
        position_ids[:, row, :n] = sample["position_ids"]
        mask[row, :n] = sample.get("doc_ids", 1)
    return {
        "input_ids": input_ids,
        "labels": labels,
        "position_ids": position_ids,
        "attention_mask": None if not packed and bool(mask.all()) else mask,
        "pixel_values": torch.cat([sample["pixel_values"] for sample in samples]),
        "image_grid_thw": torch.cat([sample["image_grid_thw"] for sample in samples]),
    }


def _length(samples, max_length):
    longest = max(sample["input_ids"].numel() for sample in samples)
    if max_length is not None and longest > max_length:
        raise ValueError(f"packed_sequence.collate_max_length={max_length}: a pack has {longest} tokens")
    return max_length or longest


def _check(sample, index):
    patches = int(sample["image_grid_thw"].prod(1).sum())
    if patches != len(sample["pixel_values"]):
        raise ValueError(
            f"collate: sample {index} has {len(sample['pixel_values'])} rows of pixel_values,"
            f" its image_grid_thw asks for {patches}"
        )
