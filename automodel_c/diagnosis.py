"""What is installed, what this machine has, how the extension was built, and what would mend what is missing."""

import ctypes
import importlib.util
import os
import platform
import re
from importlib import metadata
from pathlib import Path

from automodel_c import _amcore, nvml

# distribution: (the least version, what it is for); requirements of pyproject.toml, which a test compares
REQUIRED = {
    "numpy": ("2.0", "everything"),
    "torch": ("2.11", "the operators and training"),
    "safetensors": ("0.5", "weights in files"),
    "transformers": ("5.12", "training"),
    "pyyaml": ("6", "training"),
    "tqdm": ("4.66", "training"),
    "pillow": ("11", "training"),
    "matplotlib": ("3.9", "training"),
    "scikit-learn": ("1.5", "the demo's digits"),
}
OPTIONAL = {
    "av": ("14", "films"),
    "pyarrow": ("17", "Parquet and Arrow files"),
    "tensorboard": ("2.18", "logging.tensorboard"),
    "wandb": ("0.19", "wandb in a recipe"),
    "megatron-fsdp": ("0.5", "distributed.strategy=megatron_fsdp"),
}
# soname, its folder in NVIDIA's wheels, the requirement, the function that tells its version: as csrc/cuda has them
LIBRARIES = {
    "NCCL": ("libnccl.so.2", "nvidia/nccl/lib", "nvidia-nccl-cu13>=2.26", "ncclGetVersion"),
    "cuBLASLt": ("libcublasLt.so.13", "nvidia/cu13/lib", "nvidia-cublas>=13", "cublasLtGetVersion"),
}
CAPABILITY = "9.0"  # of the GPUs that the CUDA kernels are compiled for
_FEATURES = ("fma", "avx2", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "amx_tile", "amx_bf16")


def doctor():
    """A dict of versions, devices, libraries and remedies; torch is not imported. What `automodel-c doctor` prints.

    python, machine, libc, cores; cpu: model, features (those that the kernels ask for), kernels in use and the best
    here; packages: name -> version, None where missing; extension: `_amcore.build_info()`; path: of this package;
    torch_cuda: of the installed torch, None where it has none; driver: version and newest CUDA, None without one; gpus:
    name, memory in GiB, capability and nvlinks of each; links: gpus and what joins them, of each pair; libraries: path
    and version of NCCL and cuBLASLt, None where not found; missing: what and the fix, a command where there is one.
    """
    built = _amcore.build_info()
    facts = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()),
        "cores": len(os.sched_getaffinity(0)),
        "cpu": {**_cpu(), "kernels": built["isa"], "best": built["best_isa"]},
        "packages": {name: _version(name) for name in ("automodel_c", *REQUIRED, *OPTIONAL)},
        "extension": built,
        "path": str(Path(__file__).parent),
        "torch_cuda": _torch_cuda(),
        "libraries": {name: _library(*known) for name, known in LIBRARIES.items()},
    }
    try:
        found, refusal = nvml.devices(), None
    except RuntimeError as error:
        found, refusal = None, str(error)
    facts["driver"], facts["gpus"], facts["links"] = found or (None, [], [])
    facts["missing"] = [{"what": what, "fix": fix} for what, fix in _missing(facts, refusal)]
    return facts


def report(facts):
    """The lines that `automodel-c doctor` prints of what `doctor` returned."""
    built, cpu, packages = facts["extension"], facts["cpu"], facts["packages"]
    yield f"automodel_c {built['version']} in {facts['path']}"
    yield f"  slices: {', '.join(built['slices'].split())}"
    with_cuda = f"built with CUDA {built['cuda_version']}" if built["cuda"] else "built for the CPU only"
    yield f"  {with_cuda}, gcc {built['compiler']}{', debug' if built['debug'] else ''}"
    yield f"Python {facts['python']} on {facts['machine']}, {facts['libc']}, {facts['cores']} cores"
    yield f"CPU {cpu['model']}: {' '.join(cpu['features']) or 'no feature that the kernels ask for'}"
    lowered = "" if cpu["kernels"] == cpu["best"] else f" (this CPU has {cpu['best']}; AM_ISA lowers it)"
    yield f"  kernels in use: {cpu['kernels']}{lowered}, {built['num_threads']} threads"
    yield "packages: " + ", ".join(f"{name} {packages[name]}" for name in REQUIRED if packages[name])
    for name, (least, use) in OPTIONAL.items():
        fix = f"not installed, only for {use}: pip install '{name}>={least}'"
        yield f"  {name} {packages[name]}" if packages[name] else f"  {name}: {fix}"
    if packages["torch"]:
        yield f"  torch is built {'with CUDA ' + facts['torch_cuda'] if facts['torch_cuda'] else 'for the CPU'}"
    yield from _report_gpus(facts)
    for name, found in facts["libraries"].items():
        yield f"{name} {found['version']}: {found['path']}" if found else f"{name}: not found (for GPUs only)"
    yield "nothing is missing" if not facts["missing"] else "missing:"
    for lack in facts["missing"]:
        yield f"  {lack['what']}"
        yield f"    {lack['fix']}"


