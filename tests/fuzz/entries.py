"""Bytes as a call of any method of the extension, and the laws that hold for whatever is called.

The bytes choose a call of the leak list and edit its arguments: a tensor comes from a producer of tests/core/hostile.c,
another library, memory that is read-only, shared or laid out otherwise; numbers, extents, documents and tables change.
fuzz_entries.py lets coverage choose the bytes, test_fuzz_entries.py replays those that it kept.
"""

import math
from pathlib import Path

import numpy as np
import torch

from automodel_c import _amcore
from tests.core.test_hostile import CODES, Array, arguments_of, at, replaced
from tests.fuzz.fuzz_args import FLOATS, INTEGERS, OURS, TORCH_DTYPES, Rude
from tests.leaks.calls import CALLS
from tests.strategies import LAYOUTS, with_layout

METHODS = sorted({call.method for call in CALLS})
FILE = Path(__file__).parent / "corpus_entries.txt"  # an input a line: its method, and the other bytes in hexadecimal
MOST = 1 << 14  # elements of what is edited; scratch is larger
ODD = [None, True, False, "", "scalar", "heads", "balanced", "auto", "a\0b", "\ud800", b"x", object, ..., {}, (), [],
       Rude()]  # fmt: skip
DTYPES = ["i4", "i8", "f4", ">i8", "O", "U3", "M8[s]", "?"]
EXTREMES = [-1, 2**31, 2**59, 2**60, 2**62, 2**63 - 1, -(2**63)]
VALUES = [0.0, -0.0, -1.0, 1e-45, 3e38, 1e300, math.inf, -math.inf, math.nan]


class Bytes:
    """Numbers and choices, one after another; 0 after the end."""

    def __init__(self, data):
        self.data, self.place = data, 0

    def byte(self):
        self.place += 1
        return self.data[self.place - 1] if self.place <= len(self.data) else 0

    def pick(self, of):
        return of[self.byte() % len(of)]

    def integer(self):
        """Small ones mostly."""
        first = self.byte()
        if first < 224:
            return first - 2 if first < 112 else first % 7
        return INTEGERS[first % len(INTEGERS)] if first < 252 else (self.byte() << 8 | self.byte()) - 300

    def extent(self, below):
        first = self.byte()
        return self.pick(EXTREMES) if first > 224 else first % below

    def number(self):
        first = self.byte()
        return FLOATS[first % len(FLOATS)] if first < 128 else (first - 192) / 16


def leaves(value, path=()):
    """Places of arguments, and of the first items of lists among them."""
    yield path
    if isinstance(value, list | tuple):
        for key, inner in enumerate(value[:8]):
            yield from leaves(inner, (*path, key))


def small(value):
    return isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.numel() <= MOST


