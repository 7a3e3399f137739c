"""DLPack by the letter: what producers may do is read right, what they may not is refused, and every tensor taken is
given back exactly once."""

import contextlib
import ctypes
import gc
import sys
import threading

import numpy as np
import pytest
import torch

from automodel_c import _amcore
from tests.core.producers import CPU, INT, Producer, exchange_type

KINDS = pytest.mark.parametrize("versioned", [True, False], ids=["versioned", "legacy"])


def read(producer):
    return _amcore.index_array(producer).tolist()


@KINDS
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [1, 2, 3, 4]),
        ({"numpy_dtype": np.int32}, [1, 2, 3, 4]),
        ({"strides": (1,)}, [1, 2, 3, 4]),
        ({"shape": (2,), "strides": (2,)}, [1, 3]),
        ({"shape": (3,), "strides": (0,)}, [1, 1, 1]),
        ({"shape": (2,), "byte_offset": 16}, [3, 4]),
        ({"shape": (1,), "strides": (999,)}, [1]),
        ({"shape": (1,), "strides": (-7,)}, [1]),
        ({"shape": (0,), "strides": (-3,)}, []),
        ({"shape": (0,), "strides": (1,), "data": None}, []),
        ({"shape": (0,), "data": None, "byte_offset": 8}, []),
        ({"shape": (0,), "byte_offset": 3}, []),
        ({"deleter": False}, [1, 2, 3, 4]),
        ({"style": "stream"}, [1, 2, 3, 4]),
        ({"style": "bare"}, [1, 2, 3, 4]),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else None,
)
def test_read(versioned, fields, expected):
    producer = Producer(versioned=versioned, **fields)
    assert read(producer) == expected
    assert producer.deleted == int(fields.get("deleter", True))


@KINDS
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"shape": (2, 3)}, [[1, 2, 3], [4, 5, 6]]),
        ({"shape": (2, 3), "version": (1, 2)}, [[1, 2, 3], [4, 5, 6]]),
        ({"shape": (2, 2), "byte_offset": 8}, [[3, 4], [5, 6]]),
        ({"shape": (1, 5), "strides": (999, 1)}, [[1, 2, 3, 4, 5]]),
        ({"shape": (1, 5), "strides": (-7, 1)}, [[1, 2, 3, 4, 5]]),
        ({"shape": (3, 1), "strides": (2, 999)}, [[1], [3], [5]]),
        ({"shape": (0, 3), "strides": (-1, 999), "data": None}, []),
    ],
    ids=str,
)
def test_read_of_two_axes(versioned, fields, expected):
    """Strides that are NULL mean compact; those of axes of one element, and of empty tensors, mean nothing."""
    producer = Producer([1, 2, 3, 4, 5, 6], numpy_dtype=np.float32, versioned=versioned, **fields)
    out, rows = torch.full(fields["shape"], torch.nan), fields["shape"][0]
    _amcore.exchange_copy(out, producer, [0, 0, rows], reverse=False, runs=False)
    assert out.tolist() == expected and producer.deleted == 1


@KINDS
@pytest.mark.parametrize("strides", [None, 8], ids=["null", "wild"])
def test_shape_and_strides_of_no_axes_are_not_looked_at(versioned, strides):
    class Number(Producer):
        def fill(self, tensor):
            super().fill(tensor)
            nowhere = ctypes.cast(8, ctypes.POINTER(ctypes.c_int64))
            tensor.ndim, tensor.shape, tensor.strides = 0, nowhere, nowhere if strides else None

    producer = Number([3], numpy_dtype=np.float32, versioned=versioned)
    total = torch.zeros(1, dtype=torch.float64)
    _amcore.grad_sumsq(total, torch.zeros(1024, dtype=torch.float64), [producer])
    assert total == 9 and producer.deleted == 1


@KINDS
def test_tensors_are_given_back_from_any_thread(versioned):
    """Their deleters are Python functions here: they need the GIL, and the producer's own thread is another."""
    producers = [Producer(np.ones(5000), numpy_dtype=np.float32, versioned=versioned) for _ in range(4)]
    totals = [torch.zeros(1, dtype=torch.float64) for _ in producers]

    def work(total):
        for _ in range(50):
            _amcore.grad_sumsq(total, torch.zeros(1024, dtype=torch.float64), producers)

    workers = [threading.Thread(target=work, args=(total,)) for total in totals]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert totals == [20_000] * 4 and [p.deleted for p in producers] == [200] * 4


