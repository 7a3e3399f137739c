"""Which rank runs which frames of a batch's images and clips. Host only; no process group, no model."""

import itertools
from dataclasses import dataclass

from automodel_c.keys import check_known
from automodel_c.partition import frame_partition

# names of a tower's width, in order: some configurations call the width of the text model they feed `hidden_size`
_TOWER_WIDTHS = ("vit_hidden_size", "vision_hidden_size", "embed_dim")
_TOWER_CONFIGS = ("vision_config", "visual_config", "visual", "vision", "vit_config", "vit")
_PLAIN_WIDTHS = ("hidden_size", "d_model")
_AXES = (["cp"], ["cp", "tp"])


@dataclass(frozen=True)
class FrameSharding:
    """How frames of the vision tower are spread over ranks; a recipe's `frame_sharding` section.

    enabled: off gives the replicated baseline, every rank running every frame.
    mesh_dims: axes of the mesh whose ranks share the frames, ["cp"] or ["cp", "tp"].
    min_tokens, min_frames: a batch below both is replicated.
    min_local_patch_rows: ranks with fewer rows of patches run zero frames beside theirs, up to this many.
    cost_alpha: alpha of `frame_partition`; "auto" is three times the tower's width.
    """

    enabled: bool = False
    mesh_dims: tuple = ("cp",)
    min_tokens: int = 2048
    min_frames: int = 32
    min_local_patch_rows: int = 96
    cost_alpha: int | str | None = "auto"

    @classmethod
    def from_mapping(cls, config):
        """A FrameSharding of a mapping with these keys; unknown keys and bad values are ValueError, `enabled` that is
        no bool TypeError."""
        for key in config:
            check_known(key, set(cls.__dataclass_fields__), "frame_sharding.")
        made = cls(**config)
        made.check()
        return made

    def check(self):
        """ValueError or TypeError that names the key."""
        if not isinstance(self.enabled, bool):
            raise TypeError(f"frame_sharding.enabled is {self.enabled!r}, a bool is needed")
        dims = self.mesh_dims
        if isinstance(dims, str) or list(dims) not in _AXES:
            raise ValueError(f"frame_sharding.mesh_dims is {dims!r}, [cp] or [cp, tp] is needed")
        for key in ("min_tokens", "min_frames", "min_local_patch_rows"):
            _check_count(key, getattr(self, key))
        if self.cost_alpha not in (None, "auto") or isinstance(self.cost_alpha, bool):
            _check_count("cost_alpha", self.cost_alpha, ' or "auto"')

    def alpha(self, visual):
        """alpha of `frame_partition` for a tower."""
        if self.cost_alpha in (None, "auto"):
            return 3 * tower_width(getattr(visual, "config", None))
        return self.cost_alpha


def _check_count(key, value, more=""):
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"frame_sharding.{key} is {value!r}: it must be a non-negative integer{more}")


def tower_width(config):
    """Hidden size of the vision tower that a configuration describes, or holds; 0 when it says nothing.

    A configuration of a whole model is asked for its tower: the text model's width is never taken for it.
    """
    if config is None:
        return 0
    for name in _TOWER_WIDTHS:
        if isinstance(width := _field(config, name), int):
            return width
    for name in _TOWER_CONFIGS:
        if _field(config, name) is not None and (width := tower_width(_field(config, name))):
            return width
    if _field(config, "text_config") is not None:
        return 0
    return next((w for name in _PLAIN_WIDTHS if isinstance(w := _field(config, name), int)), 0)


def _field(config, name):
    return config.get(name) if isinstance(config, dict) else getattr(config, name, None)


@dataclass(frozen=True)
class FramePlan:
    """One rank's part of a batch.

    rows: (start, end) of its rows in pixel_values. grid: its (t, h, w) entries, zero frames excluded.
    padding: (t, h, w) of zero frames run behind its own, or None; they are all that a rank without a frame runs.
    tokens: of every rank, in rank order.
    """

    rows: tuple
    grid: list
    padding: tuple | None
    tokens: list


def frames_of(grid):
    """(t, h, w) entries as [patches of a frame] in order, t frames each."""
    return [h * w for t, h, w in grid for _ in range(t)]


def replicates(grid, merge, config):
    """Whether a batch is too small to be spread."""
    frames = frames_of(grid)
    return sum(frames) // merge**2 < config.min_tokens and len(frames) < config.min_frames


def plan_frames(grid, world, rank, *, merge, alpha, min_local_patch_rows=0):
    """FramePlan of `rank`: contiguous frames at the least possible largest cost, every rank at least one where there
    are enough of them.

    grid: (t, h, w) entries, at least one frame in all. merge: patches of a token's side.
    """
    frames = frames_of(grid)
    cuts = frame_partition(frames, world, alpha=alpha)
    if cuts is None:
        cuts = [min(r, len(frames)) for r in range(world + 1)]
    first, last = int(cuts[rank]), int(cuts[rank + 1])
    local = _merge_frames(grid, first, last)
    start, rows = sum(frames[:first]), sum(frames[first:last])
    tokens = [sum(frames[int(a) : int(b)]) // merge**2 for a, b in itertools.pairwise(cuts)]
    return FramePlan((start, start + rows), local, _padding(local, rows, merge, min_local_patch_rows), tokens)


def _padding(local, rows, merge, floor):
    if not local:
        return (1, merge, merge)
    _, h, w = local[-1]
    extra = padding_frames(rows, h * w, floor)
    return (extra, h, w) if extra else None


def padding_frames(rows, frame_rows, floor):
    """How many zero frames of `frame_rows` rows bring `rows` up to `floor`."""
    return -(-(floor - rows) // frame_rows) if frame_rows and rows < floor else 0


def _merge_frames(grid, first, last):
    """Entries of the frames [first, last): consecutive frames of one entry are one entry again."""
    entries, at = [], 0
    for t, h, w in grid:
        count = min(last, at + t) - max(first, at)
        if count > 0:
            entries.append((count, h, w))
        at += t
    return entries
