"""Where conversations come from, what is told of them before a pixel is read, and what happens to bad ones."""

import io
import json
import pickle
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from automodel_c.data import packing
from automodel_c.data.chat import ChatDataset
from automodel_c.data.packing import PackedDataset, build_packs
from automodel_c.data.records import BadSample, open_records
from automodel_c.models.processor import build_processor
from automodel_c.recipes.schema import PackedSequence

from .conftest import VISION


def conversation(*parts, answer="5"):
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "Which digit?"}]},
            {"role": "assistant", "content": answer}]  # fmt: skip


def picture(width=32, height=32, grey=100, kind="PNG"):
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (grey, grey, 255 - grey)).save(buffer, kind)
    return buffer.getvalue()


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def mixed(tmp_path):
    """Images of several sizes, clips of every kind that needs no film reader, several turns."""
    for i, (width, height) in enumerate([(32, 32), (90, 20), (17, 250)]):
        (tmp_path / f"{i}.png").write_bytes(picture(width, height))
    np.save(tmp_path / "clip.npy", np.zeros((7, 40, 24, 3), np.uint8))
    np.savez(tmp_path / "clip.npz", frames=np.zeros((5, 24, 40, 3), np.uint8), fps=4.0)
    frames = [Image.new("L", (30, 20), 40 * i) for i in range(5)]
    frames[0].save(tmp_path / "clip.gif", save_all=True, append_images=frames[1:], duration=200)
    image = lambda i: {"type": "image", "image": f"{i}.png"}  # noqa: E731
    video = lambda name, **more: {"type": "video", "video": name, **more}  # noqa: E731
    rows = [
        conversation(image(0)),
        conversation(image(1), image(2), answer="five " * 9),
        conversation(video("clip.npy", fps=2)),
        conversation(video("clip.npz"), image(0), video("clip.gif", fps=3)),
        conversation(video(["0.png", "0.png", "0.png"], fps=2)),
        conversation(image(0)) + conversation(image(2)),
        conversation(),
    ]
    return write_lines(tmp_path / "train.jsonl", [{"messages": row} for row in rows])


def test_sizes_are_those_of_the_samples(mixed, processor):
    dataset = ChatDataset(mixed, processor)
    for i in range(len(dataset)):
        sample = dataset[i]
        patches = len(sample["pixel_values"]) + len(sample["pixel_values_videos"])
        assert dataset.size(i) == (sample["input_ids"].numel(), patches)


def test_sizes_of_images_that_are_not_resized(tmp_path):
    """A model directory may say so; then the bounds of an area bound nothing."""
    processor = build_processor(VISION, max_pixels=1024)
    processor.image_processor.do_resize = False
    (tmp_path / "a.png").write_bytes(picture(64, 48))
    rows = [{"messages": conversation({"type": "image", "image": "a.png"})}]
    dataset = ChatDataset(write_lines(tmp_path / "train.jsonl", rows), processor)
    assert dataset.size(0) == (dataset[0]["input_ids"].numel(), 48)


def test_packs_are_the_same_however_they_are_measured(mixed, processor, monkeypatch):
    dataset = ChatDataset(mixed, processor)
    plain = PackedDataset([dataset[i] for i in range(len(dataset))], pack_size=200)
    assert PackedDataset(dataset, pack_size=200).packs == plain.packs
    assert PackedDataset(dataset, pack_size=200, workers=2).packs == plain.packs

    class Group:
        def __init__(self, rank):
            self.rank, self.size = lambda: rank, lambda: 3

    shares = []

    def note(parts, mine, group):
        shares.append(mine)
        parts[:] = [mine] * 3

    monkeypatch.setattr(packing.dist, "all_gather_object", note)
    for rank in range(3):
        packing.measure(dataset, 0, Group(rank))
    assert [size for share in shares for size in share] == packing.measure(dataset) and all(shares)

    def gather(parts, mine, group):
        assert mine == shares[group.rank()]
        parts[:] = shares

    monkeypatch.setattr(packing.dist, "all_gather_object", gather)
    assert PackedDataset(dataset, pack_size=200, group=Group(1)).packs == plain.packs


