"""What is installed, what this machine has, and how the extension was built."""

import os
import platform
from importlib import metadata

from automodel_c import _amcore

_PACKAGES = (
    "automodel_c",
    "numpy",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "pyyaml",
    "tqdm",
    "pillow",
    "matplotlib",
    "scikit-learn",
)


def doctor():
    """A dict of versions, devices and libraries.

    python, machine, cores; packages: name -> version, None where missing; extension: `_amcore.build_info()`;
    gpus: name and memory in GiB of each device that torch sees, [] without torch or CUDA.
    """
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "packages": {name: _version(name) for name in _PACKAGES},
        "extension": _amcore.build_info(),
        "gpus": _gpus(),
    }


def report(facts):
    """The lines that `automodel-c doctor` prints of what `doctor` returned."""
    built = facts["extension"]
    yield f"python {facts['python']} on {facts['machine']}, {facts['cores']} cores"
    yield (
        f"extension {built['version']}: slices {', '.join(built['slices'].split())}; CPU kernels {built['isa']}"
        f" (this CPU goes up to {built['best_isa']}), {built['num_threads']} threads"
    )
    if built["cuda"]:
        yield f"extension has CUDA kernels, built with CUDA {built['cuda_version']}"
    else:
        yield "extension is for the CPU only; install the CUDA Toolkit 13 and build again with AM_CUDA=1"
    for name, version in facts["packages"].items():
        yield f"{name} {version}" if version else f"{name} is missing: pip install 'automodel_c[train]' brings it"
    for gpu in facts["gpus"]:
        yield f"GPU {gpu['name']}, {gpu['memory']:.0f} GiB"
    if not facts["gpus"]:
        yield "no GPU that torch can use"


def _version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return _amcore.build_info()["version"] if name == "automodel_c" else None


def _gpus():
    try:
        import torch
    except ImportError:
        return []
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = [torch.cuda.get_device_properties(i) for i in range(count)]
    return [{"name": p.name, "memory": p.total_memory / 2**30} for p in found]
