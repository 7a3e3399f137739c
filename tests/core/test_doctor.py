"""doctor: facts as they are, a remedy for each lack, and NVIDIA's libraries, for which stand-ins are compiled."""

import copy
import json
import os
import re
import subprocess
import sys
import tomllib

import pytest

import automodel_c as amc
from automodel_c import diagnosis
from automodel_c.diagnosis import report
from tests.lint.source import ROOT

NVML = """
#include <string.h>
typedef struct { unsigned long long total, free, used; } memory;
static int at(void *gpu) { return (int)(long)gpu - 1; }
int nvmlInit_v2(void) { return FAIL; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int status) { return status == 18 ? "Driver/library version mismatch" : "Not Supported"; }
int nvmlSystemGetDriverVersion(char *text, unsigned room) { return strncpy(text, "580.65.06", room) == 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = CUDA; return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 3; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **gpu) { *gpu = (void *)(long)(index + 1); return 0; }
int nvmlDeviceGetName(void *gpu, char *text, unsigned room) { (void)gpu; strncpy(text, "NVIDIA H200", room); return 0; }
int nvmlDeviceGetMemoryInfo(void *gpu, memory *out) { (void)gpu; out->total = 150754820096ull; return 0; }
int nvmlDeviceGetCudaComputeCapability(void *gpu, int *major, int *minor)
{
    *major = at(gpu) == 2 ? 8 : 9;
    return *minor = 0;
}
int nvmlDeviceGetNvLinkState(void *gpu, unsigned link, int *up)
{
    *up = link < 4;
    return at(gpu) == 2 || link > 5 ? 3 : 0;
}
int nvmlDeviceGetP2PStatus(void *one, void *other, int index, int *status)
{
    *status = index == 2 && at(one) + at(other) == 1 ? 0 : 5;
    return 0;
}
int nvmlDeviceGetTopologyCommonAncestor(void *one, void *other, int *level)
{
    *level = at(one) + at(other) == 2 ? 50 : 20;
    return 0;
}
"""
LIBRARIES = {
    "libnccl.so.2": "int ncclGetVersion(int *v) { *v = 22501; return 0; }",
    "libcublasLt.so.13": "unsigned long cublasLtGetVersion(void) { return 131000; }",
}


def _compile(folder, soname, source, **defines):
    folder.mkdir(parents=True, exist_ok=True)
    flags = [f"-D{name}={value}" for name, value in defines.items()]
    command = ["gcc", "-shared", "-fPIC", "-x", "c", *flags, "-", "-o", str(folder / soname)]
    subprocess.run(command, input=source, text=True, check=True)


def _doctor(folder, code="import automodel_c, json; print(json.dumps(automodel_c.doctor()))"):
    """What a process says that finds its libraries in `folder`."""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_doctor_facts():
    facts = amc.doctor()
    assert facts["extension"] == amc.build_info()
    assert facts["packages"]["numpy"] and facts["cores"] >= 1
    assert facts["packages"]["automodel_c"].partition("+")[0] == amc.__version__
    assert facts["cpu"]["kernels"] == amc.build_info()["isa"] and facts["libc"].startswith("glibc 2.")
    needs = {"avx2": {"fma", "avx2"}, "avx512_bf16": {"avx512f", "avx512_bf16"}, "amx_bf16": {"amx_bf16"}}
    assert needs.get(facts["cpu"]["best"], set()) <= set(facts["cpu"]["features"])
    assert json.loads(json.dumps(facts)) == facts


def test_doctor_of_torch(tmp_path, monkeypatch):
    """torch's CUDA is read from its version.py; torch itself stays out."""
    code = "import automodel_c, json, sys; automodel_c.doctor(); print(json.dumps('torch' in sys.modules))"
    assert _doctor(tmp_path, code) is False
    import torch

    assert amc.doctor()["torch_cuda"] == torch.version.cuda
    for text, expected in (("cuda: Optional[str] = '13.0'", "13.0"), ("cuda = None", None), ("", None)):
        (tmp_path / "torch").mkdir(exist_ok=True)
        (tmp_path / "torch" / "__init__.py").touch()
        (tmp_path / "torch" / "version.py").write_text(f"__version__ = '2.11'\n{text}\nhip = None\n")
        spec = type("spec", (), {"origin": str(tmp_path / "torch" / "__init__.py")})
        monkeypatch.setattr(diagnosis.importlib.util, "find_spec", lambda _, spec=spec: spec)
        assert diagnosis._torch_cuda() == expected


