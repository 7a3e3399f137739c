"""From a recipe's `dataset` section to a data set."""

from pathlib import Path

from .chat_jsonl import ChatJsonlDataset
from .digits import write_digits


def prepare_data(kind, section):
    """Writes what `kind` ("chat_jsonl" or "digits") can make by itself; call on one rank, before build_dataset."""
    if kind == "digits":
        write_digits(_required_path(section))


def build_dataset(section, processor, seed):
    """A ChatJsonlDataset for a schema.Dataset section: path_or_dataset is the JSONL file, or a folder that holds
    <split>.jsonl. ValueError when there is no such file."""
    path = Path(_required_path(section))
    if path.is_dir():
        path = path / f"{section.split}.jsonl"
    if not path.is_file():
        raise ValueError(f"dataset.path_or_dataset: no file {path}")
    return ChatJsonlDataset(
        path, processor, shuffle_images=section.shuffle_images, limit=section.limit, cache=section.cache, seed=seed
    )


def _required_path(section):
    if not section.path_or_dataset:
        raise ValueError("dataset.path_or_dataset: expected a JSONL file or a folder")
    return section.path_or_dataset
