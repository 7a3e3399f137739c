"""Short clips from what files hold them: only the frames that are asked for."""

import io
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from PIL import ImageSequence

from .bounds import DEFAULT

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff")
ANIMATIONS = (".gif", ".webp", ".apng", ".png")
ARRAYS = (".npy", ".npz")
# demuxers of films: others read names of further files out of a file, or addresses
CONTAINERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,mpegvideo,flv,ogg,asf,h264,hevc,m4v,ivf,nut"
HEADER = 1 << 16  # more than what says what a small array is
PART_KEYS = {"type", "video", "fps", "raw_fps"}


class MissingLibrary(RuntimeError):
    """What reads such files is not installed."""


@dataclass
class Clip:
    """frames: uint8 [n, height, width, 3]. seconds: when each temporal patch of them is seen."""

    frames: np.ndarray
    seconds: list


def check_clip_part(part):
    """ValueError where a conversation's video part is none that `read_clip` reads."""
    unknown = sorted(set(part) - PART_KEYS)
    if unknown:
        raise ValueError(f"a video part with {unknown[0]!r}: only {', '.join(sorted(PART_KEYS))} are read")
    names = part.get("video")
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ValueError("a video part without a file name or a list of them")
    for key in ("fps", "raw_fps"):
        value = part.get(key)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is not None and not (number and 0 < value < float("inf")):
            raise ValueError(f"a video part whose {key} is {value!r}, no number of frames a second")


def read_clip(part, folder, video_processor, bounds=DEFAULT):
    """The Clip of a video part: {"video": what holds it, "fps": seen frames a second, "raw_fps": stored ones}.

    What holds it, relative to `folder`: a list of image files; a folder of them, in the order of their names; an
    animation (.gif, .webp, .apng) that Pillow reads; an array (.npy, or `frames` and perhaps `fps` in an .npz) uint8
    [n, height, width, 3]; else a video file, which needs PyAV. fps: None for the processor's. raw_fps: None for
    what the file says; where that is nothing, `fps`, as of frames that were taken from a film at that rate. bounds:
    what is too large, and which names are refused.
    ValueError where there is no frame or no rate, or more than `bounds` allows; MissingLibrary, a RuntimeError, without
    PyAV.
    """
    names = part["video"]
    film, indices, raw_fps = _chosen(part, folder, video_processor, bounds)
    count, read = film.frames, film.read
    kept, again = np.unique(indices, return_inverse=True)
    bounds.check_clip(len(indices), *film.size())
    frames = read(kept.tolist(), _check_alike(names, len(indices), bounds))
    if len(frames) < len(kept):
        raise ValueError(f"video {names}: it says {count} frames and holds fewer")
    frames = np.stack(frames)[again]
    return Clip(frames, video_processor.seconds(indices.tolist(), raw_fps))


def clip_shape(part, folder, video_processor, bounds=DEFAULT):
    """(frames, height, width, seconds) of what `read_clip` gives, height and width as the first frame has them. Of an
    animation, and of a film that does not tell how long it is, frames are read for that."""
    film, indices, raw_fps = _chosen(part, folder, video_processor, bounds)
    bounds.check_clip(len(indices), *film.size())
    return len(indices), *film.size(), video_processor.seconds(indices.tolist(), raw_fps)


class _Film(NamedTuple):
    frames: int
    fps: float | None
    read: Callable  # from sorted indices, and what takes a frame's height and width before its pixels, to arrays
    size: Callable  # (height, width)


def _check_alike(names, count, bounds):
    """What refuses a frame of another size than those before it: what a file says ahead of them is not its word."""
    sizes = set()

    def check(height, width):
        sizes.add((height, width))
        if len(sizes) > 1:
            raise ValueError(f"video {names}: frames of different sizes")
        bounds.check_clip(count, height, width)

    return check


def _chosen(part, folder, video_processor, bounds):
    """The film of a part, which of its frames are seen, and how many it has a second."""
    names = part["video"]
    where = bounds.path(folder, names) if isinstance(names, str) else [bounds.path(folder, name) for name in names]
    film = _open(where, bounds)
    bounds.check_frames(film.frames)
    fps = part.get("fps")
    raw_fps = next((rate for rate in (part.get("raw_fps"), film.fps, fps) if rate is not None), None)
    if film.frames == 0:
        raise ValueError(f"video {names}: no frames in it")
    if raw_fps is None:
        raise ValueError(f"video {names}: it says no frame rate, and neither does the part (fps or raw_fps)")
    return film, video_processor.frame_indices(film.frames, raw_fps, fps=fps), raw_fps


def _open(where, bounds):
    if isinstance(where, list):
        return _pictures(where, bounds)
    if where.is_dir():
        inside = sorted(path for path in where.iterdir() if path.suffix.lower() in IMAGES)
        return _pictures([bounds.path(where, path.name) for path in inside], bounds)
    if not where.is_file():
        raise FileNotFoundError(f"video {where}: no such file or folder")
    suffix = where.suffix.lower()
    if suffix in ARRAYS:
        return _array(where, bounds)
    return _animation(where, bounds) if suffix in ANIMATIONS else _film(where, bounds)


