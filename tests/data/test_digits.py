import json

from automodel_c.data.digits import write_digits


def _lines(path):
    return [json.loads(line)["messages"] for line in path.read_text().splitlines()]


def test_write_digits(tmp_path):
    write_digits(tmp_path / "a")
    train, held_out = (_lines(tmp_path / "a" / f"{split}.jsonl") for split in ("train", "held_out"))
    assert len(train) + len(held_out) == 1797
    images = [m[0]["content"][0]["image"] for m in train + held_out]
    assert len(set(images)) == 1797, "a digit is in both splits"
    assert all((tmp_path / "a" / name).is_file() for name in images)
    held_digits = [m[1]["content"] for m in held_out]
    assert max(map(held_digits.count, "0123456789")) - min(map(held_digits.count, "0123456789")) <= 2


def test_write_digits_repeats(tmp_path):
    write_digits(tmp_path / "a")
    write_digits(tmp_path / "b")
    for name in ("train.jsonl", "held_out.jsonl", "images/0007.png"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    before = (tmp_path / "a" / "train.jsonl").stat().st_mtime_ns
    write_digits(tmp_path / "a")
    assert (tmp_path / "a" / "train.jsonl").stat().st_mtime_ns == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]