def test_a_sample_that_grew_since_it_was_measured(tmp_path):
    """Its pack would be longer than any."""
    processor = build_processor(VISION, min_pixels=256, max_pixels=4096)
    (tmp_path / "a.png").write_bytes(picture(16, 16))
    rows = [{"messages": conversation({"type": "image", "image": "a.png"})}]
    packs = PackedDataset(ChatDataset(write_lines(tmp_path / "train.jsonl", rows), processor), pack_size=100)
    length = packs[0]["input_ids"].numel()
    (tmp_path / "a.png").write_bytes(picture(64, 64))
    with pytest.raises(ValueError, match=f"sample 0 has {length + 15} tokens, {length} when it was measured"):
        packs[0]


def test_a_line_about_the_packs(mixed, processor):
    packs = PackedDataset(ChatDataset(mixed, processor), pack_size=60, drop_long_samples=True)
    most = max(packs.patches)
    assert packs.describe().startswith(f"{len(packs)} packs of 60 tokens, {packs.fill:.1%} full, of ")
    assert f"(at most {most:,})" in packs.describe() and f"{packs.dropped} samples too long" in packs.describe()


def test_media_in_columns(tmp_path, processor):
    """Parts that name nothing take the row's images and videos in order."""
    for i in range(3):
        (tmp_path / f"{i}.png").write_bytes(picture(grey=60 * i))
    image, video = {"type": "image"}, {"type": "video"}
    named = [conversation(image | {"image": "2.png"}, image | {"image": "0.png"}),
             conversation(video | {"video": ["0.png", "1.png"], "fps": 2})]  # fmt: skip
    columns = [{"messages": conversation(image, image), "images": ["2.png", "0.png"]},
               {"messages": conversation(video), "videos": [{"video": ["0.png", "1.png"], "fps": 2}]}]  # fmt: skip
    a = ChatDataset(write_lines(tmp_path / "a.jsonl", [{"messages": m} for m in named]), processor)
    b = ChatDataset(write_lines(tmp_path / "b.jsonl", columns), processor)
    assert len(a) == len(b) == 2
    for i in range(2):
        assert all(torch.equal(x, y) for x, y in zip(a[i].values(), b[i].values(), strict=True))
    wrong = write_lines(tmp_path / "c.jsonl", [{"messages": conversation(image), "images": ["2.png", "0.png"]}])
    with pytest.raises(BadSample, match=r"line 1: .*1 image parts without a file name, images has 2 elements"):
        ChatDataset(wrong, processor)


ROWS = [
    {
        "messages": conversation({"type": "image"}, answer=[{"type": "text", "text": str(i)}]),
        "images": [{"bytes": picture(grey=20 * i), "path": None}],
    }
    for i in range(7)
]


def table():
    pyarrow = pytest.importorskip("pyarrow")
    return pyarrow, pyarrow.Table.from_pylist(ROWS)


def write_parquet(folder):
    _, rows = table()
    import pyarrow.parquet

    (folder / "data").mkdir()
    pyarrow.parquet.write_table(rows.slice(0, 4), folder / "data/train-00000-of-00002.parquet", row_group_size=3)
    pyarrow.parquet.write_table(rows.slice(4), folder / "data/train-00001-of-00002.parquet")
    pyarrow.parquet.write_table(rows.slice(6), folder / "data/test-00000-of-00001.parquet")


def write_arrow(folder):
    """As `Dataset.save_to_disk` and `DatasetDict.save_to_disk` write it."""
    pyarrow, rows = table()
    for split, part in (("train", rows), ("test", rows.slice(6))):
        (folder / split).mkdir()
        with pyarrow.OSFile(str(folder / split / "data-00000-of-00001.arrow"), "wb") as sink:
            with pyarrow.ipc.new_stream(sink, part.schema) as writer:
                writer.write_table(part, max_chunksize=3)
        (folder / split / "state.json").write_text("{}")


