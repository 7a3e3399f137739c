"""Checkpoints that are not what was written, and such as would run code: told, never loaded."""

import os
import pickle
import random
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from automodel_c.optim import FusedAdamW
from automodel_c.recipes import integrity
from automodel_c.recipes.checkpoint import Checkpoints, load_checkpoint, load_model, sound_folder, step_folder
from automodel_c.recipes.config import load_recipe
from automodel_c.recipes.runtime import start_ranks
from automodel_c.sums import SUMS, differences, write_sums

from .conftest import DIGITS


@pytest.fixture
def runtime():
    with start_ranks(load_recipe(DIGITS)) as runtime:
        yield runtime


@pytest.fixture
def saved(runtime, tmp_path):
    """(folder of three checkpoints, a model of theirs, its optimizer)."""
    model = torch.nn.Linear(3, 2)
    optimizer = FusedAdamW(model.parameters())
    for step in (1, 2, 3):
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        Checkpoints(tmp_path, runtime).save(step, model, optimizer, data={"seed": 3}, held_out=float(step))
    return tmp_path, model, optimizer


def flip(path, bit):
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def damages(folder, rng):
    """(what it is called, function that does it) over every file of a step folder."""
    for path in sorted(folder.iterdir()):
        size = path.stat().st_size
        yield f"{path.name} without its last byte", lambda path=path, size=size: os.truncate(path, size - 1)
        yield f"{path.name} cut to half", lambda path=path, size=size: os.truncate(path, size // 2)
        yield f"{path.name} empty", lambda path=path: os.truncate(path, 0)
        yield f"{path.name} longer", lambda path=path: path.write_bytes(path.read_bytes() + b"\0")
        if path.name != SUMS:
            yield f"{path.name} gone", path.unlink
        for _ in range(int(os.environ.get("AM_FAULTS", "8"))):
            bit = rng.randrange(8 * size)
            yield f"{path.name} bit {bit}", lambda path=path, bit=bit: flip(path, bit)


def test_every_damage_is_told(saved, seed):
    """Of a step folder that is named: an error that names one that is sound. Of LATEST: that one is taken."""
    folder, _, _ = saved
    copy, tried = folder.parent / f"{folder.name}-copy", 0
    for index in range(len(list(damages(folder / "step_3", random.Random(seed))))):
        shutil.copytree(folder, copy)
        label, damage = list(damages(copy / "step_3", random.Random(seed)))[index]
        damage()
        with pytest.raises(ValueError, match=r"step_3 is damaged: .*; step_2 is not"):
            pytest.fail(f"{label}: {sound_folder(copy / 'step_3')} is taken")
        assert sound_folder("LATEST", copy) == copy / "step_2", label
        shutil.rmtree(copy)
        tried += 1
    assert tried > 30


def test_the_newest_sound_one_is_taken(saved, caplog):
    folder, _, _ = saved
    assert sound_folder("LATEST", folder) == folder / "step_3" and not caplog.records
    flip(folder / "step_3" / ".metadata", 77)
    flip(folder / "step_2" / "__0_0.distcp", 777)
    assert sound_folder("LATEST", folder) == folder / "step_1"
    (record,) = caplog.records
    assert record.getMessage() == (
        f"{folder}/step_3 is damaged: .metadata is not what was written; going on from step_1"
    )
    (folder / "step_1" / "__0_0.distcp").unlink()
    with pytest.raises(ValueError, match=r"step_3 is damaged: .metadata is not what was written$"):
        sound_folder("LATEST", folder)


def test_a_latest_that_is_gone(saved):
    folder, _, _ = saved
    shutil.rmtree(folder / "step_3")
    assert sound_folder("LATEST", folder) == folder / "step_2"
    assert sound_folder(folder / "step_3") == folder / "step_3", "load_checkpoint says that it is not there"


def test_lowest_val_is_not_replaced(saved):
    """Another one does not have the lowest loss."""
    folder, _, _ = saved
    assert step_folder("LOWEST_VAL", folder).name == "step_1"
    flip(folder / "step_1" / "held_out.json", 3)
    with pytest.raises(ValueError, match=r"LOWEST_VAL.*step_1 is damaged: held_out.json is not what was written$"):
        sound_folder("LOWEST_VAL", folder)


def test_sums_are_those_of_sha256sum(saved):
    folder, _, _ = saved
    done = subprocess.run(["sha256sum", "-c", "--strict", SUMS], cwd=folder / "step_1", capture_output=True)
    names = {line.split(": ")[0] for line in done.stdout.decode().splitlines()}
    assert done.returncode == 0 and names == {p.name for p in (folder / "step_1").iterdir()} - {SUMS}


def test_a_checkpoint_of_before_is_read_with_a_warning(saved, runtime, caplog):
    folder, model, optimizer = saved
    (folder / "step_3" / SUMS).unlink()
    assert sound_folder("LATEST", folder) == folder / "step_3"
    assert "has no SHA256SUMS: its files are not checked" in caplog.text
    assert load_checkpoint(folder / "step_3", model, optimizer, runtime, data={"seed": 3}) == 3


class Bomb:
    def __reduce__(self):
        return Path.touch, (Path(os.environ["AM_BOMB"]),)


class NestedBomb:
    """A class that the reader knows, whose argument is one that it does not."""

    def __reduce__(self):
        return torch.Size, (Bomb(),)


@pytest.mark.parametrize("bomb", [Bomb, NestedBomb])
@pytest.mark.parametrize("load", ["checkpoint", "model"])
def test_metadata_that_would_run_code(saved, runtime, monkeypatch, tmp_path, bomb, load):
    folder, model, optimizer = saved
    monkeypatch.setenv("AM_BOMB", str(tmp_path / "ran"))
    path = folder / "step_3" / ".metadata"
    path.write_bytes(pickle.dumps(bomb()))
    with pytest.raises(ValueError, match=r"UnpicklingError: \.metadata names pathlib\.Path"):
        if load == "model":
            load_model(folder / "step_3", model)
        else:
            load_checkpoint(folder / "step_3", model, optimizer, runtime, data={"seed": 3})
    assert not (tmp_path / "ran").exists()


def test_a_setting_that_would_run_code(saved, runtime, monkeypatch, tmp_path):
    """What is no tensor lies in the data files as torch.save writes it. A run's settings are its recipe's, so that a
    checkpoint's are not read; asked for all the same, they are refused."""
    folder, model, optimizer = saved
    monkeypatch.setenv("AM_BOMB", str(tmp_path / "ran"))
    optimizer.param_groups[0]["eps"] = Bomb()
    folder = Checkpoints(tmp_path / "more", runtime).save(4, model, optimizer, data={"seed": 3})
    optimizer.param_groups[0]["eps"] = 1e-8
    load_checkpoint(folder, model, optimizer, runtime, data={"seed": 3})
    keys = [key for key in integrity.Reader(folder).read_metadata().state_dict_metadata if key.endswith("eps")]
    with pytest.raises(dcp.api.CheckpointException, match=r"WeightsUnpickler error|Weights only"):
        dcp.load({keys[0]: 0.0}, storage_reader=integrity.Reader(folder), planner=integrity.Planner())
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "link"])
def test_a_data_file_outside_the_folder(saved, runtime, tmp_path, name):
    folder, model, optimizer = saved
    reader = integrity.Reader(folder / "step_3")
    metadata = reader.read_metadata()
    (folder / "step_3" / "link").symlink_to("/etc/hostname")
    for info in metadata.storage_data.values():
        info.relative_path = name
    (folder / "step_3" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match="which is no file of the folder"):
        load_checkpoint(folder / "step_3", model, optimizer, runtime, data={"seed": 3})