def test_minor_versions_are_read():
    for minor in (0, 1, 3, 99):
        assert read(Producer(version=(1, minor))) == [1, 2, 3, 4]


@KINDS
@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"strides": (-1,)}, ValueError, "'index' has the negative stride -1 on axis 0"),
        ({"dtype": (INT, 64, 2)}, TypeError, r"dtype that is not known here \(code 0, 64 bits, 2 lanes\)"),
        ({"dtype": (INT, 64, 0)}, TypeError, "0 lanes"),
        ({"dtype": (5, 64, 1)}, TypeError, "code 5, 64 bits"),
        ({"dtype": (INT, 4, 1)}, TypeError, "code 0, 4 bits"),
        ({"numpy_dtype": np.float32}, TypeError, "'index' must be int32 or int64, not float32"),
        ({"numpy_dtype": np.bool_}, TypeError, "'index' must be int32 or int64, not bool"),
        ({"shape": (2, 2)}, ValueError, "'index' must have one axis, not 2"),
        ({"shape": (1, 4), "strides": (999, 1)}, ValueError, "'index' must have one axis, not 2"),
        ({"shape": None, "ndim": 0}, ValueError, "'index' must have one axis, not 0"),
        ({"shape": (1,) * 7}, ValueError, "'index' has 7 axes, at most 6 are supported"),
        ({"ndim": -1}, ValueError, "'index' has -1 axes"),
        ({"shape": None, "ndim": 1}, ValueError, "'index' has 1 axes but no shape"),
        ({"shape": (-4,)}, ValueError, "'index' has extent -4 on axis 0"),
        ({"shape": (2**62,)}, ValueError, "'index' has extent 4611686018427387904 on axis 0"),
        ({"shape": (2**40, 2**40)}, ValueError, "'index' has extent"),
        ({"shape": (2**62, 2**62, 0)}, ValueError, "'index' has extent"),
        ({"shape": (0, 2**62, 2**62)}, ValueError, "'index' has extent"),
        ({"shape": (3,), "strides": (2**62,)}, ValueError, "'index' has the stride 4611686018427387904 on axis 0"),
        ({"byte_offset": 4}, ValueError, "'index' is not aligned to its 8-byte elements"),
        ({"data": None}, ValueError, r"'index' has 4 elements but no storage of its own .* pass \.to_local\(\)"),
        ({"data": None, "byte_offset": 64}, ValueError, "no storage of its own"),
        ({"device": (10, 0)}, ValueError, "on a device of DLPack type 10"),
        ({"device": (2, 0)}, ValueError, "'index' must be on the CPU"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else None,
)
def test_refuse(versioned, fields, error, words):
    producer = Producer(versioned=versioned, **fields)
    with pytest.raises(error, match=words):
        read(producer)
    assert producer.deleted == 1


@KINDS
def test_huge_broadcast_is_out_of_memory(versioned):
    producer = Producer(versioned=versioned, shape=(2**57,), strides=(0,))
    with pytest.raises(MemoryError):
        read(producer)
    assert producer.deleted == 1


def test_other_major_version_is_refused_and_given_back():
    for major in (0, 2, 2**31):
        producer = Producer(version=(major, 0))
        with pytest.raises(BufferError, match=rf"'index' comes as DLPack {major}\.0; major version 1 is read here"):
            read(producer)
        assert producer.deleted == 1


@pytest.mark.parametrize("name", [b"used_dltensor", b"used_dltensor_versioned", b"other"])
def test_used_capsule_is_refused_and_not_touched(name):
    producer = Producer(name=name)
    with pytest.raises(TypeError, match="'index': __dlpack__ gave no unused DLPack capsule"):
        read(producer)
    assert producer.deleted == 0


@KINDS
def test_capsule_is_marked_used(versioned):
    class Keeping(Producer):
        def __dlpack__(self, **keywords):
            self.capsule = getattr(self, "capsule", None) or super().__dlpack__(**keywords)
            return self.capsule

    producer = Keeping(versioned=versioned)
    assert read(producer) == [1, 2, 3, 4]
    assert "used_dltensor" in repr(producer.capsule)
    with pytest.raises(TypeError, match="no unused"):
        read(producer)
    assert producer.deleted == 1


def test_stream_and_version_are_offered():
    modern, old = Producer(), Producer(style="stream")
    read(modern), read(old)
    assert modern.calls == [{"stream": None, "max_version": (1, 3)}]
    assert old.calls == [{"stream": None, "max_version": (1, 3)}, {}]