def test_requirements_are_those_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = dict(re.match(r"([\w-]+)>=([\d.]+)", line).groups() for line in project["dependencies"])
    extras = project["optional-dependencies"]
    for line in (*extras["torch"], *extras["train"]):
        asked |= dict([re.match(r"([\w-]+)>=([\d.]+)", line).groups()])
    assert {name: least for name, (least, _) in diagnosis.REQUIRED.items()} == asked
    optional = [line for extra in ("video", "parquet", "logs", "megatron") for line in extras[extra]]
    assert [f"{name}>={least}" for name, (least, _) in diagnosis.OPTIONAL.items()] == optional
    assert [requirement for _, _, requirement, _ in diagnosis.LIBRARIES.values()] == extras["cuda"]


@pytest.mark.parametrize(
    "name, header", [("NCCL", "csrc/cuda/comm/nccl_abi.h"), ("cuBLASLt", "csrc/cuda/gemm/cublaslt_abi.h")]
)
def test_libraries_are_those_of_the_extension(name, header):
    text, (soname, wheel, requirement, _) = (ROOT / header).read_text(), diagnosis.LIBRARIES[name]
    assert f'"{soname}"' in text and f'"{wheel}"' in text and requirement.partition(">=")[0] in text


def test_gpus_links_and_libraries(tmp_path):
    """Three GPUs, two of them joined by NVLink, and an NCCL that is too old."""
    _compile(tmp_path, "libnvidia-ml.so.1", NVML, FAIL=0, CUDA=13000)
    for soname, source in LIBRARIES.items():
        _compile(tmp_path, soname, source)
    facts = _doctor(tmp_path)
    assert facts["driver"] == {"version": "580.65.06", "cuda": "13.0"}
    gpu = {"name": "NVIDIA H200", "memory": 150754820096 / 2**30, "capability": "9.0", "nvlinks": 4}
    assert facts["gpus"] == [gpu, gpu, {**gpu, "capability": "8.0", "nvlinks": 0}]
    assert facts["links"] == [
        {"gpus": [0, 1], "by": "NVLink"},
        {"gpus": [0, 2], "by": "SYS"},
        {"gpus": [1, 2], "by": "PXB"},
    ]
    assert facts["libraries"] == {
        "NCCL": {"path": str(tmp_path / "libnccl.so.2"), "version": "2.25.1"},
        "cuBLASLt": {"path": str(tmp_path / "libcublasLt.so.13"), "version": "13.10.0"},
    }
    text = "\n".join(report(facts))
    assert "NVIDIA driver 580.65.06, runs CUDA up to 13.0" in text
    assert "GPU 1: NVIDIA H200, 140 GiB, compute capability 9.0, 4 NVLinks\n" in text
    assert "GPUs joined by NVLink: 0-1\nGPUs joined by SYS: 0-2\nGPUs joined by PXB: 1-2\n" in text
    assert f"cuBLASLt 13.10.0: {tmp_path}/libcublasLt.so.13" in text
    assert "is too old\n    pip install -U 'nvidia-nccl-cu13>=2.26'" in text
    assert "for compute capability 9.0 (H100, H200), not 8.0" in text


def test_a_driver_that_does_not_answer(tmp_path):
    _compile(tmp_path, "libnvidia-ml.so.1", NVML, FAIL=18, CUDA=13000)
    facts = _doctor(tmp_path)
    assert facts["driver"] is None and facts["gpus"] == []
    (lack,) = [lack for lack in facts["missing"] if "driver" in lack["what"]]
    assert lack["what"] == "NVIDIA's driver does not answer: nvmlInit_v2: Driver/library version mismatch (18)"
    assert "nvidia-smi" in lack["fix"]


