"""Every tensor argument of every method of the extension, in turn from a DLPack producer written in C (hostile.c).

What the standard allows changes no result; what is not read here is an exception of ours, after which all arrays are as
they were; no byte beside an array changes; and every tensor that was taken is given back exactly once.
"""

import gc

import numpy as np
import pytest
import torch

from automodel_c import _amcore, build_info
from tests.core.memcheck import load_hostile
from tests.fuzz.fuzz_args import OURS
from tests.leaks.calls import CALLS

SAME = 8  # the first kinds of hostile.c: by the letter of the standard
OTHERWISE = ("unaligned", "no_axes", "huge_product_empty")  # may be another array that is good
CODES = {torch.bool: 6, torch.uint8: 1, torch.float16: 2, torch.float32: 2, torch.float64: 2, torch.bfloat16: 4}
SLACK = 64


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    return load_hostile(tmp_path_factory.mktemp("hostile"))


@pytest.fixture(autouse=True)
def _settings_restored():
    """And torch.empty, of which the leak list makes scratch, gives the same each time."""
    info = build_info()
    before, fill = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before)
    torch.utils.deterministic.fill_uninitialized_memory = fill
    _amcore.set_isa(info["isa"])
    _amcore.set_num_threads(info["num_threads"])


def places(value, path=()):
    """Where tensors are in arguments."""
    if isinstance(value, torch.Tensor) and value.device.type == "cpu":
        yield path
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield from places(inner, (*path, key))
    for key, inner in enumerate(value[:2]) if isinstance(value, list) else ():  # of long lists the first
        yield from places(inner, (*path, key))


def at(value, path):
    for key in path:
        value = value[key]
    return value


def replaced(value, path, new):
    if not path:
        return new
    if isinstance(value, dict):
        return {**value, path[0]: replaced(value[path[0]], path[1:], new)}
    inner = list(value)
    inner[path[0]] = replaced(inner[path[0]], path[1:], new)
    return type(value)(inner)


class Array:
    """A compact copy of a tensor between bytes that nobody may write, aligned as torch aligns, on which what an
    operator keeps in scratch depends."""

    def __init__(self, tensor):
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy() if tensor.numel() else np.zeros(0, "u1")
        self.whole = np.full(flat.size + 3 * SLACK, 0xA5, np.uint8)
        first = SLACK + -self.whole.ctypes.data % SLACK
        self.body = self.whole[first : first + flat.size]
        self.body[:] = flat
        self.fences = self.whole[:first], self.whole[first + flat.size :]
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype
        self.address = self.whole.ctypes.data + first
        self.strides = torch.empty(self.shape, device="meta").stride()

    def producer(self, kind_of, kind):
        code, bits = CODES.get(self.dtype, 0), 8 * self.dtype.itemsize
        return kind_of(self.address, self.shape, self.strides, code, bits, kind)

    def fenced(self):
        return all((fence == 0xA5).all() for fence in self.fences)


def content(arguments, array):
    """The bytes of all tensors but large scratch, that of `array` last."""
    tensors = [at(arguments, path) for path in places(arguments)]
    tensors = [tensor.contiguous().flatten() for tensor in tensors if tensor.numel() < 1 << 20]
    return [*(x.view(torch.uint8).numpy().tobytes() for x in tensors), array.body.tobytes()]


def arguments_of(call):
    args, kwargs = call.make()
    return {**dict(enumerate(args)), **kwargs}


def different(calls):
    """Of calls that work, one for each method and places of tensors."""
    working = [call for call in calls if call.raises is None]
    found = {(call.method, tuple(places(arguments_of(call)))): call for call in reversed(working)}
    return [call for (_, where), call in reversed(found.items()) if where]


def outcome(method, arguments):
    try:
        args = [arguments[key] for key in arguments if isinstance(key, int)]
        return None, repr(method(*args, **{key: value for key, value in arguments.items() if isinstance(key, str)}))
    except OURS as error:
        return error, None


def of(call, path, behind, kind):
    """(exception, result, `content` before and after, array) of a call whose tensor at `path` comes from `kind`."""
    arguments = arguments_of(call)
    array = Array(at(arguments, path))
    arguments = replaced(arguments, path, array.producer(behind, kind))
    before = content(arguments, array)
    error, result = outcome(getattr(_amcore, call.method), arguments)
    return error, result, before, content(arguments, array), array


@pytest.mark.parametrize("behind", ["Producer", "Table"])
@pytest.mark.parametrize("call", different(CALLS), ids=str)
def test_producers(hostile, call, behind):
    kinds = [kind for kind in hostile.KINDS if kind != "cuda" or not torch.cuda.is_available()]
    given, deleted, again = hostile.counts()
    wrong, refused = [], 0
    for path in places(arguments_of(call)):
        name = "/".join(map(str, path))
        (_, plain, _, first, _), (*_, second, _) = (of(call, path, getattr(hostile, behind), "versioned") for _ in "12")
        results = [i for i, pair in enumerate(zip(first, second, strict=True)) if pair[0] == pair[1]]  # not scratch
        for number, kind in enumerate(kinds):
            error, result, before, found, array = of(call, path, getattr(hostile, behind), kind)
            if not array.fenced():
                wrong.append(f"{name} {kind}: bytes beside it were written")
            if error is not None and number < SAME:
                wrong.append(f"{name} {kind}: {error!r}")
            elif error is not None and found != before:
                wrong.append(f"{name} {kind}: something was written before {error!r}")
            elif (
                error is None
                and kind not in OTHERWISE
                # a size that is asked for may be another on another device
                and ((result != plain and kind != "cuda") or [found[i] for i in results] != [first[i] for i in results])
            ):
                wrong.append(f"{name} {kind}: another result")
            refused += error is not None
    assert not wrong, "\n".join(wrong)
    assert refused > 10
    gc.collect()
    now = hostile.counts()
    assert now[0] - given == now[1] - deleted and now[2] == again, "given, deleted, deleted again"
    assert behind == "Table" or now[0] - given > 10


def test_the_first_kinds_are_the_same_as_a_tensor(hostile):
    """What the others are compared with is right: read back through an operator that copies."""
    rows = torch.arange(6, dtype=torch.float32).reshape(3, 2)
    for behind in (hostile.Producer, hostile.Table):
        for kind in hostile.KINDS[:SAME]:
            out = torch.full((3, 2), torch.nan)
            _amcore.exchange_copy(out, Array(rows).producer(behind, kind), [0, 0, 3], reverse=False, runs=False)
            assert torch.equal(out, rows), kind


def test_every_method_with_tensors_is_called(hostile):
    """The list is the leak list, which lint compares with the module."""
    methods = {call.method for call in different(CALLS)}
    assert len(methods) > 30
    working = [call for call in CALLS if call.raises is None and call.method not in methods]
    assert all(not list(places(arguments_of(call))) for call in working)
