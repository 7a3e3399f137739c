"""Samples into packs: documents end to end, each with positions of its own."""

import heapq
import warnings

import torch
from torch.utils.data import Dataset


def knapsack(lengths, capacity):
    """Bins of indices into `lengths` whose lengths sum to at most `capacity`.

    Longest first into the least filled bin (the oldest of equals), a new bin where it does not fit; what is longer
    than `capacity` is in no bin.
    """
    bins, fill = [], []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        if length > capacity:
            continue
        if fill and fill[0][0] + length <= capacity:
            used, at = heapq.heappop(fill)
        else:
            used, at = 0, len(bins)
            bins.append([])
        bins[at].append(index)
        heapq.heappush(fill, (used + length, at))
    return bins


def shift_sample(sample):
    """A sample whose labels are aligned with its tokens, with each token's label the one after it: the last token
    goes. input_ids, attention_mask, mm_token_type_ids [L], position_ids [.., L] and labels [L] to L - 1; media stay."""
    shifted = dict(sample)
    for key in ("input_ids", "attention_mask", "mm_token_type_ids", "position_ids"):
        if key in sample:
            shifted[key] = sample[key][..., :-1]
    shifted["labels"] = sample["labels"][1:]
    return shifted


def build_pack(samples):
    """Shifted samples end to end: a sample with `doc_ids` int64 [L] (1..n) and the counters `n_images` and `n_videos`
    besides.

    Positions are each sample's own, 0.. where it has none; media are concatenated in order. ValueError when some
    samples have mm_token_type_ids and some have none.
    """
    lengths = [sample["input_ids"].numel() for sample in samples]
    pack = {key: torch.cat([sample[key] for sample in samples]) for key in ("input_ids", "labels")}
    pack["doc_ids"] = torch.arange(1, len(samples) + 1).repeat_interleave(torch.tensor(lengths))
    positions = [sample.get("position_ids", torch.arange(n)) for sample, n in zip(samples, lengths, strict=True)]
    pack["position_ids"] = torch.cat(positions, -1)
    typed = sum("mm_token_type_ids" in sample for sample in samples)
    if typed not in (0, len(samples)):
        raise ValueError(f"build_pack: {typed} of {len(samples)} samples have mm_token_type_ids")
    for key in ("mm_token_type_ids", "pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"):
        found = [sample[key] for sample in samples if key in sample]
        if found:
            pack[key] = torch.cat(found)
    pack["n_images"] = len(pack.get("image_grid_thw", ()))
    pack["n_videos"] = len(pack.get("video_grid_thw", ()))
    return pack


class PackedDataset(Dataset):
    """Packs of a data set's samples, decided once from their lengths; an element is a `build_pack`.

    dataset: elements as of data.encode.encode_conversation. pack_size: tokens of a pack; int(pack_size *
    packing_ratio) of them are filled. max_length: tokens of a sample, None for as many as are filled; a longer one is
    dropped with drop_long_samples, else ValueError. max_packs: the first so many. balance_media_tokens: packs in the
    order of their patches, so that neighbouring steps cost alike.
    """

    def __init__(
        self, dataset, *, pack_size, packing_ratio=1.0, max_length=None, drop_long_samples=False,
        balance_media_tokens=False, max_packs=None,
    ):  # fmt: skip
        self.dataset = dataset
        capacity = int(pack_size * packing_ratio)
        limit = capacity if max_length is None else min(capacity, max_length)
        samples = [dataset[i] for i in range(len(dataset))]
        lengths = [sample["input_ids"].numel() for sample in samples]
        kept = [i for i, n in enumerate(lengths) if n <= limit]
        if len(kept) < len(lengths) and not drop_long_samples:
            index = next(i for i, n in enumerate(lengths) if n > limit)
            raise ValueError(
                f"packed_sequence: sample {index} has {lengths[index]} tokens, a pack takes {limit}"
                " (drop_long_samples drops such)"
            )
        if not kept:
            raise ValueError(f"packed_sequence: every sample is longer than {limit} tokens")
        self.packs = [[kept[i] for i in bin] for bin in knapsack([lengths[i] for i in kept], capacity)]
        if balance_media_tokens:
            self.packs.sort(key=lambda pack: sum(_patches(samples[i]) for i in pack))
        self.packs = self.packs[:max_packs]
        self.tokens = sum(lengths[i] for pack in self.packs for i in pack)
        self.capacity = capacity

    def __len__(self):
        return len(self.packs)

    def __getitem__(self, index):
        return build_pack([self.dataset[i] for i in self.packs[index]])

    @property
    def samples_per_pack(self):
        """How many samples a pack holds on average, rounded down."""
        return sum(map(len, self.packs)) // len(self.packs)

    @property
    def fill(self):
        """Share of the packs' capacity that holds tokens."""
        return self.tokens / (self.capacity * len(self.packs))


def _patches(sample):
    return sum(len(sample[key]) for key in ("pixel_values", "pixel_values_videos") if key in sample)


def build_packs(dataset, section, *, shuffle):
    """`dataset` as it is, or a PackedDataset where a schema.PackedSequence section is enabled."""
    if not section.enabled:
        return dataset
    if not section.pack_size or section.pack_size < 1:
        raise ValueError(f"packed_sequence.pack_size: expected at least 1, found {section.pack_size}")
    ratio = 1.0 if section.packing_ratio is None else section.packing_ratio
    if not 0 < ratio <= 1:
        raise ValueError(f"packed_sequence.packing_ratio: expected a number in (0, 1], found {ratio}")
    if section.balance_media_tokens and shuffle:
        warnings.warn(
            "packed_sequence.balance_media_tokens orders packs, dataloader.shuffle shuffles them", stacklevel=2
        )
    return PackedDataset(
        dataset,
        pack_size=section.pack_size,
        packing_ratio=ratio,
        max_length=section.max_length,
        drop_long_samples=section.drop_long_samples,
        balance_media_tokens=section.balance_media_tokens,
        max_packs=section.max_packs,
    )