def test_a_library_beside_the_package_comes_first(tmp_path, monkeypatch):
    monkeypatch.setattr(diagnosis, "__file__", str(tmp_path / "site" / "automodel_c" / "diagnosis.py"))
    soname = "libfor_the_doctor.so.2"
    assert diagnosis._library(soname, "nvidia/x/lib", "x>=1", "ncclGetVersion") is None
    _compile(tmp_path / "site" / "nvidia" / "x" / "lib", soname, LIBRARIES["libnccl.so.2"])
    found = diagnosis._library(soname, "nvidia/x/lib", "x>=1", "ncclGetVersion")
    assert found == {"path": str(tmp_path / "site/nvidia/x/lib" / soname), "version": "2.25.1"}


def _with(facts, **changes):
    facts = copy.deepcopy(facts)
    for key, value in changes.items():
        facts[key] = {**facts[key], **value} if isinstance(value, dict) and isinstance(facts[key], dict) else value
    return facts


H200 = [{"name": "NVIDIA H200", "memory": 139.8, "capability": "9.0", "nvlinks": 0}]
DRIVER = {"version": "580.65", "cuda": "13.0"}
FOUND = {"NCCL": {"path": "p", "version": "2.28.9"}, "cuBLASLt": {"path": "p", "version": "13.1.0"}}
ON_GPU = {"gpus": H200, "driver": DRIVER, "libraries": FOUND, "torch_cuda": "13.0"}
WITH_CUDA = {"extension": {"cuda": True, "cuda_version": "13.0"}}


@pytest.mark.parametrize(
    "changes, what, fix",
    [
        ({"packages": {"tqdm": None}}, "not installed: tqdm (for training)", "pip install 'tqdm>=4.66'"),
        ({"packages": {"torch": "2.9.1+cpu"}}, "too old: torch 2.9.1+cpu", "pip install 'torch>=2.11'"),
        ({"packages": {"av": "13.9"}}, "too old: av 13.9", "pip install 'av>=14'"),
        ({**ON_GPU, "extension": {"cuda": False}}, "built for the CPU only", "AM_CUDA=1 pip install -e "),
        ({**ON_GPU, **WITH_CUDA, "torch_cuda": None}, "torch is built for the CPU", "--force-reinstall torch"),
        ({**ON_GPU, **WITH_CUDA, "driver": {"version": "550", "cuda": "12.4"}}, "CUDA up to 12.4", "580 or newer"),
        ({**ON_GPU, **WITH_CUDA, "libraries": {**FOUND, "NCCL": None}}, "NCCL (", "'nvidia-nccl-cu13>=2.26'"),
        ({**ON_GPU, **WITH_CUDA, "libraries": {**FOUND, "cuBLASLt": None}}, "cuBLASLt (", "'nvidia-cublas>=13'"),
        ({**WITH_CUDA, "gpus": [], "driver": None}, "no NVIDIA driver is here", "NVIDIA's driver, 580 or newer"),
    ],
)  # fmt: skip
def test_what_is_missing_has_its_remedy(changes, what, fix):
    """One lack, one remedy."""
    whole = {name: least for name, (least, _) in (diagnosis.REQUIRED | diagnosis.OPTIONAL).items()}
    facts = _with(amc.doctor(), packages=whole, gpus=[], driver=None, extension={"cuda": False})
    facts = _with(facts, **changes)
    found = [of for of in diagnosis._missing(facts, None)]
    assert len(found) == 1 and what in found[0][0] and fix in found[0][1], found
    facts["missing"] = [{"what": what, "fix": fix} for what, fix in found]
    assert "\n".join(report(facts)).endswith(f"missing:\n  {found[0][0]}\n    {found[0][1]}")


def test_nothing_is_missing():
    whole = {name: least for name, (least, _) in (diagnosis.REQUIRED | diagnosis.OPTIONAL).items()}
    for changes in ({**ON_GPU, **WITH_CUDA}, {"gpus": [], "driver": None, "extension": {"cuda": False}}):
        facts = _with(amc.doctor(), packages=whole, **changes)
        assert not list(diagnosis._missing(facts, None))


@pytest.mark.parametrize(
    "version, least, older",
    [
        ("2.0", "2.0", False),
        ("2.0.0rc1", "2.0", False),
        ("1.26.4", "2.0", True),
        ("2.13.0+cpu", "2.11", False),
        ("13", "13.1", True),
        ("2.9", "2.11", True),
        ("580.65", "13", False),
    ],
)
def test_versions_compare_as_numbers(version, least, older):
    assert diagnosis._is_older(version, least) == older
