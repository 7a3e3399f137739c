"""What files hold clips, and which of their frames are read."""

import sys

import numpy as np
import pytest
from PIL import Image

from automodel_c.data.clips import check_clip_part, clip_shape, read_clip


@pytest.fixture
def video(processor):
    return processor.video_processor  # two frames a second, four of them at least


@pytest.fixture
def frames():
    """Ten frames of one grey each, which no loss of an encoder confuses."""
    return np.repeat(np.arange(10, dtype=np.uint8)[:, None, None, None] * 20 + 10, 32 * 48 * 3).reshape(10, 32, 48, 3)


def pictures(frames, folder):
    folder.mkdir()
    names = []
    for index, frame in enumerate(frames):
        Image.fromarray(frame).save(folder / f"{index:03d}.png")
        names.append(f"{folder.name}/{index:03d}.png")
    return names


def greys(clip):
    return [round((int(frame[16, 24, 0]) - 10) / 20) for frame in clip.frames]


def test_read_clip_of_pictures(tmp_path, frames, video):
    names = pictures(frames, tmp_path / "shots")
    for what in (names, "shots"):
        clip = read_clip({"video": what, "raw_fps": 5}, tmp_path, video)
        assert greys(clip) == [0, 3, 6, 9] and clip.seconds == [0.3, 1.5]
        assert clip.frames.shape == (4, 32, 48, 3) and clip.frames.dtype == np.uint8
    clip = read_clip({"video": names, "fps": 2}, tmp_path, video)
    assert greys(clip) == list(range(10)), "pictures that were taken at two frames a second are all seen"
    assert clip.seconds == [0.25, 1.25, 2.25, 3.25, 4.25]
    clip = read_clip({"video": names[:3], "fps": 2}, tmp_path, video)
    assert greys(clip) == [0, 1, 1, 2], "an odd number is rounded up"


def test_read_clip_in_the_order_given(tmp_path, frames, video):
    names = pictures(frames, tmp_path / "shots")
    clip = read_clip({"video": [names[i] for i in (7, 7, 2, 2)], "fps": 2}, tmp_path, video)
    assert greys(clip) == [7, 7, 2, 2]


def test_read_clip_of_an_array(tmp_path, frames, video):
    np.save(tmp_path / "a.npy", frames)
    assert greys(read_clip({"video": "a.npy", "raw_fps": 5}, tmp_path, video)) == [0, 3, 6, 9]
    np.savez(tmp_path / "a.npz", frames=frames, fps=np.float64(5))
    assert greys(read_clip({"video": "a.npz"}, tmp_path, video)) == [0, 3, 6, 9]
    assert len(read_clip({"video": "a.npz", "fps": 4}, tmp_path, video).frames) == 8, "fps is what is seen"
    np.savez(tmp_path / "b.npz", other=frames)
    with pytest.raises(ValueError, match="no array called frames"):
        read_clip({"video": "b.npz"}, tmp_path, video)


@pytest.mark.parametrize("suffix", ["gif", "webp", "png"])
def test_read_clip_of_an_animation(tmp_path, frames, video, suffix):
    first, *rest = [Image.fromarray(frame) for frame in frames]
    first.save(tmp_path / f"a.{suffix}", save_all=True, append_images=rest, duration=200, loop=0)
    clip = read_clip({"video": f"a.{suffix}"}, tmp_path, video)
    assert greys(clip) == [0, 3, 6, 9] and clip.seconds == [0.3, 1.5], "five frames a second, by the file"
    assert greys(read_clip({"video": f"a.{suffix}", "raw_fps": 2}, tmp_path, video)) == list(range(10))


def test_read_clip_of_a_film(tmp_path, frames, video):
    av = pytest.importorskip("av", reason="PyAV is not installed")
    with av.open(str(tmp_path / "a.mp4"), "w") as container:
        stream = container.add_stream("mpeg4", rate=5)
        stream.width, stream.height, stream.pix_fmt = 48, 32, "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    clip = read_clip({"video": "a.mp4"}, tmp_path, video)
    assert greys(clip) == [0, 3, 6, 9] and clip.seconds == [0.3, 1.5]
    assert clip_shape({"video": "a.mp4"}, tmp_path, video) == (4, 32, 48, clip.seconds)


def test_read_clip_of_a_film_says_what_to_install(tmp_path, video, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    (tmp_path / "a.mp4").write_bytes(b"")
    with pytest.raises(RuntimeError, match=r"a\.mp4: reading it needs PyAV \(pip install av\)"):
        read_clip({"video": "a.mp4"}, tmp_path, video)


def test_read_clip_refuses(tmp_path, frames, video):
    names = pictures(frames, tmp_path / "shots")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty: no frames in it"):
        read_clip({"video": "empty", "fps": 2}, tmp_path, video)
    with pytest.raises(ValueError, match="shots: it says no frame rate, and neither does the part"):
        read_clip({"video": "shots"}, tmp_path, video)
    Image.new("RGB", (16, 16)).save(tmp_path / "small.png")
    with pytest.raises(ValueError, match="frames of different sizes"):
        read_clip({"video": [*names[:3], "small.png"], "fps": 2}, tmp_path, video)
    np.save(tmp_path / "a.npy", frames.astype(np.float32))
    with pytest.raises(ValueError, match=r"expected uint8 \[n, height, width, 3\], found float32"):
        read_clip({"video": "a.npy", "fps": 2}, tmp_path, video)
    with pytest.raises(FileNotFoundError, match="gone"):
        read_clip({"video": "gone.gif"}, tmp_path, video)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"video": 5}, "without a file name or a list of them"),
        ({}, "without a file name or a list of them"),
        ({"video": []}, "without a file name or a list of them"),
        ({"video": ["a.png", 1]}, "without a file name or a list of them"),
        ({"video": "a.gif", "fps": 0}, "whose fps is 0"),
        ({"video": "a.gif", "fps": "2"}, "whose fps is '2'"),
        ({"video": "a.gif", "raw_fps": True}, "whose raw_fps is True"),
        ({"video": "a.gif", "nframes": 4}, "with 'nframes': only fps, raw_fps, type, video are read"),
    ],
)
def test_check_clip_part(part, words):
    with pytest.raises(ValueError, match=words):
        check_clip_part({"type": "video", **part})
