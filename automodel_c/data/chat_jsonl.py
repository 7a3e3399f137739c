"""Conversations in a JSONL file, with images and videos beside it."""

import json
from pathlib import Path

import torch
from PIL import Image
from torch.utils.data import Dataset

from .clips import read_clip
from .encode import check_messages, encode_conversation, media_parts


class ChatJsonlDataset(Dataset):
    """One encoded conversation a line; see encode.encode_conversation for what an element holds.

    path: a JSONL file; each line is {"messages": [...]}, image parts are {"type": "image", "image": "file name"},
    video parts as clips.read_clip takes them, with names relative to the file's folder. shuffle_images deals all
    images of the file out again, and all videos, in an order drawn from `seed`, so that questions keep their answers
    and lose what they are about. limit keeps the first so many
    lines. cache keeps encoded conversations in memory. ValueError names the line that is not such a conversation.
    """

    def __init__(self, path, processor, *, shuffle_images=False, limit=None, cache=False, seed=0):
        self.folder = Path(path).parent
        self.processor = processor
        self.conversations = _read(Path(path))[:limit]
        self.images = [[p["image"] for p in media_parts(c, "image")] for c in self.conversations]
        self.videos = [media_parts(c, "video") for c in self.conversations]
        if shuffle_images:
            self.images, self.videos = _deal(self.images, seed), _deal(self.videos, seed)
        self.cache = {} if cache else None

    def __len__(self):
        return len(self.conversations)

    def __getitem__(self, index):
        if self.cache is not None and index in self.cache:
            return self.cache[index]
        images = []
        for name in self.images[index]:
            with Image.open(self.folder / name) as image:
                images.append(image.convert("RGB"))
        clips = [read_clip(part, self.folder, self.processor.video_processor) for part in self.videos[index]]
        sample = encode_conversation(self.conversations[index], images, self.processor, clips)
        if self.cache is not None:
            self.cache[index] = sample
        return sample


def _read(path):
    conversations = []
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                messages = json.loads(line)["messages"]
                check_messages(messages)
                if not all(isinstance(part.get("image"), str) for part in media_parts(messages, "image")):
                    raise ValueError("an image part without a file name")
                conversations.append(messages)
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}, line {number}: not a conversation ({error!r})") from None
    if not conversations:
        raise ValueError(f"{path}: no conversation in it")
    return conversations


def _deal(media, seed):
    """The same number of media for every conversation, but in another order."""
    flat = [name for names in media for name in names]
    order = torch.randperm(len(flat), generator=torch.Generator().manual_seed(seed)).tolist()
    dealt = iter([flat[i] for i in order])
    return [[next(dealt) for _ in names] for names in media]
