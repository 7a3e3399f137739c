"""What a data set cannot make a reader do: leave its folder, start a program, ask an address, or fill the memory."""

import io
import json
import pickle
import struct
import zipfile
import zlib

import numpy as np
import pytest
from PIL import Image

from automodel_c.data.bounds import Bounds
from automodel_c.data.build import build_dataset
from automodel_c.data.chat import ChatDataset
from automodel_c.data.clips import clip_shape, read_clip
from automodel_c.data.records import BadSample
from automodel_c.recipes.schema import Dataset


def picture(path, size=(40, 40)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (9, 9, 9)).save(path)


def dataset_of(folder, processor, *parts, **options):
    lines = []
    for part in parts:
        user = {"role": "user", "content": [part, {"type": "text", "text": "Which digit"}]}
        lines.append(json.dumps({"messages": [user, {"role": "assistant", "content": "1"}]}))
    (folder / "train.jsonl").write_text("\n".join(lines))
    return ChatDataset(folder, processor, **options)


def image(name):
    return {"type": "image", "image": name}


def video(name):
    return {"type": "video", "video": name, "fps": 2}


def refused(dataset, words, index=0):
    for call in (dataset.size, dataset.__getitem__):
        with pytest.raises(BadSample, match=words):
            call(index)


def outside(tmp_path):
    """(folder of a data set, parts that lead out of it)."""
    folder = tmp_path / "data"
    picture(tmp_path / "secret.png")
    picture(tmp_path / "shots" / "0.png")
    picture(folder / "good.png")
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    (folder / "linked").symlink_to(tmp_path / "shots")
    (folder / "half").mkdir()
    (folder / "half" / "0.png").symlink_to(tmp_path / "secret.png")
    return folder, [
        image("../secret.png"), image(str(tmp_path / "secret.png")), image("link.png"), image("linked/0.png"),
        video("../shots"), video(["good.png", "../secret.png"]), video("linked"), video("half"),
    ]  # fmt: skip


def test_names_that_lead_out_of_the_folder(tmp_path, processor):
    folder, parts = outside(tmp_path)
    dataset = dataset_of(folder, processor, image("good.png"), image("./linked/../good.png"), *parts)
    assert dataset.size(0) and len(dataset[0]["image_grid_thw"]) == 1
    for index in range(2, len(dataset)):
        refused(dataset, r"is outside of .*dataset\.allow_paths_outside", index)
    allowed = dataset_of(folder, processor, *parts, bounds=Bounds(outside=True))
    for index in range(len(allowed)):
        assert allowed.size(index)[0] == len(allowed[index]["input_ids"])


def test_a_folder_that_is_a_link_itself(tmp_path, processor):
    picture(tmp_path / "real" / "a.png")
    (tmp_path / "data").symlink_to(tmp_path / "real")
    assert dataset_of(tmp_path / "data", processor, image("a.png"))[0]["image_grid_thw"].shape == (1, 3)


def png_that_claims(width, height):
    """A few bytes, as a picture of any size starts."""
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    chunk = lambda kind, data: struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))  # noqa: E731
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b"\0" * 1000))
        + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("size", [(12_000, 12_000), (40_000, 40_000), (2**31 - 1, 2**31 - 1)])
def test_a_picture_that_would_fill_the_memory(tmp_path, processor, size):
    """Between Pillow's warning and its error, and beyond."""
    (tmp_path / "bomb.png").write_bytes(png_that_claims(*size))
    refused(dataset_of(tmp_path, processor, image("bomb.png")), "pixels.*(more than|exceeds)")
    refused(dataset_of(tmp_path, processor, video(["bomb.png"])), "pixels.*(more than|exceeds)")


def test_the_recipe_sets_the_bounds(tmp_path, processor):
    picture(tmp_path / "a.png")
    dataset_of(tmp_path, processor, image("a.png"))
    section = Dataset(path_or_dataset=str(tmp_path), max_image_pixels=1600)
    assert build_dataset(section, processor, 0)[0]
    section.max_image_pixels = 1599
    refused(build_dataset(section, processor, 0), r"40 x 40 pixels are more than dataset\.max_image_pixels=1599")


def postscript(path):
    path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 40 40\n%%EndComments\nshowpage\n")


