"""The benchmark harness: no number without its gate, missing peers are said, promises are kept or it fails."""

import json

import pytest

from benchmarks.harness import Case, in_words, main
from benchmarks.peers import Peer, needs_module

PEER = Peer("slow", "1.0", lambda inputs: lambda: sum(range(inputs)))
MISSING = Peer("absent", "", lambda inputs: None, needs_module("no_such_module"))


def run(tmp_path, capsys, gate=lambda outcomes: {"checked": len(outcomes)}, arguments=(), **options):
    """Exit status, standard output and the JSON (None when none was written)."""
    case = Case("thing", "fwd", "tiny", "int64", lambda: None, gate, [PEER, MISSING], 5000, **options)
    path = tmp_path / "rows.json"
    with pytest.raises(SystemExit) as ended:
        main("thing", {"tiny": lambda: [case]}, ["--rounds", "5", "--threads", "1", "--json", str(path), *arguments])
    return ended.value.code, capsys.readouterr().out, json.loads(path.read_text()) if path.exists() else None


def test_green(tmp_path, capsys):
    code, out, written = run(tmp_path, capsys, bar_s=1.0)
    assert code == 0 and "ours" in out and "x)" in out and "absent is missing: no_such_module is not installed" in out
    (row,) = written["rows"]
    assert row["gate"] == {"checked": 2} and row["ratio"]["slow"] > 1 and row["self_ratio"] > 0
    assert set(row["peers"]["slow"]) == {"version", "ms_median", "ms_min", "ms_p10", "ms_p90"}
    assert {"cpu", "torch", "commit", "build"} <= set(written["machine"]) and written["threads"] == 1


def test_red_gate_shows_no_time(tmp_path, capsys):
    def gate(outcomes):
        raise AssertionError("ours is wrong")

    code, out, written = run(tmp_path, capsys, gate)
    assert code == 1 and "RED GATE, nothing is timed: ours is wrong" in out
    assert " us" not in out and " ms" not in out and written["rows"] == []


def test_no_gate_skips_it(tmp_path, capsys):
    def gate(outcomes):
        raise AssertionError("not asked")

    assert run(tmp_path, capsys, gate, ["--no-gate"])[0] == 0


def test_missed_bar_and_ratio_fail(tmp_path, capsys):
    assert run(tmp_path, capsys, bar_s=1e-12)[0] == 1
    assert run(tmp_path, capsys, arguments=["--min-ratio", "1e9"])[0] == 1
    assert run(tmp_path, capsys, arguments=["--min-ratio", "0.001"])[0] == 0


def test_floor_share(tmp_path, capsys):
    pytest.importorskip("torch")
    assert 0 < run(tmp_path, capsys, floor_bytes=100.0)[2]["rows"][0]["floor_share"]


def test_in_words():
    assert (in_words(12.345), in_words(0.0123)) == ("12.35 ms", "12.30 us")
