"""Which frames of a clip a model sees, at what size, and as which patches: NumPy and Pillow alone.

transformers' own Qwen3VLVideoProcessor does the same behind torchvision.
"""

import json
import math
from pathlib import Path

import numpy as np
import torch
from PIL import Image

MAX_ASPECT = 200
FILE = "video_preprocessor_config.json"
_DEFAULTS = {"shortest_edge": 128 * 128, "longest_edge": 16 * 16 * 2 * 2 * 2 * 6144}
_KEYS = ("size", "fps", "min_frames", "max_frames", "image_mean", "image_std")


class VideoProcessor:
    """Clips into patches as a Qwen3.5 tower takes them.

    patch_size, temporal_patch_size, merge_size: pixels of a patch, frames of a patch, patches along a side of a token.
    image_mean, image_std: three numbers each. size: {"shortest_edge", "longest_edge"}, which are no edges: the least
    and largest frames * height * width of a clip. fps: frames a second that are seen, of which there are at least
    min_frames and at most max_frames where a clip has them.
    """

    def __init__(
        self, *, patch_size, temporal_patch_size, merge_size, image_mean, image_std, size=None, fps=2.0,
        min_frames=4, max_frames=768,
    ):  # fmt: skip
        self.patch_size, self.temporal_patch_size, self.merge_size = patch_size, temporal_patch_size, merge_size
        self.image_mean, self.image_std = list(image_mean), list(image_std)
        self.size = {**_DEFAULTS, **(size or {})}
        self.fps, self.min_frames, self.max_frames = fps, min_frames, max_frames

    def frame_indices(self, frames, raw_fps, *, fps=None):
        """Which of a clip's `frames` are seen, int64 [n]: evenly spaced, n a multiple of temporal_patch_size.

        raw_fps: frames a second of the clip. fps: of what is seen, None for the processor's.
        ValueError when there is no frame, or no raw_fps.
        """
        if frames < 1:
            raise ValueError("frame_indices: the clip has no frames")
        if raw_fps is None:
            raise ValueError("frame_indices: raw_fps is unknown, the clip does not say how many frames a second it has")
        wanted = int(frames / raw_fps * (self.fps if fps is None else fps))
        wanted = min(max(wanted, self.min_frames), self.max_frames, frames)
        wanted += -wanted % self.temporal_patch_size
        return np.linspace(0, frames - 1, wanted).round().astype(np.int64)

    def seconds(self, indices, raw_fps):
        """When each temporal patch is seen: the middle between its first and last frame, a list of floats."""
        n = self.temporal_patch_size
        indices = [*indices, *[indices[-1]] * (-len(indices) % n)]
        times = [float(index) / raw_fps for index in indices]
        return [(times[i] + times[i + n - 1]) / 2 for i in range(0, len(times), n)]

    def frame_size(self, frames, height, width):
        """(height, width) that a clip's frames are resized to: multiples of a token's side, near the given aspect,
        with the clip's volume inside `size`. ValueError when one side is over 200 times the other."""
        side = self.patch_size * self.merge_size
        if min(height, width) < side:
            scale = max(side / height, side / width)
            height, width = int(height * scale), int(width * scale)
        aspect = max(height, width) / min(height, width)
        if aspect > MAX_ASPECT:
            raise ValueError(f"frame_size: {height}x{width} has an aspect of {aspect:g}, at most {MAX_ASPECT} is read")
        least, largest = self.size["shortest_edge"], self.size["longest_edge"]
        padded = frames + -frames % self.temporal_patch_size
        rows, columns = round(height / side) * side, round(width / side) * side
        if padded * rows * columns > largest:
            shrink = math.sqrt(frames * height * width / largest)
            rows, columns = (max(side, math.floor(x / shrink / side) * side) for x in (height, width))
        elif padded * rows * columns < least:
            grow = math.sqrt(least / (frames * height * width))
            rows, columns = (math.ceil(x * grow / side) * side for x in (height, width))
        return rows, columns

    def __call__(self, clips):
        """uint8 arrays [frames, height, width, 3] -> (pixel_values_videos fp32 [patches, C*T*P*P], video_grid_thw int64
        [n, 3]). The last frame is repeated where frames fill no temporal patch."""
        width = 3 * self.temporal_patch_size * self.patch_size**2
        made = [self._patches(clip) for clip in clips]
        pixels = np.concatenate([np.empty((0, width), np.float32), *(patches for patches, _ in made)])
        grids = torch.tensor([grid for _, grid in made], dtype=torch.int64).reshape(-1, 3)
        return torch.from_numpy(pixels), grids

    def _patches(self, clip):
        if clip.ndim != 4 or clip.shape[-1] != 3 or clip.dtype != np.uint8 or len(clip) == 0:
            raise ValueError(f"a clip is uint8 [frames, height, width, 3], found {clip.dtype} {list(clip.shape)}")
        rows, columns = self.frame_size(*clip.shape[:3])
        frames = np.stack([self._normalized(frame, rows, columns) for frame in clip])
        frames = np.concatenate([frames, frames[-1:].repeat(-len(frames) % self.temporal_patch_size, 0)])
        t, h, w = len(frames) // self.temporal_patch_size, rows // self.patch_size, columns // self.patch_size
        m, p = self.merge_size, self.patch_size
        patches = frames.reshape(t, self.temporal_patch_size, h // m, m, p, w // m, m, p, 3)
        patches = patches.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)  # t, token row and column, patch in it, C, T, P, P
        return np.ascontiguousarray(patches).reshape(t * h * w, -1), [t, h, w]

    def _normalized(self, frame, rows, columns):
        """fp32 [rows, columns, 3]; rounded where transformers' image processor rounds, so that pixels are equal."""
        if frame.shape[:2] != (rows, columns):
            frame = np.asarray(Image.fromarray(frame).resize((columns, rows), Image.Resampling.BICUBIC))
        frame = (frame.astype(np.float64) * (1 / 255)).astype(np.float32)
        return (frame - np.float32(self.image_mean)) / np.float32(self.image_std)

    def save_pretrained(self, folder):
        """Writes the file that transformers' AutoVideoProcessor reads."""
        keys = {"video_processor_type": "Qwen3VLVideoProcessor", **vars(self)}
        Path(folder, FILE).write_text(json.dumps(keys, indent=2) + "\n", encoding="utf-8")


def video_processor_for(image_processor, folder=None, **keys):
    """The VideoProcessor beside a transformers image processor: patches of the same kind, normalized alike where
    `folder` says nothing. folder: a model directory, whose video_preprocessor_config.json is read, or the
    video_processor of its processor_config.json. keys: what else VideoProcessor takes; None for what is told elsewhere.
    """
    told = {k: getattr(image_processor, k) for k in ("patch_size", "temporal_patch_size", "merge_size")}
    told |= {k: getattr(image_processor, k) for k in ("image_mean", "image_std")}
    stored = {k: v for k, v in _stored(folder).items() if k in _KEYS and v is not None}
    keys = {k: v for k, v in keys.items() if v is not None}
    sizes = {**stored.pop("size", {}), **{k: v for k, v in keys.pop("size", {}).items() if v is not None}}
    return VideoProcessor(**{**told, **stored, **keys}, size=sizes)


def _stored(folder):
    if folder is None:
        return {}
    for name, key in ((FILE, None), ("processor_config.json", "video_processor")):
        path = Path(folder, name)
        if path.is_file():
            found = json.loads(path.read_text(encoding="utf-8"))
            found = found if key is None else found.get(key)
            if found:
                return found
    return {}