@pytest.mark.parametrize("write", [write_parquet, write_arrow], ids=["parquet", "arrow"])
def test_columns_of_images_in_files(tmp_path, processor, write):
    write(tmp_path)
    dataset = ChatDataset(tmp_path, processor)
    assert len(dataset) == 7 and len(ChatDataset(tmp_path, processor, split="test")) == 1
    for order in (range(7), [6, 0, 5, 3]):  # not only one group after another
        for i in order:
            assert dataset[i]["pixel_values"].shape == (16, dataset[i]["pixel_values"].shape[1])
            assert dataset.size(i) == (dataset[i]["input_ids"].numel(), 16)
    greys = [float(dataset[i]["pixel_values"][0, 0]) for i in range(7)]
    assert greys == sorted(greys) and len(set(greys)) == 7
    loader = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=2)
    assert [float(sample["pixel_values"][0, 0]) for sample in loader] == greys, "read in other processes too"


def test_a_row_that_is_no_conversation(tmp_path, processor):
    pytest.importorskip("pyarrow")
    import pyarrow.parquet

    rows = [*ROWS[:2], {"messages": [{"role": "user", "content": "?"}], "images": None}]
    rows = [{**row, "messages": json.dumps(row["messages"])} for row in rows]  # a column of text will do
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    dataset = ChatDataset(tmp_path / "a.parquet", processor)
    assert dataset[1]["pixel_values"].shape[0] == 16
    with pytest.raises(BadSample, match=r"a.parquet, row 2: not a conversation .*no assistant turn"):
        dataset[2]
    assert len(PackedDataset(ChatDataset(tmp_path, processor, skip_bad=True), pack_size=999).packs[0]) == 2


