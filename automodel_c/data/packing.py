"""Samples into packs: documents end to end, each with positions of its own."""

import heapq
import warnings

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from .records import BadSample


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

    dataset: elements as of data.encode.encode_conversation; its `size(i)`, where it has one, tells (tokens, patches) of
    an element without making it. pack_size: tokens of a pack; int(pack_size * packing_ratio) of them are filled.
    max_length: tokens of a sample, None for as many as are filled; a longer one is dropped with drop_long_samples, else
    ValueError. max_packs: the first so many. balance_media_tokens: packs in the order of their patches, so that
    neighbouring steps cost alike. workers: processes that measure. group: None, or a process group whose ranks measure
    a part each and tell the others; all of them make the same packs.
    """

    def __init__(
        self, dataset, *, pack_size, packing_ratio=1.0, max_length=None, drop_long_samples=False,
        balance_media_tokens=False, max_packs=None, workers=0, group=None,
    ):  # fmt: skip
        self.dataset = dataset
        self.capacity = int(pack_size * packing_ratio)
        limit = self.capacity if max_length is None else min(self.capacity, max_length)
        sizes = measure(dataset, workers, group)
        self.bad = [found for found in sizes if isinstance(found, str)]
        known = [i for i, found in enumerate(sizes) if not isinstance(found, str)]
        kept = [i for i in known if sizes[i][0] <= limit]
        self.dropped = len(known) - len(kept)
        if self.bad and not getattr(dataset, "skip_bad", False):
            raise BadSample(self.bad[0])
        if self.dropped and not drop_long_samples:
            index = next(i for i in known if sizes[i][0] > limit)
            raise ValueError(
                f"packed_sequence: sample {index} has {sizes[index][0]} tokens, a pack takes {limit}"
                " (drop_long_samples drops such)"
            )
        if not kept:
            raise ValueError(f"packed_sequence: every sample is longer than {limit} tokens, or cannot be read")
        self.packs = [[kept[i] for i in bin] for bin in knapsack([sizes[i][0] for i in kept], self.capacity)]
        patches = [sum(sizes[i][1] for i in pack) for pack in self.packs]
        if balance_media_tokens:
            order = sorted(range(len(self.packs)), key=patches.__getitem__)
            self.packs, patches = [self.packs[i] for i in order], [patches[i] for i in order]
        self.packs, self.patches = self.packs[:max_packs], patches[:max_packs]
        self.lengths = [[sizes[i][0] for i in pack] for pack in self.packs]
        self.tokens = sum(map(sum, self.lengths))

    def __len__(self):
        return len(self.packs)

    def __getitem__(self, index):
        pack = zip(self.packs[index], self.lengths[index], strict=True)
        return build_pack([self._sample(at, length) for at, length in pack])

    def _sample(self, index, length):
        """A sample; shorter than it was measured is what stands for a bad one, longer would burst its pack."""
        sample = self.dataset[index]
        found = sample["input_ids"].numel()
        if found > length:
            raise ValueError(f"packed_sequence: sample {index} has {found} tokens, {length} when it was measured")
        return sample

    @property
    def samples_per_pack(self):
        """How many samples a pack holds on average, rounded down."""
        return sum(map(len, self.packs)) // len(self.packs)

    @property
    def fill(self):
        """Share of the packs' capacity that holds tokens."""
        return self.tokens / (self.capacity * len(self.packs))

    def describe(self):
        """A line for people: how many packs, how full, of how many documents and patches, and what was left out."""
        documents, n = sum(map(len, self.packs)), len(self.packs)
        line = (
            f"{n:,} packs of {self.capacity:,} tokens, {self.fill:.1%} full, of {documents / n:.1f} documents and"
            f" {sum(self.patches) / n:,.0f} patches each (at most {max(self.patches):,})"
        )
        line += f"; {self.dropped:,} samples too long" if self.dropped else ""
        return line + (f"; {len(self.bad):,} bad samples, first {self.bad[0]}" if self.bad else "")


def measure(dataset, workers=0, group=None):
    """Of every element (tokens, patches), or why there is none, in words; in `workers` processes of each rank of
    `group`, which measures a part."""
    ranks = 1 if group is None else group.size()
    rank = 0 if group is None else group.rank()
    share = range(len(dataset) * rank // ranks, len(dataset) * (rank + 1) // ranks)
    sizes = [size for batch in _batches(dataset, share, workers) for size in batch]
    if ranks == 1:
        return sizes
    parts = [None] * ranks
    dist.all_gather_object(parts, sizes, group=group)
    return [size for part in parts for size in part]


def _batches(dataset, share, workers):
    measured = _Measured(dataset, share)
    if len(share) < 2 * workers:
        workers = 0
    return DataLoader(measured, batch_size=64, num_workers=workers, collate_fn=list, generator=torch.Generator())


class _Measured(Dataset):
    def __init__(self, dataset, share):
        self.dataset, self.share = dataset, share

    def __len__(self):
        return len(self.share)

    def __getitem__(self, index):
        try:
            return _size(self.dataset, self.share[index])
        except BadSample as error:
            return str(error)


def _size(dataset, index):
    if hasattr(dataset, "size"):
        return dataset.size(index)
    sample = dataset[index]
    patches = sum(len(sample[key]) for key in ("pixel_values", "pixel_values_videos") if key in sample)
    return sample["input_ids"].numel(), patches


def build_packs(dataset, section, *, shuffle, workers=0, group=None):
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
        workers=workers,
        group=group,
    )
