"""DLPack producers made by hand, so that every field of the standard can be what a hostile or old library makes it."""

import ctypes
import itertools

import numpy as np

INT, UINT, FLOAT, BFLOAT, BOOL = 0, 1, 2, 4, 6
CPU, CUDA = 1, 2
READ_ONLY = 1


class Device(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int32), ("index", ctypes.c_int32)]


class DataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", Device),
        ("ndim", ctypes.c_int32),
        ("dtype", DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class Version(ctypes.Structure):
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32)]


DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Managed(ctypes.Structure):
    _fields_ = [("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", DELETER)]


class ManagedVersioned(ctypes.Structure):
    _fields_ = [
        ("version", Version),
        ("context", ctypes.c_void_p),
        ("deleter", DELETER),
        ("flags", ctypes.c_uint64),
        ("tensor", DLTensor),
    ]


FILL_DLTENSOR = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(DLTensor))


class ExchangeAPI(ctypes.Structure):
    _fields_ = [
        ("version", Version),
        ("previous", ctypes.c_void_p),
        ("allocate", ctypes.c_void_p),
        ("managed_from_object", ctypes.c_void_p),
        ("managed_to_object", ctypes.c_void_p),
        ("dltensor_from_object", FILL_DLTENSOR),
        ("current_work_stream", ctypes.c_void_p),
    ]


new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype = ctypes.py_object
new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

_DTYPES = {"int32": (INT, 32, 1), "int64": (INT, 64, 1), "float32": (FLOAT, 32, 1), "bool": (BOOL, 8, 1)}


class Producer:
    """An object with __dlpack__ whose capsule is made of the given fields; counts what the consumer does.

    `array` backs the data. `strides=None` is NULL, `data=None` is NULL, `deleter=False` is a NULL deleter. `style` is
    "modern" (keywords stream and max_version), "stream" (that keyword alone) or "bare" (no keyword).
    """

    def __init__(self, array=(1, 2, 3, 4), **fields):
        self.array = np.array(array, dtype=fields.get("numpy_dtype", np.int64))
        self.versioned = fields.get("versioned", True)
        self.style = fields.get("style", "modern")
        self.name = fields.get("name", b"dltensor_versioned" if self.versioned else b"dltensor")
        self.deleted, self.calls = 0, []
        self._fields = fields
        self._device = fields.get("device", (CPU, 0))
        self._held = []

    def __dlpack_device__(self):
        return self._device

    def __dlpack__(self, **keywords):
        allowed = {"modern": {"stream", "max_version", "copy", "dl_device"}, "stream": {"stream"}, "bare": set()}
        self.calls.append(keywords)
        if set(keywords) - allowed[self.style]:
            raise TypeError("unexpected keyword")
        return new_capsule(self._managed_address(), self.name, None)

    def fill(self, tensor):
        """Writes the fields into a DLTensor and keeps alive what it points to."""
        fields = self._fields
        shape = fields.get("shape", self.array.shape)
        tensor.data = self.array.ctypes.data if "data" not in fields else fields["data"]
        tensor.device = Device(*self._device)
        tensor.ndim = fields.get("ndim", len(shape or ()))
        tensor.dtype = DataType(*fields.get("dtype", _DTYPES[self.array.dtype.name]))
        tensor.shape = self._int64s(shape)
        tensor.strides = self._int64s(fields.get("strides"))
        tensor.byte_offset = fields.get("byte_offset", 0)

    def _int64s(self, values):
        if values is None:
            return None
        block = (ctypes.c_int64 * max(1, len(values)))(*values)
        self._held.append(block)
        return ctypes.cast(block, ctypes.POINTER(ctypes.c_int64))

    def _managed_address(self):
        managed = ManagedVersioned() if self.versioned else Managed()
        if self.versioned:
            managed.version = Version(*self._fields.get("version", (1, 0)))
            managed.flags = self._fields.get("flags", 0)
        self.fill(managed.tensor)
        if self._fields.get("deleter", True):
            managed.deleter = DELETER(self._count)
        self._held.append(managed)
        return ctypes.addressof(managed)

    def _count(self, _address):
        self.deleted += 1


_serial = itertools.count()


def exchange_type(fill, version=(1, 3), capsule_name=b"dlpack_exchange_api"):
    """A fresh type whose exchange table calls fill(obj, dltensor_pointer) -> 0 or -1; keep it as long as it is used."""
    api = ExchangeAPI(version=Version(*version), dltensor_from_object=FILL_DLTENSOR(fill))
    namespace = {
        "__dlpack_c_exchange_api__": new_capsule(ctypes.addressof(api), capsule_name, None),
        "_api": (api, capsule_name),
    }
    return type(f"Exchanging{next(_serial)}", (Producer,), namespace)
