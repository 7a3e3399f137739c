"""Encoded conversations into one right-padded microbatch."""

import torch

from .encode import IGNORE_INDEX


def collate(samples, processor):
    """Pads and joins samples of encode.encode_conversation.

    Returns input_ids, labels int64 [B, L], position_ids int64 [3, B, L], attention_mask bool [B, L] or None when
    nothing is padded, pixel_values fp32 [patches, width], image_grid_thw int64 [n, 3]. Samples are not written to.
    When no sample has an image, a row with a dummy image and no label is appended, so that every rank runs the
    vision tower and its gradients exist. ValueError when a sample's patches disagree with its grid.
    """
    samples = list(samples)
    for index, sample in enumerate(samples):
        _check(sample, index)
    if not any(len(sample["image_grid_thw"]) for sample in samples):
        samples.append(processor.dummy_sample())
    batch, length = len(samples), max(sample["input_ids"].numel() for sample in samples)
    input_ids = torch.full((batch, length), processor.pad_token_id)
    labels = torch.full((batch, length), IGNORE_INDEX)
    position_ids = torch.zeros(3, batch, length, dtype=torch.int64)
    mask = torch.zeros(batch, length, dtype=torch.bool)
    for row, sample in enumerate(samples):
        n = sample["input_ids"].numel()
        input_ids[row, :n] = sample["input_ids"]
        labels[row, :n] = sample["labels"]
        position_ids[:, row, :n] = sample["position_ids"]
        mask[row, :n] = True
    return {
        "input_ids": input_ids,
        "labels": labels,
        "position_ids": position_ids,
        "attention_mask": None if bool(mask.all()) else mask,
        "pixel_values": torch.cat([sample["pixel_values"] for sample in samples]),
        "image_grid_thw": torch.cat([sample["image_grid_thw"] for sample in samples]),
    }


def _check(sample, index):
    patches = int(sample["image_grid_thw"].prod(1).sum())
    if patches != len(sample["pixel_values"]):
        raise ValueError(
            f"collate: sample {index} has {len(sample['pixel_values'])} rows of pixel_values,"
            f" its image_grid_thw asks for {patches}"
        )