def write_rows(path, *texts, format="parquet"):
    """A row each, whose answer is the text."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = pyarrow.Table.from_pylist([{"messages": json.dumps(conversation(answer=text))} for text in texts])
    path.parent.mkdir(parents=True, exist_ok=True)
    if format == "parquet":
        return parquet.write_table(rows, path)
    with pyarrow.OSFile(str(path), "wb") as sink, getattr(pyarrow.ipc, f"new_{format}")(sink, rows.schema) as writer:
        writer.write_table(rows)


def answers(path, split="train", **options):
    records = open_records(path, split, **options)
    return [records[i].messages[-1]["content"] for i in range(len(records))]


@pytest.mark.parametrize("folder", ["", "data"])
def test_a_split_is_not_one_that_begins_alike(tmp_path, folder):
    for name in ("train-00000-of-00001", "train_extra-00000-of-00001", "trainer", "validation.v2"):
        write_rows(tmp_path / folder / f"{name}.parquet", name)
    assert answers(tmp_path) == ["train-00000-of-00001"]
    assert answers(tmp_path, "train_extra") == ["train_extra-00000-of-00001"]
    assert answers(tmp_path, "validation") == ["validation.v2"]
    for split in ("val", "test"):
        with pytest.raises(ValueError, match=f"no JSONL, Parquet or Arrow file of split '{split}'"):
            open_records(tmp_path, split)


def test_files_that_name_no_split_are_all_of_it(tmp_path):
    for name in ("0000", "0001", "values"):
        write_rows(tmp_path / f"{name}.parquet", name)
    assert answers(tmp_path) == ["0000", "0001", "values"]


def test_what_datasets_keeps_beside_the_data_is_no_data(tmp_path):
    for name in ("data-00000-of-00001", "cache-0123456789abcdef", "._data-00000-of-00001"):
        write_rows(tmp_path / f"train/{name}.arrow", name, format="stream")
    assert answers(tmp_path) == answers(tmp_path / "train") == ["data-00000-of-00001"]


def test_either_arrow_format(tmp_path):
    for format in ("stream", "file"):
        write_rows(tmp_path / f"{format}.arrow", "a", "b", format=format)
        assert answers(tmp_path / f"{format}.arrow") == ["a", "b"]


def test_a_damaged_file_is_named(tmp_path):
    write_rows(tmp_path / "a.parquet", "a")
    for name, content in (("b.parquet", b"PAR1"), ("b.arrow", b"ARROW1"), ("c.arrow", b"\xff" * 99)):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=rf"{name}: \w+"):
            open_records(tmp_path)
        (tmp_path / name).unlink()


def test_rows_do_not_travel_to_other_processes(tmp_path):
    write_rows(tmp_path / "a.parquet", "a" * 100_000, "b")
    records = open_records(tmp_path)
    assert records[1].messages[-1]["content"] == "b"
    there = pickle.dumps(records)
    assert len(there) < 10_000 and pickle.loads(there)[1] == records[1]


@pytest.mark.parametrize("line", [b"\xff\xfe", b"[" * 100_000, "{}".encode("utf-16")], ids=["bytes", "deep", "utf-16"])
def test_a_line_that_is_no_text(tmp_path, line):
    good = [json.dumps({"messages": conversation(answer=answer)}).encode() for answer in "ab"]
    path = tmp_path / "train.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join([good[0], line.replace(b"\n", b" "), good[1]]))
    with pytest.raises(BadSample, match="line 2: not a conversation"):
        open_records(path)
    assert answers(path, skip_bad=True) == ["a", "b"], "the mark before the first line is no part of it"


@pytest.mark.parametrize("column", ["ab", {"bytes": None, "path": "0.png"}], ids=["text", "structure"])
def test_a_column_of_single_images(tmp_path, column):
    """Its letters or keys are no file names."""
    row = {"messages": conversation({"type": "image"}, {"type": "image"}), "images": column}
    with pytest.raises(BadSample, match=rf"images is {type(column).__name__}, a list is needed"):
        open_records(write_lines(tmp_path / "train.jsonl", [row]))


def test_dealt_images_stay_in_their_files(tmp_path, processor):
    """Each is read when it is asked for, and a bad row has none to deal."""
    pytest.importorskip("pyarrow")
    import pyarrow.parquet

    bad = {"messages": [{"role": "user", "content": [{"type": "image", "text": None}]}], "images": ROWS[0]["images"]}
    rows = [{**row, "messages": json.dumps(row["messages"])} for row in (*ROWS[:3], bad, *ROWS[3:])]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=3)
    with pytest.raises(BadSample, match="row 3"):
        ChatDataset(tmp_path, processor, shuffle_images=True)
    plain, dealt = (ChatDataset(tmp_path, processor, shuffle_images=s, seed=1, skip_bad=True) for s in (False, True))
    greys = [[float(data[i]["pixel_values"][0, 0]) for i in range(8) if i != 3] for data in (plain, dealt)]
    assert greys[0] != greys[1] and greys[0] == sorted(greys[1])
    assert len(pickle.dumps(dealt.dealt)) < 1000


def test_stored_bytes_that_are_no_image(tmp_path, processor):
    """The same words each time, so that a warning comes once."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    row = {**ROWS[0], "images": [{"bytes": b"junk", "path": None}]}
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "a.parquet")
    dataset = ChatDataset(tmp_path, processor)
    for call in (dataset.size, dataset.__getitem__):
        with pytest.raises(BadSample, match=r"row 0: UnidentifiedImageError: cannot identify an image of 4 bytes$"):
            call(0)


def test_without_pyarrow(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(RuntimeError, match=r"a.parquet: reading it needs pyarrow \(pip install pyarrow\)"):
        open_records(tmp_path)


def test_no_file(tmp_path):
    with pytest.raises(ValueError, match="no JSONL, Parquet or Arrow file of split 'train' at"):
        open_records(tmp_path)
    with pytest.raises(ValueError, match="no JSONL, Parquet or Arrow file"):
        open_records(tmp_path / "none.jsonl")


@pytest.fixture
def damaged(tmp_path):
    """Six conversations, of which the second, third and fifth have media that cannot be read, each in its own way."""
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, "JPEG")
    (tmp_path / "good.jpg").write_bytes(buffer.getvalue())
    (tmp_path / "cut.jpg").write_bytes(buffer.getvalue()[:-1000])  # its header is whole
    (tmp_path / "text.png").write_text("not an image")
    (tmp_path / "cut.gif").write_bytes(b"GIF89a")
    image = lambda name: {"type": "image", "image": name}  # noqa: E731
    rows = [image("good.jpg"), image("text.png"), image("gone.jpg"), image("good.jpg"),
            {"type": "video", "video": "cut.gif"}, image("cut.jpg")]  # fmt: skip
    return write_lines(tmp_path / "train.jsonl", [{"messages": conversation(part)} for part in rows])