@pytest.mark.parametrize("text", ["x", "0" * 64 + " *a", "0" * 64 + "  ../a\n", "0" * 64 + "  a", "\xff\x00"])
def test_sums_that_say_nothing(tmp_path, text):
    (tmp_path / SUMS).write_bytes(text.encode("latin-1"))
    (words,) = integrity.damage(tmp_path)
    assert words == f"{tmp_path}/SHA256SUMS, line 1: no SHA-256 sum of a file"


def test_verify(tmp_path, capsys):
    """`automodel-c verify` of a directory that an export wrote, or a checkpoint."""
    from automodel_c.cli import main

    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).write_bytes(os.urandom(1000))
    assert main(["verify", str(tmp_path)]) == 1 and "it has no SHA256SUMS" in capsys.readouterr().err
    write_sums(tmp_path)
    assert main(["verify", str(tmp_path)]) == 0 and capsys.readouterr().out == f"{tmp_path}: 2 files are sound\n"
    flip(tmp_path / "model.safetensors", 4321)
    assert main(["verify", str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"{tmp_path}: model.safetensors is not what was written\n"


def test_an_export_has_sums(tmp_path):
    from automodel_c.models.qwen3_5.checkpoint import written_beside

    with written_beside(tmp_path / "hf") as beside:
        (beside / "model.safetensors").write_bytes(b"weights")
    assert differences(tmp_path / "hf") == []
    os.truncate(tmp_path / "hf" / "model.safetensors", 3)
    assert differences(tmp_path / "hf") == ["model.safetensors is not what was written"]


def test_lines_that_are_gone(saved):
    """Half of the sums are no sums of half a checkpoint."""
    path = saved[0] / "step_3" / SUMS
    for kept in range(3):
        path.write_text("".join(path.read_text().splitlines(keepends=True)[: 2 - kept]))
        assert integrity.damage(saved[0] / "step_3")