class Case:
    """A call that bytes describe. `arrays` are those behind hostile producers."""

    def __init__(self, data, hostile):
        self.input, self.hostile, self.arrays = Bytes(data), hostile, []
        method = self.input.pick(METHODS)
        calls = [call for call in CALLS if call.method == method]
        working = [call for call in calls if call.raises is None]
        call = self.input.pick(working if working and self.input.byte() % 8 else calls)
        self.method, self.arguments = method, arguments_of(call)
        for _ in range(self.input.byte() % 6):
            self.edit()

    def edit(self):
        places = [path for key, value in self.arguments.items() for path in leaves(value, (key,))]
        kind = self.input.byte() % 16
        if kind == 0:
            self.resize_all()
        elif kind == 1:
            self.arguments.pop(self.input.pick([*self.arguments, None]), None)
        elif kind == 2:
            self.arguments[self.input.pick(["x", "alpha", "params", "é", "docs", 0, 7])] = self.anything()
        elif places:
            path = self.input.pick(places)
            self.arguments = replaced(self.arguments, path, self.edited(at(self.arguments, path)))

    def resize_all(self):
        """Every axis of one extent, in all tensors alike, so that they still fit each other."""
        extents = sorted({n for value in self.arguments.values() if small(value) for n in value.shape}) or [1]
        old, new = self.input.pick(extents), self.input.byte() % 34
        for key, value in self.arguments.items():
            if small(value) and value.numel() * max(1, new) <= MOST:
                self.arguments[key] = resized(value, [new if n == old else n for n in value.shape])

    def edited(self, value):
        if small(value) and self.input.byte() % 8:
            return self.pick_of_tensor(value)
        if isinstance(value, list | tuple) and self.input.byte() % 8:
            return self.items(list(value))
        if isinstance(value, int) and not isinstance(value, bool) and self.input.byte() % 8:
            return self.input.integer()
        if isinstance(value, float) and self.input.byte() % 8:
            return self.input.number()
        return self.anything()

    def anything(self):
        makers = [
            self.input.integer, self.input.number, lambda: self.input.pick(ODD), lambda: self.items([]),
            lambda: torch.full([self.input.byte() % 4 for _ in range(self.input.byte() % 5)], 1,
                               dtype=self.input.pick(TORCH_DTYPES)),
            lambda: np.zeros(self.input.byte() % 5, self.input.pick(DTYPES)),
            lambda: self.fields(torch.zeros(4)),
        ]  # fmt: skip
        return self.input.pick(makers)()

    def items(self, value):
        """A list of integers, or the list with an item more, less, or twice."""
        kind = self.input.byte() % 4
        if kind == 0 or not value:
            count, ascending, numbers = self.input.byte() % 9, self.input.byte() % 2, []
            for _ in range(count):
                numbers.append(self.input.integer() + (max(numbers, default=0) if ascending else 0))
            return numbers
        place = self.input.byte() % len(value)
        return [value[:place], [*value[:place], value[place], *value[place:]], value[place + 1 :]][kind - 1]

    def pick_of_tensor(self, x):
        makers = [self.producer, self.fields, self.values, self.values, self.shape, self.cast, self.layout, self.axes,
                  self.numpy, self.shared]  # fmt: skip
        return self.input.pick(makers)(x)

    def array(self, x):
        self.arrays.append(Array(compact(x)))
        return self.arrays[-1]

    def producer(self, x):
        behind = self.input.pick([self.hostile.Producer, self.hostile.Table])
        kinds = [kind for kind in self.hostile.KINDS if kind != "cuda" or not torch.cuda.is_available()]
        return self.array(x).producer(behind, self.input.pick(kinds))

    def fields(self, x):
        """A producer whose shape, strides and dtype are the bytes'. What it says of memory is true, or cannot be."""
        array = self.array(resized(x, [512]))
        shape = [self.input.extent(9) for _ in range(self.input.byte() % 7)]
        strides = [self.input.extent(17) for _ in shape]
        bits = self.input.pick([8, 16, 32, 64, 7, 128])
        code, bits = self.input.pick([(CODES.get(x.dtype, 0), 8 * x.dtype.itemsize), (self.input.byte() % 7, bits)])
        reach = sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if n > 1) + 1
        told = any(n < 0 or n > 2**59 for n in shape) or any(s < 0 for s in strides)
        if not told and 0 not in shape and len(array.body) < reach * (bits // 8 or 1) < 2**63:
            strides = [0] * len(shape)
        behind = self.input.pick([self.hostile.Producer, self.hostile.Table])
        kind = self.input.pick(["versioned", "legacy"])
        return behind(array.address, tuple(shape), tuple(strides), code, bits, kind)

    def values(self, x):
        """Some elements are others."""
        x = x.clone()
        flat = x.view(-1) if x.is_contiguous() else x.contiguous().view(-1)
        for _ in range(self.input.byte() % 9 if flat.numel() else 0):
            place = self.input.byte() % flat.numel()
            if x.dtype.is_floating_point or x.dtype.is_complex:
                flat[place] = torch.tensor(self.input.pick(VALUES), dtype=torch.float64).to(x.dtype)
            elif x.dtype == torch.bool:
                flat[place] = self.input.byte() % 2 == 1
            else:
                most = torch.iinfo(x.dtype)
                flat[place] = max(most.min, min(most.max, self.input.integer()))
        return flat.view(x.shape)

    def shape(self, x):
        sizes = list(x.shape)
        if sizes:
            axis = self.input.byte() % len(sizes)
            rest = x.numel() // max(1, sizes[axis])
            sizes[axis] = min(self.input.byte() % 40, MOST // max(1, rest))
        return resized(x, sizes)

    def cast(self, x):
        dtype = self.input.pick(TORCH_DTYPES)
        return x if x.is_complex() else x.to(dtype)

    def layout(self, x):
        return with_layout(x, self.input.pick(LAYOUTS))

    def axes(self, x):
        kind = self.input.byte() % 4
        if kind == 0:
            return x.unsqueeze(self.input.byte() % (x.ndim + 1)) if x.ndim < 9 else x
        if kind == 1:
            return x.flatten()
        if kind == 2:
            return x.transpose(0, -1) if x.ndim else x
        return x.reshape(-1)[0].expand(x.shape) if x.numel() else x

    def numpy(self, x):
        if x.dtype == torch.bfloat16:
            return Rude()
        array = x.numpy().copy()
        kind = self.input.byte() % 4
        array.flags.writeable = kind != 0
        if kind == 1 and array.ndim:
            return array[::-1]
        return array.astype(array.dtype.newbyteorder()) if kind == 2 else array

    def shared(self, x):
        """Memory of another argument, from its beginning or within it."""
        others = [value for value in self.arguments.values() if small(value) and value.dtype == x.dtype]
        other = self.input.pick(others or [x]).reshape(-1)
        other = other[self.input.byte() % 3 :]
        return other[: x.numel()].view(x.shape) if other.numel() >= x.numel() else other

    def content(self):
        """The bytes of all that the call could write."""
        found = []
        for value in (at(self.arguments, path) for key, v in self.arguments.items() for path in leaves(v, (key,))):
            if small(value):
                found.append(compact(value).view(-1).view(torch.uint8).numpy().tobytes())
            elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
                found.append(value.tobytes())
        return found + [array.body.tobytes() for array in self.arrays]

    def run(self):
        """The exception, one of ours, or None. AssertionError for a broken law."""
        before, counts, error = self.content(), self.hostile.counts(), None
        args = [self.arguments[key] for key in sorted(key for key in self.arguments if isinstance(key, int))]
        kwargs = {key: value for key, value in self.arguments.items() if isinstance(key, str)}
        try:
            getattr(_amcore, self.method)(*args, **kwargs)
        except OURS as raised:
            error = raised.with_traceback(None)
        assert error is None or self.content() == before, f"{self!r}: written before {error!r}"
        assert all(array.fenced() for array in self.arrays), f"{self!r}: bytes beside an array were written"
        now = self.hostile.counts()
        assert now[0] - counts[0] == now[1] - counts[1] and now[2] == counts[2], f"{self!r}: given {counts}, then {now}"
        return error

    def __repr__(self):
        return f"{self.method}({self.arguments!r})"


def compact(x):
    return x.detach().clone(memory_format=torch.contiguous_format)


def resized(x, sizes):
    """Its elements again and again in another shape; ones where it had none."""
    flat = x.reshape(-1) if x.numel() else torch.ones(1, dtype=x.dtype)
    count = math.prod(sizes)
    return flat.repeat(-(-count // flat.numel()))[:count].view(sizes).clone()


def corpus():
    """The inputs of FILE whose method is still there."""
    lines = (line.split() for line in FILE.read_text().splitlines())
    return [bytes([METHODS.index(method)]) + bytes.fromhex(rest) for method, rest in lines if method in METHODS]


def keep(inputs):
    """Makes FILE of these."""
    lines = {f"{METHODS[data[0] % len(METHODS)]} {data[1:].hex()}\n" for data in inputs if data[1:]}
    FILE.write_text("".join(sorted(lines)))