def test_error_after_the_tensor_was_taken():
    producer, second = Producer(), Producer()
    with pytest.raises(TypeError, match="argument 'world' must be an int, not str"):
        _amcore.frame_partition(producer, "x", alpha=0, bisect=False)
    with pytest.raises(TypeError, match="missing required argument 'alpha'"):
        _amcore.frame_partition(second, 2, bisect=False)
    assert (producer.deleted, second.deleted) == (1, 1)
    with pytest.raises(ValueError, match="world is 0"):
        _amcore.frame_partition(producer, 0, alpha=0, bisect=False)
    assert producer.deleted == 2


class Raising(Producer):
    def __dlpack__(self, **keywords):
        raise RuntimeError("the producer's own words")


class Bare:
    """No protocol at all; attributes are added by the tests."""


def bare(**attributes):
    return type("Odd", (Bare,), attributes)()


@pytest.mark.parametrize(
    ("obj", "error", "words"),
    [
        (Raising(), RuntimeError, "the producer's own words"),
        (bare(), TypeError, r"'index' must be a tensor \(an object with __dlpack__\)"),
        (7, TypeError, "must be a tensor"),
        (None, TypeError, "must be a tensor"),
        ("1234", TypeError, "must be a tensor"),
        (int, TypeError, "must be a tensor"),
        (bare(__dlpack__=lambda self, **k: None), TypeError, "'index': __dlpack_device__"),
        (bare(__dlpack__=None, __dlpack_device__=lambda self: (CPU, 0)), TypeError, "not callable"),
        (bare(__dlpack__=lambda self, **k: 3, __dlpack_device__=lambda self: (CPU, 0)), TypeError, "no unused"),
        (bare(__dlpack__=lambda self, **k: 3, __dlpack_device__=lambda self: [CPU, 0]), TypeError, "__dlpack_device__"),
        (bare(__dlpack__=lambda self, **k: 3, __dlpack_device__=lambda self: (CPU,)), TypeError, "__dlpack_device__"),
        (bare(__dlpack__=lambda self, **k: 3, __dlpack_device__=lambda self: None), TypeError, "__dlpack_device__"),
    ],
    ids=lambda value: None if isinstance(value, str | type) else type(value).__name__,
)
def test_odd_objects(obj, error, words):
    with pytest.raises(error, match=words):
        read(obj)


def test_exchange_table_is_used_and_borrows():
    kind = exchange_type(lambda obj, out: obj.fill(out.contents) or 0)
    producer = kind()
    assert read(producer) == [1, 2, 3, 4]
    assert read(kind([7])) == [7]
    assert (producer.deleted, producer.calls) == (0, [])


@pytest.mark.parametrize("odd", [{"version": (2, 0)}, {"version": (0, 1)}, {"capsule_name": b"another"}], ids=str)
def test_unreadable_exchange_table_falls_back_to_the_capsule(odd):
    producer = exchange_type(lambda obj, out: -1, **odd)()
    assert read(producer) == read(producer) == [1, 2, 3, 4]
    assert producer.deleted == 2


def test_exchange_attribute_that_is_no_capsule():
    class Odd(Producer):
        __dlpack_c_exchange_api__ = 7

    assert read(Odd()) == [1, 2, 3, 4]


def test_exchange_table_that_fails_without_words():
    producer = exchange_type(lambda obj, out: -1)()
    with pytest.raises(ValueError, match="'index' has no memory that can be read here"):
        read(producer)


def test_types_seen_are_not_kept_for_ever():
    """Types made at run time were held by the table cache until the process ended."""
    finished = []

    class Meta(type):
        def __del__(cls):
            finished.append(cls)

    for _ in range(300):
        kind = Meta("Short", (Producer,), {})
        read(kind())
    del kind
    gc.collect()
    assert len(finished) > 100


@KINDS
def test_no_reference_is_kept(versioned):
    producer = Producer(versioned=versioned)
    bad = Producer(versioned=versioned, strides=(-1,))
    before = sys.getrefcount(producer), sys.getrefcount(bad), sys.getrefcount(producer.array)
    for _ in range(20):
        read(producer)
        with contextlib.suppress(ValueError):
            read(bad)
    producer._held.clear(), bad._held.clear()  # the deleters of this file refer to their producer
    gc.collect()
    assert (sys.getrefcount(producer), sys.getrefcount(bad), sys.getrefcount(producer.array)) == before
    assert (producer.deleted, bad.deleted) == (20, 20)