def test_a_picture_that_is_a_program(tmp_path, processor):
    """Pillow has PostScript drawn by another program."""
    postscript(tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as known:
        assert known.format == "EPS"
    refused(dataset_of(tmp_path, processor, image("a.png")), "UnidentifiedImageError")


@pytest.fixture
def frames():
    return np.zeros((10, 32, 48, 3), np.uint8)


def test_a_clip_of_too_many_frames(tmp_path, processor, frames):
    np.save(tmp_path / "a.npy", frames)
    np.savez_compressed(tmp_path / "a.npz", frames=frames, fps=np.float64(5))
    first, *rest = [Image.fromarray(frame + i) for i, frame in enumerate(frames)]
    first.save(tmp_path / "a.gif", save_all=True, append_images=rest, duration=200)
    film(tmp_path / "a.mp4", frames)
    film(tmp_path / "a.mkv", frames)
    (tmp_path / "shots").mkdir()
    for i, still in enumerate((first, *rest)):
        still.save(tmp_path / "shots" / f"{i}.png")
    for name in ("a.npy", "a.npz", "a.gif", "a.mp4", "a.mkv", "shots"):
        part, where = {"video": name, "raw_fps": 5}, (tmp_path, processor.video_processor)
        for call in (clip_shape, read_clip):
            assert call(part, *where, Bounds(max_clip_frames=10))
            with pytest.raises(ValueError, match=r"frames are more than dataset\.max_clip_frames=9"):
                call(part, *where, Bounds(max_clip_frames=9))
            with pytest.raises(ValueError, match=r"48 x 32 pixels are more than dataset\.max_(image|clip)_pixels"):
                call(part, *where, Bounds(max_image_pixels=1535, max_clip_pixels=1535))
            with pytest.raises(ValueError, match=r"pixels are more than dataset\.max_clip_pixels"):
                call(part, *where, Bounds(max_clip_pixels=4 * 1536 - 1))


def film(path, frames):
    av = pytest.importorskip("av", reason="PyAV is not installed: no film is read here")
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=5)
        stream.width, stream.height, stream.pix_fmt = frames.shape[2], frames.shape[1], "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())


