"""From a recipe's `dataset` section to a data set."""

from .bounds import Bounds
from .chat import ChatDataset
from .digits import write_digits


def prepare_data(kind, section):
    """Writes what `kind` ("chat" or "digits") can make by itself; call on one rank, before build_dataset."""
    if kind == "digits":
        write_digits(_required_path(section))


def build_dataset(section, processor, seed):
    """A ChatDataset for a schema.Dataset section: path_or_dataset is what records.open_records takes. ValueError when
    there is no such file."""
    bounds = Bounds(
        section.max_image_pixels, section.max_clip_frames, section.max_clip_pixels, section.allow_paths_outside
    )
    return ChatDataset(
        _required_path(section), processor, split=section.split, shuffle_images=section.shuffle_images,
        limit=section.limit, cache=section.cache, seed=seed, skip_bad=section.skip_bad_samples,
        bounds=bounds,
    )  # fmt: skip


def _required_path(section):
    if not section.path_or_dataset:
        raise ValueError("dataset.path_or_dataset: expected a file or a folder")
    return section.path_or_dataset
