"""Encoded conversations into one microbatch: padded rows, or one axis of documents laid end to end."""

import torch

from .encode import IGNORE_INDEX
from .packing import build_pack
from .positions import IMAGE, VIDEO, media_types

MEDIA = {IMAGE: ("pixel_values", "image_grid_thw"), VIDEO: ("pixel_values_videos", "video_grid_thw")}


def collate(samples, processor, *, max_length=None):
    """Pads and joins samples of encode.encode_conversation or packs of packing.build_pack.

    Returns input_ids, labels, mm_token_type_ids (0 text, 1 image, 2 video) int64 [B, L], position_ids int64 [3, B, L],
    pixel_values, pixel_values_videos fp32 [patches, width], image_grid_thw, video_grid_thw int64 [n, 3], and
    attention_mask: int64 [B, L] with 1..n for the documents of packs, else bool [B, L], or None when nothing is padded.
    Samples are not written to. A sample's own mm_token_type_ids are taken, where it has none they follow from its ids.
    When no sample has an image or video, a row with a dummy image and no label is appended, so that every rank runs
    the vision tower and its gradients exist. L is max_length where given, else that of the longest. ValueError when a
    sample's patches or media tokens disagree with its grids, or it is longer than max_length.
    """
    samples = [_checked(sample, index, processor) for index, sample in enumerate(samples)]
    if not any(len(sample[grid]) for sample in samples for _, grid in MEDIA.values()):
        samples.append(processor.dummy_sample())
    packed = any("doc_ids" in sample for sample in samples)
    batch, length = len(samples), _length(samples, max_length)
    input_ids = torch.full((batch, length), processor.pad_token_id)
    labels = torch.full((batch, length), IGNORE_INDEX)
    types = torch.zeros(batch, length, dtype=torch.int64)
    position_ids = torch.zeros(3, batch, length, dtype=torch.int64)
    mask = torch.zeros(batch, length, dtype=torch.int64 if packed else torch.bool)
    for row, sample in enumerate(samples):
        n = sample["input_ids"].numel()
        input_ids[row, :n] = sample["input_ids"]
        labels[row, :n] = sample["labels"]
        types[row, :n] = sample["mm_token_type_ids"]
        position_ids[:, row, :n] = sample["position_ids"]
        mask[row, :n] = sample.get("doc_ids", 1)
    return {
        "input_ids": input_ids,
        "labels": labels,
        "position_ids": position_ids,
        "attention_mask": None if not packed and bool(mask.all()) else mask,
        "mm_token_type_ids": types,
        **{key: torch.cat([sample[key] for sample in samples]) for keys in MEDIA.values() for key in keys},
    }


def collate_packed(samples, processor, *, max_length=None):
    """The same samples or packs end to end, without a batch axis: what our own model takes.

    Returns input_ids, labels (shifted inside each document), mm_token_type_ids int64 [T], position_ids int64 [3, T],
    cu_seqlens int32 [N + 1], and pixel_values with image_grid_thw, pixel_values_videos with video_grid_thw where there
    is any. T is max_length where given: rows past the last document are padding (pad token, no label, positions 0).
    Samples are not written to. ValueError as collate, and when all samples together are longer than max_length.
    """
    samples = [_checked(sample, index, processor) for index, sample in enumerate(samples)]
    if not samples:
        raise ValueError("collate_packed: samples is empty")
    pack = build_pack(samples)
    tokens = pack["input_ids"].numel()
    if max_length is not None and tokens > max_length:
        raise ValueError(f"collate_packed: max_length={max_length}, the samples have {tokens} tokens")
    pad = 0 if max_length is None else max_length - tokens
    pack["position_ids"] = pack["position_ids"].expand(3, -1)
    fill = {"input_ids": processor.pad_token_id, "labels": IGNORE_INDEX, "mm_token_type_ids": 0, "position_ids": 0}
    batch = {key: torch.nn.functional.pad(pack[key], (0, pad), value=value) for key, value in fill.items()}
    lengths = torch.cat([_document_lengths(sample) for sample in samples])
    batch["cu_seqlens"] = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(torch.int32)
    for keys in MEDIA.values():
        if len(pack[keys[1]]):
            batch |= {key: pack[key] for key in keys}
    return batch


