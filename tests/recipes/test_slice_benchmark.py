"""The benchmark of a slice of the real decoder, at tiny sizes on the CPU: its gate holds and its rows come out."""

import json
import runpy
import subprocess
import sys

import pytest

from benchmarks.host import commands
from benchmarks.recipes.bench_slice import JSON, covered, left, timeline
from benchmarks.recipes.bench_slice_ranks import meshes_of
from benchmarks.recipes.predictions import LAYERS
from benchmarks.recipes.slice_jobs import LAYER_PACKS, layers_prediction


def test_tiny_slice():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.recipes.bench_slice", "--tiny", "--only", "ours", "--seconds", "0"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert next(line.split()[1] for line in lines if line.startswith("gate")) == "loss"
    rows = [line for line in lines if line.startswith("ours")]
    assert [row[30:45].strip() for row in rows] == ["16K", "32K heavy", "16K head", "128K heavy"]
    assert all("tokens/s" in row for row in rows)


def test_tiny_slice_over_ranks(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "benchmarks.recipes.bench_slice_ranks", "--tiny", "--shapes", "heavy", "--steps", "1"]
    done = subprocess.run([*command, "--json", tmp_path / "f.json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads((tmp_path / "f.json").read_text())["rows"]
    assert [row["mesh"] for row in rows] == ["one", "dp 2", "ep 2", "one", "cp 2", "cp 2 x ep 2"]
    over = [row for row in rows if row["mesh"] != "one"]
    assert all(abs(row["norm_ratio"] - 1) < 0.01 and row["values_error"] < 0.05 for row in over)
    assert [row["tokens"] for row in rows] == [96] * 6
    sent = {row["mesh"]: row["sent_mib"] for row in rows}
    assert sent["dp 2"] == 0 < sent["cp 2"] < sent["cp 2 x ep 2"]


def test_meshes_of_ranks():
    assert list(meshes_of(2)) == ["dp 2", "ep 2", "cp 2", "cp 2 x ep 2"]
    assert meshes_of(4)["dp 2 x cp 2 x ep 4"] == (2, 4) and meshes_of(4)["dp 2 x cp 2"] == (2, 1)


def test_tiny_slice_over_four_ranks(tmp_path):
    """Two packs, which two ranks each share; experts over all four."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4"]
    command = [*torchrun, "-m", "benchmarks.recipes.bench_slice_ranks", "--tiny", "--shapes", "heavy", "--steps", "1"]
    command += ["--only", "dp 2 x cp 2", "--json", tmp_path / "f.json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads((tmp_path / "f.json").read_text())["rows"]
    assert [row["mesh"] for row in rows] == ["one", "dp 2 x cp 2", "dp 2 x cp 2 x ep 4"]
    assert all(abs(row["norm_ratio"] - 1) < 0.01 and row["values_error"] < 0.05 for row in rows[1:])
    assert {row["tokens"] for row in rows} == {192}


def test_what_communication_is_not_covered():
    found = timeline([(0, 4000), (6000, 9000)], [(1000, 2000), (3000, 7000), (11000, 12000)])
    assert found == {"communication_ms": 7.0, "exposed_ms": 1.0 + 1.0 + 2.0, "idle_ms": 2.0}
    assert covered([(0, 3), (1, 2), (2, 5), (7, 8)]) == 6


def test_host_never_waits():
    ours = [r for r in json.loads(JSON.read_text())["rows"] if r["variant"] in ("ours", "self")]
    assert ours and all(row["waits"] == {} for row in ours)


def test_what_is_left_beyond_the_floor():
    rows = json.loads(JSON.read_text())["rows"]
    text = "\n".join(left(rows))
    for row in (r for r in rows if r["variant"] == "ours"):
        part = text[text.index(f"{row['shape']}: {row['ms']['step']:.1f} ms") :].splitlines()[2:]
        part = part[: next((i for i, line in enumerate(part) if not line.startswith(" ")), len(part))]
        numbers = [[float(n) for n in line.split()[-4:]] for line in part]
        assert sum(took for took, *_ in numbers) == pytest.approx(row["ms"]["step"], abs=0.5)
        assert sum(floor for _, floor, *_ in numbers) == pytest.approx(row["floor_ms"], rel=0.01)
        assert [n[3] for n in numbers] == sorted((n[3] for n in numbers), reverse=True)


def test_tiny_layers_over_ranks(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "benchmarks.recipes.bench_layers", "--tiny", "--steps", "1"]
    done = subprocess.run([*command, "--json", tmp_path / "f.json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads((tmp_path / "f.json").read_text())["rows"]
    assert [(row["pack"], row["mesh"], row["layers"]) for row in rows] == [(n, "ep 2 x cp 2", 4) for n in LAYER_PACKS]
    assert all(row["tokens"] == 2 * 96 and row["sent_mib"] > 0 for row in rows)


def test_predictions_of_layers():
    """Kept before any run; the planner of today says the same of two GPUs' layers and memory."""
    kept = json.loads(LAYERS.read_text())["rows"]
    assert [kept[f"{world} one"]["layers"] for world in (2, 4, 8)] == [4, 8, 16]
    now = layers_prediction([32768], 2)
    assert now["layers"] == 4 and now["peak_gib"] == pytest.approx(kept["2 one"]["peak_gib"], rel=0.1)


def test_commands_of_a_host(monkeypatch, capsys):
    """What runs on four and eight GPUs: each module takes the arguments that it is given."""
    for name, command, _ in commands(4):
        module = next(word for word in command if word.startswith("benchmarks."))
        monkeypatch.setattr(sys, "argv", [module, "--help"])
        monkeypatch.delitem(sys.modules, module, raising=False)
        with pytest.raises(SystemExit):
            runpy.run_module(module, run_name="__main__")
        options = [word for word in command[command.index(module) :] if word.startswith("--")]
        assert options and all(option in capsys.readouterr().out for option in options), name
    assert [name for name, *_ in commands(8)] == ["context", "exchange", "frames", "slice_ranks", "layers"]
