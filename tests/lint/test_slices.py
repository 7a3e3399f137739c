"""One capability, one short name, the same in every folder; and every example runs."""

import os
import subprocess
import sys

import pytest

from automodel_c import build_info
from tests.lint.source import ROOT, relative, slices

PLACES = {
    "contract": ["csrc/{0}/{0}.h"],
    "binding": ["csrc/{0}/{0}_py.c"],
    "oracle": ["automodel_c/reference/{0}.py"],
    "tests": ["tests/ops/test_{0}.py", "tests/parallel/test_{0}.py"],
    "benchmark": ["benchmarks/ops/bench_{0}.py"],
    "example": ["examples/{0}_minimal.py"],
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", slices())
def test_slice_has_its_places(name, place):
    paths = [path.format(name) for path in PLACES[place]]
    assert any((ROOT / path).is_file() for path in paths), f"slice {name} has no {place}: {' or '.join(paths)}"


def test_every_folder_of_csrc_is_a_slice_and_is_built():
    folders = {p.name for p in (ROOT / "csrc").iterdir() if p.is_dir()} - {"core", "python", "cuda"}
    assert folders == set(slices()) == set(build_info()["slices"].split())
    cuda = {p.name for p in (ROOT / "csrc/cuda").glob("*") if p.is_dir()} - {"common", "gemm"}
    assert cuda <= folders


EXAMPLES = sorted((ROOT / "examples").glob("*_minimal.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=relative)
def test_example_is_short_and_runs(path):
    assert len(path.read_text().splitlines()) <= 60
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, path], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), "an example shows something"
