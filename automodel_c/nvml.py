"""NVIDIA's driver, GPUs and the links between them, asked of the driver's own library: without torch or CUDA."""

import ctypes
import itertools

_LIBRARY = "libnvidia-ml.so.1"
_LINKS = 18  # NVLinks that a GPU may have
_BY_NVLINK = 2  # NVML_P2P_CAPS_INDEX_NVLINK
_ANCESTORS = {0: "same board", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}  # as nvidia-smi topo has them


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


class _Refused(Exception):
    pass


def devices():
    """(driver, gpus, links), or None where there is no driver.

    driver: {"version": str, "cuda": str, the newest CUDA that it runs}. gpus: [{"name", "memory" in GiB, "capability"
    such as "9.0", "nvlinks": how many are up}]. links: [{"gpus": [i, j], "by": "NVLink" or how PCIe joins them}].
    RuntimeError, with NVML's text, where the driver is there and does not answer.
    """
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError:
        return None
    try:
        _call(library, "nvmlInit_v2")
        try:
            return _driver(library), *_gpus(library)
        finally:
            library.nvmlShutdown()
    except _Refused as error:
        raise RuntimeError(str(error)) from None


def _call(library, name, *arguments):
    status = getattr(library, name)(*arguments)
    if status:
        library.nvmlErrorString.restype = ctypes.c_char_p
        raise _Refused(f"{name}: {library.nvmlErrorString(status).decode()} ({status})")


def _number(library, name, *arguments, kind=ctypes.c_uint):
    value = kind()
    _call(library, name, *arguments, ctypes.byref(value))
    return value.value


def _text(library, name, *arguments):
    text = ctypes.create_string_buffer(96)
    _call(library, name, *arguments, text, ctypes.c_uint(len(text)))
    return text.value.decode()


def _driver(library):
    cuda = _number(library, "nvmlSystemGetCudaDriverVersion_v2", kind=ctypes.c_int)
    return {"version": _text(library, "nvmlSystemGetDriverVersion"), "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}"}


def _gpus(library):
    handles = []
    for index in range(_number(library, "nvmlDeviceGetCount_v2")):
        handles.append(ctypes.c_void_p())
        _call(library, "nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handles[-1]))
    pairs = itertools.combinations(range(len(handles)), 2)
    links = [{"gpus": [i, j], "by": _link(library, handles[i], handles[j])} for i, j in pairs]
    return [_gpu(library, handle) for handle in handles], links


def _gpu(library, handle):
    memory, major, minor = _Memory(), ctypes.c_int(), ctypes.c_int()
    _call(library, "nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
    _call(library, "nvmlDeviceGetCudaComputeCapability", handle, ctypes.byref(major), ctypes.byref(minor))
    return {
        "name": _text(library, "nvmlDeviceGetName", handle),
        "memory": memory.total / 2**30,
        "capability": f"{major.value}.{minor.value}",
        "nvlinks": sum(_is_up(library, handle, link) for link in range(_LINKS)),
    }


def _is_up(library, handle, link):
    try:
        return _number(library, "nvmlDeviceGetNvLinkState", handle, ctypes.c_uint(link)) == 1
    except _Refused:  # it has no such link
        return False


def _link(library, one, other):
    try:
        if _number(library, "nvmlDeviceGetP2PStatus", one, other, ctypes.c_int(_BY_NVLINK)) == 0:
            return "NVLink"
        level = _number(library, "nvmlDeviceGetTopologyCommonAncestor", one, other)
        return _ANCESTORS.get(level, f"level {level}")
    except _Refused:
        return "unknown"