def as_images(batch, image_token_id):
    """A batch of `collate` whose videos are images: every temporal patch one of its own, in the order of the tokens.

    The tower sees a frame alone, so the features are the same, and it runs once a batch, whatever is in it: ranks
    that drew different media then issue the same collectives. image_token_id takes the place of the video's.
    """
    grids = batch["video_grid_thw"]
    if not len(grids):
        return batch
    frames = grids.repeat_interleave(grids[:, 0], 0)
    frames[:, 0] = 1
    both = torch.cat([batch["image_grid_thw"], frames])
    patches = both.prod(1)
    types = batch["mm_token_type_ids"].flatten()
    order = torch.cat([_first_tokens(types, IMAGE, batch["image_grid_thw"]), _first_tokens(types, VIDEO, frames)])
    order = order.argsort()
    pixels = torch.cat([batch["pixel_values"], batch["pixel_values_videos"]]).split(patches.tolist())
    is_video = batch["mm_token_type_ids"] == VIDEO
    return {
        **batch,
        "input_ids": batch["input_ids"].masked_fill(is_video, image_token_id),
        "mm_token_type_ids": batch["mm_token_type_ids"].masked_fill(is_video, IMAGE),
        "pixel_values": torch.cat([pixels[i] for i in order.tolist()]),
        "image_grid_thw": both[order],
        "pixel_values_videos": batch["pixel_values_videos"][:0],
        "video_grid_thw": grids[:0],
    }


def _first_tokens(types, kind, grids):
    """Where in `types` [T] each grid's tokens begin; a patch count stands for its tokens, which are a fixed share."""
    tokens = (types == kind).nonzero().flatten()
    patches = grids.prod(1)
    starts = patches.cumsum(0) - patches
    share = max(int(patches.sum()) // max(len(tokens), 1), 1)
    return tokens[starts // share]


def _document_lengths(sample):
    """int64 [n]: tokens of the documents of a pack, or of a sample, which is one."""
    if "doc_ids" not in sample:
        return torch.tensor([sample["input_ids"].numel()])
    return sample["doc_ids"].unique_consecutive(return_counts=True)[1]


def _length(samples, max_length):
    longest = max(sample["input_ids"].numel() for sample in samples)
    if max_length is not None and longest > max_length:
        raise ValueError(f"packed_sequence.collate_max_length={max_length}: a pack has {longest} tokens")
    return max_length or longest


def _checked(sample, index, processor):
    """The sample with every key of media and mm_token_type_ids. ValueError when counts disagree."""
    no_pixels, no_grid = processor.video_patches([])
    whole = {key: empty for keys in MEDIA.values() for key, empty in zip(keys, (no_pixels, no_grid), strict=True)}
    whole |= sample
    if "mm_token_type_ids" not in sample:
        ids = (processor.image_token_id, processor.video_token_id)
        whole["mm_token_type_ids"] = media_types(sample["input_ids"], *ids)
    elif sample["mm_token_type_ids"].shape != sample["input_ids"].shape:
        raise ValueError(
            f"collate: sample {index} has {sample['mm_token_type_ids'].numel()} mm_token_type_ids,"
            f" its input_ids are {sample['input_ids'].numel()}"
        )
    for kind, (pixels, grid) in MEDIA.items():
        patches, tokens = int(whole[grid].prod(1).sum()), int((whole["mm_token_type_ids"] == kind).sum())
        if patches != len(whole[pixels]):
            raise ValueError(
                f"collate: sample {index} has {len(whole[pixels])} rows of {pixels}, its {grid} asks for {patches}"
            )
        if patches != tokens * processor.merge_size**2:
            raise ValueError(
                f"collate: sample {index} has {tokens} tokens for its {grid}, which asks for"
                f" {patches // processor.merge_size**2}"
            )
    return whole