def test_an_array_that_unpacks_to_more_than_memory(tmp_path, processor):
    """A kilobyte that says it is two tebibytes."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "|u1", "fortran_order": False, "shape": (1 << 20, 1 << 10, 1 << 10, 3)}
    )
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("frames.npy", header.getvalue() + b"\0" * 100_000)
    for call in (clip_shape, read_clip):
        with pytest.raises(ValueError, match=r"pixels are more than dataset\.max_clip_pixels"):
            call({"video": "a.npz", "fps": 2}, tmp_path, processor.video_processor)


def member(shape, descr="|u1", data=b"\0" * 1000):
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": descr, "fortran_order": False, "shape": shape})
    return header.getvalue() + data


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"frames.npy": member((1 << 43,))}, "expected uint8"),
        ({"frames.npy": member((1, 1, 1, 1, 1 << 43))}, "expected uint8"),
        ({"frames.npy": member((4, 32, 48, 1 << 30))}, "expected uint8"),
        ({"frames.npy": member((4, 32, 48, 3), f"|V{1 << 30}")}, "expected uint8"),
        ({"frames.npy": member((4, 32, 48, 3), "<f8")}, "expected uint8"),
        ({"frames.npy": member((-4, 32, 48, 3))}, "expected uint8"),
        ({"frames.npy": member((4, 1, 1, 3)), "frames": b"raw"}, r"frames\.npy and fps\.npy"),
        ({"frames": b"raw"}, "no array called frames"),
        ({"frames.npy": member((4, 1, 1, 3)), "fps": b"5"}, r"frames\.npy and fps\.npy"),
        ({"frames.npy": member((4, 1, 1, 3)), "fps.npy": member((1 << 43,))}, "fps is not one number"),
        ({"frames.npy": member((4, 1, 1, 3)), "fps.npy": member((), f"|V{1 << 30}")}, "fps is not one number"),
        ({"frames.npy": member((4, 1, 1, 3)), "fps.npy": member((), "<f8", bytes(1 << 20))}, "fps is not one number"),
        ({"frames.npy": b"\x93NUMPY\x02\x00\xff\xff\xff\x7f" + bytes(1 << 20)}, "header"),
    ],
)
@pytest.mark.parametrize("name", ["a.npz", "a.npy"])
def test_an_archive_whose_members_are_large(tmp_path, processor, monkeypatch, name, members, words):
    """By their axes, their dtype, their name, or what stands beside them; by whatever name the archive goes."""
    with zipfile.ZipFile(tmp_path / name, "w", zipfile.ZIP_DEFLATED) as packed:
        for key, data in members.items():
            packed.writestr(key, data)
    monkeypatch.setattr(np.lib.npyio.NpzFile, "__getitem__", lambda *_: pytest.fail("it was unpacked"))
    for call in (clip_shape, read_clip):
        with pytest.raises(ValueError, match=words):
            call({"video": name, "raw_fps": 2}, tmp_path, processor.video_processor)


@pytest.mark.parametrize("packing", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_an_archive_that_is_packed_without_a_limit(tmp_path, processor, packing):
    with zipfile.ZipFile(tmp_path / "a.npz", "w", packing) as packed:
        packed.writestr("frames.npy", member((4, 1, 1, 3)))
    with pytest.raises(ValueError, match=r"frames\.npy is packed otherwise than by NumPy"):
        clip_shape({"video": "a.npz", "fps": 2}, tmp_path, processor.video_processor)


def gif_of_two_sizes(path, small, large):
    """Frames `small`, then one `large`, which is larger than the file said at its begin."""
    files = []
    for size, count in ((small, 3), (large, 1)):
        stills = [Image.new("L", size, 9 * i) for i in range(1, count + 1)]
        file = io.BytesIO()
        stills[0].save(file, "GIF", save_all=True, append_images=stills[1:], duration=200)
        files.append(file.getvalue())
    second = files[1]
    table = 3 << (second[10] & 7) + 1 if second[10] & 128 else 0
    path.write_bytes(files[0][:-1] + second[13 + table :])


def film_of_two_sizes(path, frames):
    av = pytest.importorskip("av", reason="PyAV is not installed: no film is read here")
    parts = []
    for scale in (1, 2):
        with av.open(str(path), "w") as container:
            stream = container.add_stream("mpeg2video", rate=25)
            stream.width, stream.height, stream.pix_fmt = 48 * scale, 32 * scale, "yuv420p"
            for frame in frames.repeat(scale, 1).repeat(scale, 2):
                container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
            container.mux(stream.encode())
        parts.append(path.read_bytes())
    path.write_bytes(b"".join(parts))


def test_a_clip_whose_later_frames_are_larger(tmp_path, processor, frames, monkeypatch):
    """The first frame, or a header, tells the size; others are held against it before their pixels are made."""
    names = ["0.png", "1.png", "2.png", "3.png"]
    for name in names:
        picture(tmp_path / name, (16, 16) if name != "3.png" else (64, 64))
    gif_of_two_sizes(tmp_path / "a.gif", (48, 32), (96, 64))
    film_of_two_sizes(tmp_path / "a.ts", frames)
    made, convert = set(), Image.Image.convert
    monkeypatch.setattr(Image.Image, "convert", lambda image, mode: made.add(image.size) or convert(image, mode))
    where = tmp_path, processor.video_processor
    for what in (names, "a.gif", "a.ts"):
        made.clear()
        with pytest.raises(ValueError, match="frames of different sizes"):
            read_clip({"video": what, "raw_fps": 2}, *where)
        assert len(made) <= 1, "pixels of two sizes were made"
    for call in (clip_shape, read_clip):
        with pytest.raises(ValueError, match=r"96 x 64 pixels are more than dataset\.max_image_pixels"):
            call({"video": "a.gif", "raw_fps": 2}, *where, Bounds(max_image_pixels=48 * 32))


class Bomb:
    def __reduce__(self):
        return pytest.fail, ("a pickle ran",)


def test_an_array_that_is_a_pickle(tmp_path, processor):
    np.save(tmp_path / "a.npy", np.array([Bomb()], dtype=object), allow_pickle=True)
    np.savez(tmp_path / "a.npz", frames=np.array([Bomb()], dtype=object), allow_pickle=True)
    (tmp_path / "b.npy").write_bytes(pickle.dumps(Bomb()))
    for name in ("a.npy", "a.npz", "b.npy"):
        refused(dataset_of(tmp_path, processor, video(name)), "ValueError")


@pytest.mark.parametrize("name", ["list.mp4", "list.m3u8"])
def test_a_film_that_names_others(tmp_path, processor, frames, name):
    """A playlist would have ffmpeg read any file, or an address."""
    av = pytest.importorskip("av", reason="PyAV is not installed: no film is read here")
    film(tmp_path / "a.ts", frames)
    playlist = f"#EXTM3U\n#EXT-X-TARGETDURATION:2\n#EXTINF:2,\n{tmp_path}/a.ts\n#EXT-X-ENDLIST\n"
    (tmp_path / name).write_text(playlist)
    if name.endswith("m3u8"):
        with av.open(str(tmp_path / name)) as followed:
            assert followed.streams.video, "without a list of demuxers it is followed"
    refused(dataset_of(tmp_path, processor, video(name)), "list.*Invalid|Invalid.*list")
