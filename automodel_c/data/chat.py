"""Conversations with images and videos, encoded one by one."""

import io
import warnings

import torch
from PIL import UnidentifiedImageError
from torch.utils.data import Dataset

from .bounds import DEFAULT
from .clips import MissingLibrary, clip_shape, read_clip
from .encode import conversation_size, encode_conversation
from .records import BadSample, open_records


class ChatDataset(Dataset):
    """One encoded conversation a record of records.open_records; see encode.encode_conversation for what an element
    holds.

    path: a file or a folder; names in it are relative to the folder. shuffle_images deals all images out again, and
    all videos, in an order drawn from `seed`, so that questions keep their answers and lose what they are about. limit
    keeps the first so many. cache keeps encoded conversations in memory. What cannot be read or encoded raises
    BadSample with its file and line; with skip_bad it is told in a warning, and a sample of one token without a label
    stands for it. bounds: which names and sizes of media are refused.
    """

    def __init__(
        self, path, processor, *, split="train", shuffle_images=False, limit=None, cache=False, seed=0, skip_bad=False,
        bounds=DEFAULT,
    ):  # fmt: skip
        self.records = open_records(path, split, skip_bad=skip_bad)
        self.processor, self.skip_bad, self.bounds = processor, skip_bad, bounds
        self.count = len(self.records) if limit is None else min(limit, len(self.records))
        for bad in self.records.bad:
            warnings.warn(f"left out: {bad}", stacklevel=2)
        self.dealt = None  # of each conversation the (record, place) of its images, of its videos
        if shuffle_images:
            counts = [self._media(i) for i in range(self.count)]
            self.dealt = [_deal(of_a_kind, seed) for of_a_kind in zip(*counts, strict=True)] or [[], []]
        self.cache = {} if cache else None

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if self.cache is not None and index in self.cache:
            return self.cache[index]
        try:
            sample = self._encoded(index)
        except BadSample as error:
            if not self.skip_bad:
                raise
            warnings.warn(f"left out: {error}", stacklevel=2)
            sample = self.processor.dummy_sample()
        if self.cache is not None:
            self.cache[index] = sample
        return sample

    def size(self, index):
        """(tokens, patches) of an element, from what headers tell. BadSample where that alone fails."""
        with _named(self.records, index):
            messages, images, videos = self._conversation(index)
            sizes = []
            for name in images:
                with self._open(name) as image:
                    sizes.append((image.height, image.width))
            shapes = [clip_shape(part, *self._clip_options()) for part in videos]
            return conversation_size(messages, sizes, self.processor, shapes)

    def _encoded(self, index):
        with _named(self.records, index):
            messages, names, videos = self._conversation(index)
            images = []
            for name in names:
                with self._open(name) as image:
                    images.append(image.convert("RGB"))
            clips = [read_clip(part, *self._clip_options()) for part in videos]
            return encode_conversation(messages, images, self.processor, clips)

    def _clip_options(self):
        return self.records.folder, self.processor.video_processor, self.bounds

    def _conversation(self, index):
        messages, images, videos = self.records[index]
        if self.dealt is not None:
            images = [self.records[i].images[at] for i, at in self.dealt[0][index]]
            videos = [self.records[i].videos[at] for i, at in self.dealt[1][index]]
        return messages, images, videos

    def _media(self, index):
        """How many images and videos there are to deal."""
        try:
            with _named(self.records, index):
                _, images, videos = self.records[index]
        except BadSample:
            if not self.skip_bad:
                raise
            return 0, 0
        return len(images), len(videos)

    def _open(self, image):
        if not isinstance(image, bytes):
            return self.bounds.picture(self.bounds.path(self.records.folder, image))
        try:
            return self.bounds.picture(io.BytesIO(image))
        except UnidentifiedImageError:  # whose words are an address, other ones each time
            raise UnidentifiedImageError(f"cannot identify an image of {len(image):,} bytes") from None


class _named:
    """Whatever goes wrong inside is a BadSample that says where."""

    def __init__(self, records, index):
        self.records, self.index = records, index

    def __enter__(self):
        pass

    def __exit__(self, kind, error, trace):
        if not isinstance(error, Exception) or isinstance(error, (BadSample, MissingLibrary)):
            return
        raise BadSample(f"{self.records.where(self.index)}: {type(error).__name__}: {error}") from error


def _deal(counts, seed):
    """As many (record, place) for every conversation as it has media, in another order."""
    flat = [(i, at) for i, count in enumerate(counts) for at in range(count)]
    order = torch.randperm(len(flat), generator=torch.Generator().manual_seed(seed)).tolist()
    dealt = iter([flat[i] for i in order])
    return [[next(dealt) for _ in range(count)] for count in counts]