@pytest.mark.parametrize("shape, dtype", [((3, 40, 40, 1), "u1"), ((3, 40, 40, 3), "f4"), ((3, 40), "u1"), ((), "u1")])
def test_a_size_of_an_array_that_is_no_clip(tmp_path, processor, shape, dtype):
    np.save(tmp_path / "a.npy", np.zeros(shape, dtype))
    rows = [{"messages": conversation({"type": "video", "video": "a.npy", "fps": 2})}]
    dataset = ChatDataset(write_lines(tmp_path / "train.jsonl", rows), processor)
    for call in (dataset.size, dataset.__getitem__):
        with pytest.raises(BadSample, match=r"a.npy: expected uint8 \[n, height, width, 3\], found"):
            call(0)


def test_bad_samples_are_named(damaged, processor):
    dataset = ChatDataset(damaged, processor)
    words = {1: "UnidentifiedImageError", 2: "FileNotFoundError", 4: "Error", 5: "truncated"}
    for index, word in words.items():
        with pytest.raises(BadSample, match=f"train.jsonl, line {index + 1}: .*{word}"):
            dataset[index]
    assert dataset.size(5) == dataset.size(0), "what a header does not show"
    with pytest.raises(BadSample, match="line 2: UnidentifiedImageError"):
        PackedDataset(dataset, pack_size=999)


def test_bad_samples_are_skipped_by_choice(damaged, processor):
    with open(damaged, "a") as file:
        file.write("{\n")
    with pytest.warns(UserWarning, match="left out: .*line 7: not a conversation"):
        dataset = ChatDataset(damaged, processor, skip_bad=True)
    assert dataset.records.bad == [dataset.records.bad[0]] and "line 7: not a conversation" in dataset.records.bad[0]
    packs = build_packs(dataset, PackedSequence(pack_size=999, enabled=True), shuffle=True)
    assert sorted(packs.packs[0]) == [0, 3, 5] and len(packs.bad) == 3
    assert "3 bad samples, first " in packs.describe() and "line 2" in packs.describe()
    with pytest.warns(UserWarning, match="left out: .*line 6"):
        pack = packs[0]
    dummy = packs.packs[0].index(5) + 1
    assert pack["doc_ids"].bincount()[dummy] == 1 and (pack["labels"][pack["doc_ids"] == dummy] == -100).all()
    with pytest.warns(UserWarning, match="left out: .*line 2"):
        assert dataset[1]["labels"].tolist() == [-100]


def test_an_image_of_a_kind_that_pillow_does_not_read(tmp_path, processor, monkeypatch):
    """Pillow says so with NotImplementedError, a RuntimeError as a missing library is."""
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    rows = [{"messages": conversation({"type": "image", "image": "a.png"})}]
    dataset = ChatDataset(write_lines(tmp_path / "train.jsonl", rows), processor)

    def unknown(*_, **__):
        raise NotImplementedError("unknown pixel format")

    monkeypatch.setattr(Image, "open", unknown)
    for call in (dataset.size, dataset.__getitem__):
        with pytest.raises(BadSample, match="line 1: NotImplementedError"):
            call(0)


def test_a_missing_library_is_no_bad_sample(tmp_path, processor, monkeypatch):
    """Every film would be left out in silence."""
    (tmp_path / "a.mp4").write_bytes(b"")
    rows = [{"messages": conversation({"type": "video", "video": "a.mp4", "fps": 2})}]
    dataset = ChatDataset(write_lines(tmp_path / "train.jsonl", rows), processor, skip_bad=True)
    monkeypatch.setitem(sys.modules, "av", None)
    for call in (dataset.size, dataset.__getitem__):
        with pytest.raises(RuntimeError, match="needs PyAV"):
            call(0)