def _report_gpus(facts):
    if facts["driver"]:
        yield f"NVIDIA driver {facts['driver']['version']}, runs CUDA up to {facts['driver']['cuda']}"
    for index, gpu in enumerate(facts["gpus"]):
        links = f", {gpu['nvlinks']} NVLinks" if gpu["nvlinks"] else ""
        yield f"GPU {index}: {gpu['name']}, {gpu['memory']:.0f} GiB, compute capability {gpu['capability']}{links}"
    if not facts["gpus"]:
        yield "no NVIDIA GPU: everything runs on the CPU"
    kinds = {}
    for link in facts["links"]:
        kinds.setdefault(link["by"], []).append("{}-{}".format(*link["gpus"]))
    for kind, pairs in kinds.items():
        yield f"GPUs joined by {kind}: {'every pair' if len(kinds) == 1 else ' '.join(pairs)}"


def _missing(facts, refusal):
    """Pairs of what is missing, or does not fit, and what mends it."""
    packages, built, driver = facts["packages"], facts["extension"], facts["driver"]
    absent = [name for name in REQUIRED if packages[name] is None]
    old = [name for name in (*REQUIRED, *OPTIONAL) if packages[name] and _is_older(packages[name], _least(name))]
    if absent:
        yield f"not installed: {', '.join(f'{name} (for {REQUIRED[name][1]})' for name in absent)}", _install(absent)
    if old:
        yield f"too old: {', '.join(f'{name} {packages[name]}' for name in old)}", _install(old)
    if refusal:
        yield (
            f"NVIDIA's driver does not answer: {refusal}",
            "nvidia-smi (says more); after an update: sudo reboot",
        )
    elif driver is None and Path("/dev/nvidiactl").exists():
        yield "an NVIDIA GPU without its driver's libraries", "in a container: start it with --gpus all"
    elif driver is None and built["cuda"]:
        yield "the extension has CUDA kernels, and no NVIDIA driver is here", "install NVIDIA's driver, 580 or newer"
    if facts["gpus"]:
        yield from _missing_for_gpus(facts)


def _missing_for_gpus(facts):
    built, driver = facts["extension"], facts["driver"]
    if not built["cuda"]:
        yield "the extension is built for the CPU only", "install the CUDA Toolkit 13; then " + _rebuild()
    elif _is_older(driver["cuda"], built["cuda_version"].partition(".")[0]):
        what = f"the driver runs CUDA up to {driver['cuda']}, the extension is built with {built['cuda_version']}"
        yield what, "install NVIDIA's driver, 580 or newer"
    if facts["packages"]["torch"] and facts["torch_cuda"] is None:
        yield "torch is built for the CPU", "pip install --force-reinstall torch"
    others = sorted({gpu["capability"] for gpu in facts["gpus"]} - {CAPABILITY})
    if others:
        what = f"the CUDA kernels are for compute capability {CAPABILITY} (H100, H200), not {', '.join(others)}"
        yield what, "none: on these GPUs use the CPU (dist_env.backend=gloo)"
    for name, (soname, _, requirement, _) in LIBRARIES.items():
        found = facts["libraries"][name]
        least = requirement.partition(">=")[2]
        if found is None:
            yield f"{name} ({soname})", f"pip install '{requirement}'"
        elif _is_older(found["version"], least):
            yield f"{name} {found['version']} in {found['path']} is too old", f"pip install -U '{requirement}'"


def _install(names):
    return "pip install " + " ".join(f"'{name}>={_least(name)}'" for name in names)


def _rebuild():
    root = Path(__file__).parents[1]
    where = f"-e {root}" if (root / "setup.py").exists() else "--no-binary automodel_c --force-reinstall automodel_c"
    return f"AM_CUDA=1 pip install {where}"


def _least(name):
    return (REQUIRED.get(name) or OPTIONAL[name])[0]


def _is_older(version, least):
    found, wanted = ([int(n) for n in re.findall(r"\d+", v.partition("+")[0])] for v in (version, least))
    return found[: len(wanted)] < wanted


def _version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return _amcore.build_info()["version"] if name == "automodel_c" else None


def _cpu():
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    model = re.search(r"^model name\s*: (.+)$", text, re.M)
    flags = re.search(r"^flags\s*: (.+)$", text, re.M)
    has = set(flags[1].split()) if flags else set()
    return {"model": model[1] if model else platform.processor(), "features": [f for f in _FEATURES if f in has]}


def _torch_cuda():
    """The CUDA version that torch was built with, read from its version.py."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text()
    except OSError:
        return None
    found = re.search(r"^cuda\b[^=\n]*= ['\"]([\d.]+)['\"]", text, re.M)
    return found[1] if found else None


def _library(soname, wheel, _, version_of):
    """Where the library is found, in the extension's order, and its version; None where it is not."""
    beside = Path(__file__).parents[1] / wheel / soname
    torch = importlib.util.find_spec("torch")  # which loads its own, beside itself, before the extension asks
    wheels = [beside] + ([Path(torch.origin).parents[1] / wheel / soname] if torch and torch.origin else [])
    for name in (*(str(path) for path in wheels if path.exists()), soname):
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        return {"path": _path_of(soname) or name, "version": _library_version(library, version_of)}
    return None


def _library_version(library, function):
    if function == "cublasLtGetVersion":
        library.cublasLtGetVersion.restype = ctypes.c_size_t
        number = library.cublasLtGetVersion()
    else:
        value = ctypes.c_int()
        library.ncclGetVersion(ctypes.byref(value))
        number = value.value
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def _path_of(soname):
    """Of a library that this process has loaded."""
    with open("/proc/self/maps") as maps:
        found = [line.split(maxsplit=5)[5].strip() for line in maps if line.rstrip().rpartition("/")[2] == soname]
    return found[0] if found else None
