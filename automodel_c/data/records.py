"""Conversations as files hold them: JSONL, Parquet, or a folder as Hugging Face's datasets write it.

A row is {"messages": [...]} and perhaps "images" and "videos": lists whose elements the message parts that name nothing
take in order. An image is a file name or encoded bytes ({"bytes": .., "path": ..} as datasets store it, or plain), a
video what clips.read_clip reads. Parquet and Arrow files need pyarrow.
"""

import bisect
import itertools
import json
import os
import re
from pathlib import Path
from typing import NamedTuple

from .clips import MissingLibrary
from .encode import check_messages, media_parts

ARROW = (".parquet", ".arrow")
COLUMNS = ("messages", "images", "videos")
SPLITS = "(?:train|training|validation|valid|val|dev|test|testing|eval)(?![A-Za-z])"  # how names of splits begin
HIDDEN = (".", "_", "cache-")  # the last: what datasets keeps of its transformations beside the data
NOT_A_CONVERSATION = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


class Conversation(NamedTuple):
    """messages; images: file names or bytes; videos: parts with "video" in them. Both in order of appearance."""

    messages: list
    images: list
    videos: list


class BadSample(ValueError):
    """A conversation that cannot be used; the words name its file and line or row."""


def open_records(path, split="train", *, skip_bad=False):
    """The records of a file (.jsonl, .parquet, .arrow) or of a folder: of <split>.jsonl, else of the Parquet or Arrow
    files in <split>/, else of those in it or in data/ whose names begin with the word of the split, else, where no
    name is that of another split, of all of them.

    skip_bad leaves out lines of JSONL that are no conversation, told in `bad`; else BadSample names the first.
    ValueError where there is no such file.
    """
    path = Path(path)
    files = _files_of(path, split)
    if not files:
        raise ValueError(f"dataset.path_or_dataset: no JSONL, Parquet or Arrow file of split {split!r} at {path}")
    return JsonlRecords(files[0], skip_bad) if files[0].suffix not in ARROW else ArrowRecords(files, path)


def _files_of(path, split):
    if path.is_file():
        return [path]
    if (path / f"{split}.jsonl").is_file():
        return [path / f"{split}.jsonl"]
    apart, found = _arrow_files(path / split), [*_arrow_files(path), *_arrow_files(path / "data")]
    word = re.compile(re.escape(split) + "(?![A-Za-z]|_[A-Za-z])")
    named = apart or [f for f in found if word.match(f.name)]
    return named or ([] if any(re.match(SPLITS, f.name) for f in found) else found)


def _arrow_files(folder):
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    return [f for f in files if f.suffix in ARROW and not f.name.startswith(HIDDEN)]


def conversation_of(row):
    """A Conversation of a row; ValueError, KeyError or TypeError where it is none."""
    messages = row["messages"]
    if isinstance(messages, str):
        messages = json.loads(messages)
    messages = [_without_nones(message) for message in messages]
    images = _in_order(messages, "image", row.get("images"))
    videos = _in_order(messages, "video", row.get("videos"))
    check_messages(messages)
    for image in images:
        if not isinstance(image, (str, bytes)):
            raise ValueError(f"an image part without a file name: {type(image).__name__}, no bytes either")
    return Conversation(messages, images, videos)


def _without_nones(message):
    """Columns of structures have every key in every part."""
    content = message["content"]
    if not isinstance(content, str):
        content = [{key: value for key, value in part.items() if value is not None} for part in content]
    return {**{key: value for key, value in message.items() if value is not None}, "content": content}


def _in_order(messages, kind, column):
    """The media of the parts of a kind; parts that name none take the column's in order, and name what they took."""
    parts, given = media_parts(messages, kind), [] if column is None else column
    if not isinstance(given, list):
        raise ValueError(f"{kind}s is {type(given).__name__}, a list is needed")
    nameless = [part for part in parts if kind not in part]
    if given and len(given) != len(nameless):
        raise ValueError(f"{len(nameless)} {kind} parts without a file name, {kind}s has {len(given)} elements")
    if nameless and not given:
        raise ValueError(f"{'an' if kind == 'image' else 'a'} {kind} part without a file name")
    for part, medium in zip(nameless, given, strict=True):
        if isinstance(medium, dict) and kind == "image":
            medium = medium.get("bytes") or medium.get("path")
        if isinstance(medium, dict):
            part.update({key: value for key, value in medium.items() if value is not None})
        else:
            part[kind] = medium
    return [part[kind] for part in parts] if kind == "image" else parts