def _pictures(paths, bounds):
    def read(indices, check):
        frames = {}
        for path in {paths[index] for index in indices}:
            with bounds.picture(path) as image:
                check(image.height, image.width)
                frames[path] = np.asarray(image.convert("RGB"))
        return [frames[paths[index]] for index in indices]

    return _Film(len(paths), None, read, lambda: _picture_size(paths[0], bounds))


def _picture_size(path, bounds):
    with bounds.picture(path) as image:
        return image.height, image.width


def _header(packed, name):
    """(shape, dtype) that a member of an .npz says it has; ValueError where it is not as NumPy packs an array."""
    if packed.getinfo(name).compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{name} is packed otherwise than by NumPy")  # others unpack without a limit
    with packed.open(name) as file:
        head = io.BytesIO(file.read(HEADER))
    version = np.lib.format.read_magic(head)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(head)
    return shape, dtype


def _check_packed(path, packed, bounds):
    """ValueError where an .npz holds something else than frames and their rate, or too many, before it is unpacked."""
    names = packed.namelist()
    if "frames.npy" not in names:
        raise ValueError(f"video {path}: no array called frames in it")
    if {"frames", "fps"} & set(names):
        raise ValueError(f"video {path}: frames and fps are arrays, frames.npy and fps.npy")
    shape, dtype = _header(packed, "frames.npy")
    _check_frames(path, shape, dtype)
    bounds.check_frames(shape[0])
    bounds.check_clip(*shape[:3])
    if "fps.npy" in names:
        rate, dtype = _header(packed, "fps.npy")
        if rate not in ((), (1,)) or dtype.kind not in "iuf" or packed.getinfo("fps.npy").file_size > HEADER:
            raise ValueError(f"video {path}: its fps is not one number")


def _check_frames(path, shape, dtype):
    if len(shape) != 4 or dtype != np.uint8 or shape[-1] != 3 or min(shape) < 0:
        raise ValueError(f"video {path}: expected uint8 [n, height, width, 3], found {dtype} {shape}")


def _array(path, bounds):
    stored, fps = np.load(path, mmap_mode="r"), None  # an .npz is told by what is in it, whatever its name
    if isinstance(stored, np.lib.npyio.NpzFile):
        with stored as named:
            _check_packed(path, named.zip, bounds)
            fps = float(named["fps.npy"].item()) if "fps.npy" in named.zip.namelist() else None
            stored = named["frames.npy"]
    _check_frames(path, stored.shape, stored.dtype)
    bounds.check_size(*stored.shape[1:3])

    def read(indices, check):
        check(*stored.shape[1:3])
        return [np.array(stored[index]) for index in indices]

    return _Film(len(stored), fps, read, lambda: stored.shape[1:3])


def _animation(path, bounds):
    """The rate is the mean one: an animation may show each frame for a time of its own."""
    with bounds.picture(path) as image:
        count = getattr(image, "n_frames", 1)
        bounds.check_frames(count)
        shown = []
        for frame in ImageSequence.Iterator(image):
            bounds.check_size(frame.height, frame.width)  # a frame of a GIF may be larger than the first
            frame.load()  # a WebP tells how long a frame is shown once it is decoded
            shown.append(frame.info.get("duration", 0))

    def read(indices, check):
        frames = []
        with bounds.picture(path) as image:
            for index in indices:
                image.seek(index)
                check(image.height, image.width)
                frames.append(np.asarray(image.convert("RGB")))
        return frames

    rate = 1000 * count / sum(shown) if sum(shown) > 0 else None
    return _Film(count, rate, read, lambda: _picture_size(path, bounds))


def _film(path, bounds):
    try:
        import av
    except ImportError:
        raise MissingLibrary(f"video {path}: reading it needs PyAV (pip install av)") from None

    def opened():
        return av.open(str(path), options={"format_whitelist": CONTAINERS, "protocol_whitelist": "file"})

    def decoded(container):
        for number, frame in enumerate(container.decode(video=0)):
            bounds.check_frames(number + 1)
            bounds.check_size(frame.height, frame.width)
            yield frame

    def decode(wanted, check):
        with opened() as container:
            for index, frame in enumerate(decoded(container)):
                if index in wanted:
                    check(frame.height, frame.width)
                    yield frame.to_ndarray(format="rgb24")
                if index == max(wanted):
                    return

    with opened() as container:
        if not container.streams.video:
            raise ValueError(f"video {path}: no frames in it")
        stream = container.streams.video[0]
        rate = stream.average_rate
        size = (stream.height, stream.width)
        bounds.check_size(*size)
        count = stream.frames or sum(1 for _ in decoded(container))
    read = lambda indices, check: list(decode(set(indices), check))  # noqa: E731
    return _Film(count, float(rate) if rate else None, read, lambda: size)
