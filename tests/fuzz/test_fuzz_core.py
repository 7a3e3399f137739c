"""The C core on what its fuzzer (fuzz_core.c) has kept, under the sanitizers of gcc."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from automodel_c import build_info
from tests.fuzz.corpus_core import inputs

ROOT = Path(__file__).parents[2]
FOLDERS = ("core", "partition", "exchange")
FLAGS = ["-std=gnu11", "-D_GNU_SOURCE", "-O1", "-g", "-pthread", "-fno-math-errno", "-ffp-contract=off", "-DREPLAY"]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]


def sources():
    """Of the C core, what needs no Python."""
    files = [path for name in FOLDERS for path in (ROOT / "csrc" / name).glob("*.c")]
    return sorted(str(path.relative_to(ROOT)) for path in files if not path.stem.endswith("_py"))


def test_corpus(tmp_path):
    if build_info()["sanitizer"]:
        pytest.skip("a sanitizer is loaded into this process already; the plain suite replays the corpus")
    program, compiler = tmp_path / "replay", shlex.split(os.environ.get("CC", "gcc"))
    includes = [f"-Icsrc/{name}" for name in FOLDERS]
    command = [*compiler, *FLAGS, *SANITIZERS, *includes, "tests/fuzz/fuzz_core.c", *sources(), "-o", str(program)]
    subprocess.run([*command, "-lm", "-ldl"], cwd=ROOT, check=True)
    files = [tmp_path / str(number) for number, _ in enumerate(inputs())]
    for path, data in zip(files, inputs(), strict=True):
        path.write_bytes(data)
    done = subprocess.run([program, *files], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"{len(files)} inputs: fine\n"), done.stderr
    assert len(files) > 100
