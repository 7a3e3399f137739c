"""The CPU wheel, built of the source distribution and installed where there is NumPy alone."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.lint.source import ROOT

USE = """
import numpy as np, sys
import automodel_c as amc
cuts = amc.frame_partition([1024] * 4 + [112] * 400, 8, alpha=3456)
assert cuts[0] == 0 and cuts[-1] == 404 and len(cuts) == 9
pack = amc.Pack(cu_seqlens=[0, 700, 700, 2048])
assert "2048 real tokens" in repr(pack)
assert amc.docs_from_ids(np.array([1, 1, 0, 2, 2, 2])).tolist() == [[0, 2], [3, 6]]
assert amc.doctor()["packages"]["torch"] is None
others = {name.partition(".")[0] for name in sys.modules} & {"torch", "transformers", "yaml", "tqdm", "matplotlib"}
assert not others, others
try:
    amc.ops
except ModuleNotFoundError as error:
    assert error.name == "torch"
else:
    raise SystemExit("torch is here")
print(amc.__file__, amc.build_info()["cuda"])
"""


def _run(*command, **options):
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "AM_CUDA")}
    environment |= options.pop("environment", {})
    done = subprocess.run(
        [str(word) for word in command], env=environment, capture_output=True, text=True, timeout=300, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Of the source distribution alone, but for objects that this checkout has compiled of the same sources."""
    folder = tmp_path_factory.mktemp("wheel")
    _run(
        sys.executable, "setup.py", "-q", "egg_info", "--egg-base", folder, "sdist", "--dist-dir", folder / "sdist",
        cwd=ROOT,
    )  # fmt: skip
    (archive,) = (folder / "sdist").iterdir()
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    source = next(path.parent for path in folder.glob("*/setup.py"))
    if (ROOT / "build/objects").is_dir():
        shutil.copytree(ROOT / "build/objects", source / "build/objects", copy_function=os.link)
    command = ("pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "-w", folder / "out", source)
    _run(sys.executable, "-m", *command, environment={"AM_CUDA": "0", "AM_WHEEL": ""})
    (found,) = (folder / "out").glob("*.whl")
    return found


@pytest.fixture(scope="module")
def clean(wheel, tmp_path_factory):
    """The bin folder of an environment that holds pip, NumPy and the wheel."""
    folder = tmp_path_factory.mktemp("clean") / "venv"
    _run(sys.executable, "-m", "venv", folder)
    (site,) = folder.glob("lib/python*/site-packages")
    numpy = importlib.metadata.distribution("numpy")
    for top in {file.parts[0] for file in numpy.files} - {".."}:
        shutil.copytree(numpy.locate_file(top), site / top)
    # without an index: what else it needed would be missing
    _run(folder / "bin/python", "-m", "pip", "install", "-q", "--no-index", wheel)
    return folder / "bin"


def test_wheel(wheel):
    """For CPython 3.11 and newer; stripped; with the stub, the prices and the licence, and no source."""
    assert re.fullmatch(r"automodel_c-\d+\.\d+\.\d+-cp311-abi3-linux_\w+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
        size = packed.getinfo("automodel_c/_amcore.abi3.so").file_size
        metadata = next(packed.read(name).decode() for name in names if name.endswith(".dist-info/METADATA"))
    assert size < 4 * 2**20, f"{size / 2**20:.1f} MiB: is the debug information still in it?"
    assert {"automodel_c/_amcore.pyi", "automodel_c/py.typed"} <= set(names)
    assert any(name.endswith("/LICENSE") for name in names) and any("prices/" in name for name in names)
    assert all(name.startswith(("automodel_c/", "automodel_c-")) for name in names)
    needed = [line for line in re.findall(r"^Requires-Dist: (.*)$", metadata, re.M) if "extra ==" not in line]
    assert needed == ["numpy>=2.0"]


def test_numpy_alone(clean, tmp_path):
    done = _run(clean / "python", "-I", "-c", USE, cwd=tmp_path)
    path, cuda = done.stdout.split()
    assert Path(path).is_relative_to(clean.parent) and cuda == "False"


def test_command_line(clean, tmp_path):
    """doctor works and says what training needs; train says it in a line."""
    text = _run(clean / "automodel-c", "doctor", cwd=tmp_path).stdout
    assert "built for the CPU only" in text and "kernels in use: " in text
    assert re.search(r"missing:\n  not installed: torch .*\n    pip install 'torch>=[\d.]+' 'safetensors", text)
    done = subprocess.run([clean / "automodel-c", "train", "x.yaml"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (
        2,
        "automodel-c: error: yaml is not installed: pip install 'automodel_c[train]'\n",
    )
