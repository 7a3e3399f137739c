"""Builds automodel_c._amcore: every csrc/**/*.c with the C compiler, every csrc/cuda/**/*.cu with nvcc where found.

AM_CUDA=0 leaves CUDA out, AM_CUDA=1 insists on it, unset takes it when nvcc is there. AM_DEBUG=1 keeps assertions and
-O0. AM_SANITIZE=address|thread builds with ASan + UBSan or TSan; AM_SANITIZE=fuzz, for CC=clang, with libFuzzer's
counters beside ASan + UBSan. AM_WHEEL=<suffix>, which tools/wheels.py sets, leaves out debug information and adds a
suffix that is not empty to the version. Objects are kept in build/objects by the hash of their source, the headers it
reaches and the command, so a second build compiles what changed, and a copy of that folder serves another checkout.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
VERSION = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.M)[1]
WHEEL = os.environ.get("AM_WHEEL")
DEBUG = os.environ.get("AM_DEBUG") == "1"
SANITIZE = os.environ.get("AM_SANITIZE", "")
SLICES = sorted(p.name for p in (ROOT / "csrc").iterdir() if p.name not in ("core", "python", "cuda"))
INCLUDES = ["csrc/core", "csrc/python", "csrc/cuda/common", *(f"csrc/{name}" for name in SLICES)]
SANITIZERS = {
    "": [],
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer"],
    "thread": ["-fsanitize=thread", "-fno-omit-frame-pointer"],
    "fuzz": [
        "-fsanitize=fuzzer-no-link,address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer",
        # the code is gcc's: clang judges it by other warnings and passes over its target pragmas, so this build is for
        # machines that have all of these but tile registers
        "-w", "-mavx2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512bf16", "-mamx-tile",
        "-mamx-bf16",
    ],
}  # fmt: skip
C_FLAGS = [
    "-std=gnu11", "-D_GNU_SOURCE", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-ffp-contract=off", "-g",
    "-pthread", "-Wall", "-Wextra", "-Wshadow", "-Wstrict-prototypes", "-Werror", "-Wno-missing-field-initializers",
    *(["-O0"] if DEBUG else ["-O1"] if SANITIZE == "fuzz" else ["-O3"] if SANITIZE else ["-O3", "-DNDEBUG"]),
    *SANITIZERS[SANITIZE],
]  # fmt: skip
CUDA_FLAGS = [
    "-std=c++17", "-O3", "-gencode=arch=compute_90a,code=sm_90a", "-lineinfo", "-Xptxas=-v,--warn-on-spills",
    "--Werror=all-warnings", "-Xcompiler=-fPIC,-fvisibility=hidden,-fno-exceptions,-fno-rtti",
]  # fmt: skip


def find_cuda():
    """nvcc's path and the toolkit's root, or None with the reason printed."""
    wish = os.environ.get("AM_CUDA", "auto")
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if wish == "0" or nvcc is None:
        if wish == "1":
            raise SystemExit("AM_CUDA=1, but nvcc is not on PATH: install the CUDA Toolkit 13, or unset AM_CUDA")
        print("automodel_c: building for the CPU only:", "AM_CUDA=0" if wish == "0" else "nvcc was not found")
        return None
    home = Path(nvcc).resolve().parent.parent
    if not (home / "include/cuda_runtime.h").exists():
        home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    if not (home / "include/cuda_runtime.h").exists():
        if wish == "1":
            raise SystemExit("AM_CUDA=1, but cuda_runtime.h is not beside nvcc: set CUDA_HOME")
        print("automodel_c: building for the CPU only: cuda_runtime.h is not beside nvcc (set CUDA_HOME)")
        return None
    return nvcc, home


HEADERS = {p.name: p for p in (ROOT / "csrc").rglob("*") if p.suffix in (".h", ".inc", ".cuh")}


def digest_of(source):
    """Hash of a source and of every header that it names, or that one of those names (names are unique in csrc)."""
    reached, left = {}, [source]
    while left:
        path = left.pop()
        if path not in reached:
            reached[path] = path.read_bytes()
            named = re.findall(r'"(?:[\w./]*/)?(\w+\.\w+)"', reached[path].decode())
            left += [HEADERS[name] for name in named if name in HEADERS]
    digest = hashlib.sha256(numpy.__version__.encode() + sys.version.encode())
    for path in sorted(reached):
        digest.update(str(path.relative_to(ROOT)).encode() + reached[path])
    return digest.hexdigest()


class Build(build_ext):
    """Our own compile step: per-file flags for C and CUDA, in parallel, cached by content."""

    def build_extension(self, ext):
        cc = (os.environ.get("CC") or "gcc").split()
        cuda = find_cuda()
        target = Path(self.get_ext_fullpath(ext.name))
        cache = ROOT / "build" / "objects"
        cache.mkdir(parents=True, exist_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)

        defines = ["-DPy_LIMITED_API=0x030b0000", f'-DAM_VERSION="{VERSION}"']
        defines += [f'-DAM_SANITIZER="{SANITIZE}"'] if SANITIZE else []
        link = [] if WHEEL is None else ["-Wl,--strip-debug"]
        link += ["-shared", "-pthread", "-Wl,--exclude-libs,ALL", "-lm", "-ldl", *SANITIZERS[SANITIZE]]
        if cuda:
            release = subprocess.run([cuda[0], "--version"], check=True, capture_output=True, text=True).stdout
            version = re.search(r"release ([\d.]+)", release)[1]
            defines += ["-DAM_WITH_CUDA=1", f'-DAM_CUDA_VERSION="{version}"']
            library = next(d for d in (cuda[1] / "lib64", cuda[1] / "lib") if (d / "libcudart_static.a").exists())
            link += [f"-L{library}", "-lcudart_static", "-lrt", "-lstdc++"]
            print(f"automodel_c: building for the CPU and CUDA {version} ({cuda[0]})")
        paths = [f"-I{d}" for d in INCLUDES]
        system = [f"-isystem{d}" for d in (*self.compiler.include_dirs, numpy.get_include())]

        jobs = []
        for source in sorted((ROOT / "csrc").rglob("*.c")):
            jobs.append((source, [*cc, *C_FLAGS, *defines, *paths, "-c"], system))
        for source in sorted((ROOT / "csrc/cuda").rglob("*.cu")) if cuda else []:
            jobs.append((source, [cuda[0], *CUDA_FLAGS, *paths, "-c"], []))
        with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))) as pool:
            objects = list(pool.map(lambda job: self.compile_one(cache, *job), jobs))
        subprocess.run([*cc, *map(str, objects), *link, "-o", str(target)], check=True)

    def compile_one(self, cache, source, command, system):
        source = source.relative_to(ROOT)
        key = hashlib.sha256(digest_of(ROOT / source).encode() + repr(command).encode()).hexdigest()[:24]
        out = cache / f"{source.stem}-{key}.o"
        if not out.exists():
            partial = out.with_suffix(f".{os.getpid()}.o")
            command = [*command, *system, str(source), "-o", str(partial)]
            done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
            log = done.stdout + done.stderr
            if done.returncode:
                raise SystemExit(f"{' '.join(command)}\n{log}")
            out.with_suffix(".log").write_text(log)
            partial.rename(out)
        return out


setup(
    version=f"{VERSION}+{WHEEL}" if WHEEL else VERSION,
    ext_modules=[Extension("automodel_c._amcore", sources=[], py_limited_api=True)],
    cmdclass={"build_ext": Build},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