class JsonlRecords:
    """A line each; all of them are in memory, and checked."""

    def __init__(self, path, skip_bad=False):
        self.path, self.folder = path, path.parent
        self.conversations, self.lines, self.bad = [], [], []
        with open(path, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    conversation = conversation_of(json.loads(line.decode("utf-8-sig")))
                except NOT_A_CONVERSATION as error:
                    bad = f"{path}, line {number}: not a conversation ({error!r})"
                    if not skip_bad:
                        raise BadSample(bad) from None
                    self.bad.append(bad)
                    continue
                self.conversations.append(conversation)
                self.lines.append(number)
        if not self.conversations:
            raise ValueError(f"{path}: no conversation in it")

    def __len__(self):
        return len(self.conversations)

    def __getitem__(self, index):
        return self.conversations[index]

    def where(self, index):
        return f"{self.path}, line {self.lines[index]}"


class ArrowRecords:
    """A row each of Parquet or Arrow files, read when they are asked for, a group of rows at a time."""

    def __init__(self, files, folder):
        self.files, self.bad = files, []
        self.folder = folder if folder.is_dir() else folder.parent
        self.groups = []  # (file, group, rows)
        for number, path in enumerate(files):
            try:
                rows = _rows_of_groups(path)
            except (OSError, ValueError) as error:
                raise ValueError(f"{path}: {error}") from error
            self.groups += [(number, group, count) for group, count in enumerate(rows)]
        self.ends = list(itertools.accumulate(count for _, _, count in self.groups))
        self.kept = (None, None, None)  # process, place in groups, its rows
        if not len(self):
            raise ValueError(f"{folder}: no row in its files")

    def __getstate__(self):
        """Another process reads its own rows."""
        return {**self.__dict__, "kept": (None, None, None)}

    def __len__(self):
        return self.ends[-1] if self.ends else 0

    def __getitem__(self, index):
        at, row = self._place(index)
        kept = self.kept  # another thread may take a new one
        if kept[:2] != (os.getpid(), at):
            number, group, _ = self.groups[at]
            kept = self.kept = (os.getpid(), at, _read_group(self.files[number], group))
        columns = kept[2]
        try:
            return conversation_of({name: columns[name][row].as_py() for name in columns.column_names})
        except NOT_A_CONVERSATION as error:
            raise BadSample(f"{self.where(index)}: not a conversation ({error!r})") from None

    def where(self, index):
        at, row = self._place(index)
        number, group, _ = self.groups[at]
        before = sum(count for n, g, count in self.groups if n == number and g < group)
        return f"{self.files[number]}, row {before + row}"

    def _place(self, index):
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        at = bisect.bisect_right(self.ends, index)
        return at, index - (self.ends[at] - self.groups[at][2])


def _pyarrow(path):
    try:
        import pyarrow
    except ImportError:
        raise MissingLibrary(f"{path}: reading it needs pyarrow (pip install pyarrow)") from None
    return pyarrow


def _rows_of_groups(path):
    """How many rows each group of a file has: a Parquet file's row groups, an Arrow file's batches."""
    arrow = _pyarrow(path)
    if path.suffix == ".parquet":
        import pyarrow.parquet

        metadata = pyarrow.parquet.read_metadata(path)
        return [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    with arrow.memory_map(str(path)) as source:
        return [batch.num_rows for batch in _batches(arrow, source)]


def _batches(arrow, source):
    """Those of either Arrow format, the stream that datasets writes or the file with an index."""
    indexed = source.read(6) == b"ARROW1"
    source.seek(0)
    if not indexed:
        yield from arrow.ipc.open_stream(source)
        return
    reader = arrow.ipc.open_file(source)
    yield from map(reader.get_batch, range(reader.num_record_batches))


def _read_group(path, group):
    arrow = _pyarrow(path)
    if path.suffix == ".parquet":
        import pyarrow.parquet

        with pyarrow.parquet.ParquetFile(path) as file:
            known = [name for name in file.schema_arrow.names if name in COLUMNS]
            return file.read_row_group(group, columns=known, use_threads=False)
    with arrow.memory_map(str(path)) as source:
        batch = next(itertools.islice(_batches(arrow, source), group, None))
        known = [name for name in batch.schema.names if name in COLUMNS]
        return arrow.Table.from_batches([batch.select(known)])
