import json

import pytest
from PIL import Image

from automodel_c.data.digits import write_digits


def _lines(path):
    return [json.loads(line)["messages"] for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("digits") / "a"
    write_digits(folder)
    return folder


@pytest.fixture(scope="module")
def splits(folder):
    """For each split, its conversations about images and those about clips."""
    found = {}
    for split in ("train", "held_out"):
        lines = _lines(folder / f"{split}.jsonl")
        found[split] = [[m for m in lines if m[0]["content"][0]["type"] == kind] for kind in ("image", "video")]
    return found


def test_write_digits(folder, splits):
    train, held_out = splits["train"][0], splits["held_out"][0]
    assert len(train) + len(held_out) == 1797
    images = [m[0]["content"][0]["image"] for m in train + held_out]
    assert len(set(images)) == 1797, "a digit is in both splits"
    assert all((folder / name).is_file() for name in images)
    held_digits = [m[1]["content"] for m in held_out]
    assert max(map(held_digits.count, "0123456789")) - min(map(held_digits.count, "0123456789")) <= 2


def test_write_digits_clips(folder, splits):
    """Half and a third of the conversations; of digits of their own split, in their order, or of one that moves."""
    answers = {m[0]["content"][0]["image"]: m[1]["content"] for images, _ in splits.values() for m in images}
    for split, (images, clips) in splits.items():
        assert len(clips) == len(images) // {"train": 1, "held_out": 2}[split]
        own = {m[0]["content"][0]["image"] for m in images}
        for (question, answer), count in zip((m[:2] for m in clips), [1, 2, 3] * len(clips), strict=False):
            video = question["content"][0]["video"]
            digits = answer["content"]
            assert len(digits) == count
            if count == 1:
                picture = f"images/{video[6:10]}.png"
                assert picture in own and answers[picture] == digits
                continue
            assert video[::2] == video[1::2] and set(video) <= own
            assert "".join(answers[name] for name in video[::2]) == digits
    digits = "".join(m[1]["content"] for m in splits["held_out"][1])
    assert min(map(digits.count, "0123456789")) > len(digits) / 20, "no digit is rare"


def test_write_digits_moving(folder, splits):
    name = splits["held_out"][1][0][0]["content"][0]["video"]
    still = Image.open(folder / f"images/{name[6:10]}.png").convert("L")
    with Image.open(folder / name) as clip:
        assert clip.n_frames == 4 and clip.info["duration"] == 500
        for index, step in enumerate((-1, 0, 1, 0)):
            clip.seek(index)
            moved = Image.new("L", (32, 32))
            moved.paste(still, (4 * step, 0))
            assert clip.convert("L").tobytes() == moved.tobytes()


def test_write_digits_repeats(folder, tmp_path):
    write_digits(tmp_path / "a")
    for path in [p for p in folder.rglob("*") if p.is_file()]:
        assert (tmp_path / "a" / path.relative_to(folder)).read_bytes() == path.read_bytes(), path
    before = (tmp_path / "a" / "train.jsonl").stat().st_mtime_ns
    write_digits(tmp_path / "a")
    assert (tmp_path / "a" / "train.jsonl").stat().st_mtime_ns == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a"]


def test_write_digits_renews_another_edition(folder, tmp_path):
    first = (folder / "train.jsonl").read_text().splitlines()[0]
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "train.jsonl").write_text(first + "\n")
    write_digits(tmp_path / "a")
    assert (tmp_path / "a" / "train.jsonl").read_text() == (folder / "train.jsonl").read_text()


def test_write_digits_leaves_another_data_set_alone(tmp_path):
    (tmp_path / "train.jsonl").write_text("{}\n")
    write_digits(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["train.jsonl"]
    assert (tmp_path / "train.jsonl").read_text() == "{}\n"
