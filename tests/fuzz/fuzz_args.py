"""Random values into every method of the extension: only our exception types may come out, and nothing may crash.

python -m tests.fuzz.fuzz_args --seconds 600 [--seed N]. Best with `make asan`'s build, whose sanitizers see more.
"""

import argparse
import random
import time

import numpy as np
import torch

from automodel_c import _amcore
from tests.core.producers import Producer
from tests.leaks.calls import CALLS
from tests.strategies import LAYOUTS, with_layout

OURS = (ValueError, TypeError, NotImplementedError, MemoryError, BufferError, RuntimeError)
INTEGERS = [0, 1, 2, 3, -1, 7, 255, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, -(2**63), 10**30]
FLOATS = [0.0, -0.0, 1.0, 0.5, -1.0, 1e-45, 1e300, float("inf"), float("nan"), 10**400]
TORCH_DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int16, torch.int32, torch.int64,
                torch.uint8, torch.bool, torch.complex64]  # fmt: skip
HOSTILE = [
    {"strides": (-1,)}, {"version": (2, 0)}, {"name": b"used_dltensor"}, {"shape": (2**62,)}, {"shape": (-1,)},
    {"ndim": -3}, {"shape": None, "ndim": 2}, {"shape": (1,) * 9}, {"data": None}, {"device": (2, 0)}, {"flags": 1},
    {"dtype": (0, 64, 3)}, {"dtype": (200, 7, 1)}, {"byte_offset": 3}, {"shape": (0,), "data": None},
    {"shape": (1, 4), "strides": (999, 1)}, {"shape": (2,), "strides": (2**61,)}, {"versioned": False},
    {"style": "bare"}, {"style": "stream"}, {"deleter": False},
]  # fmt: skip


class Rude:
    """Its protocol methods raise."""

    def __index__(self):
        raise RuntimeError("no")

    __float__ = __index__

    def __dlpack__(self, **keywords):
        raise BufferError("no")


def tensor(random_):
    shape = [random_.choice([0, 1, 2, 3, 5]) for _ in range(random_.choice([0, 1, 1, 1, 2, 3, 7]))]
    x = torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(random_.getrandbits(32)))
    x = with_layout(x.to(random_.choice(TORCH_DTYPES)), random_.choice(LAYOUTS))
    return x.to("meta") if random_.random() < 0.02 else x


def array(random_):
    dtype = random_.choice(["i4", "i8", "f4", "f8", "f2", ">i8", ">f4", "u8", "?", "c8", "O", "U3", "M8[s]", "i8,f4"])
    x = np.zeros([random_.choice([0, 1, 2, 4]) for _ in range(random_.choice([0, 1, 1, 2, 8]))], dtype)
    x.flags.writeable = random_.random() < 0.7
    return x[::-1] if x.ndim and random_.random() < 0.2 else x


def value(random_, depth=0):
    """Something that a caller could pass, by mistake or malice."""
    makers = [
        lambda: random_.choice(INTEGERS),
        lambda: random_.choice(FLOATS),
        lambda: random_.choice([None, True, False, "", "scalar", "a\0b", "\ud800", b"x", object, Rude(), ..., {}]),
        lambda: tensor(random_),
        lambda: tensor(random_),
        lambda: array(random_),
        lambda: Producer([1, 2, 3, 4], **random_.choice(HOSTILE)),
        lambda: Producer(
            [1, 2, 3, 4], numpy_dtype=np.float32, **random_.choice([h for h in HOSTILE if "data" not in h])
        ),
    ]
    if depth < 2:
        makers += [
            lambda: random_.choice([list, tuple])(value(random_, depth + 1) for _ in range(random_.randrange(4)))
        ] * 2
    return random_.choice(makers)()


def mutated(random_, call):
    """The arguments of a call that works, some replaced, dropped, doubled or renamed."""
    args, kwargs = call.make()
    args, kwargs = list(args), dict(kwargs)
    for _ in range(random_.randrange(4)):
        kind = random_.random()
        if kind < 0.6 and kwargs:
            kwargs[random_.choice(list(kwargs))] = value(random_)
        elif kind < 0.8 and args:
            args[random_.randrange(len(args))] = value(random_)
        elif kind < 0.9 and kwargs:
            del kwargs[random_.choice(list(kwargs))]
        elif kind < 0.95:
            args.append(value(random_))
        else:
            kwargs[random_.choice(["x", "alpha", "params", "é"])] = value(random_)
    return args, kwargs


def run(seed, rounds=None, seconds=None):
    """Calls made and exceptions seen; anything but our exceptions is raised with the call that caused it."""
    random_ = random.Random(seed)
    working = [call for call in CALLS if call.raises is None]
    info = _amcore.build_info()
    seen, made, until = set(), 0, time.monotonic() + (seconds or 1e9)
    try:
        while made < (rounds or 1 << 62) and time.monotonic() < until:
            call = random_.choice(working)
            args, kwargs = mutated(random_, call)
            made += 1
            try:
                getattr(_amcore, call.method)(*args, **kwargs)
            except OURS as error:
                seen.add(type(error).__name__)
            except Exception as error:
                raise AssertionError(f"{call.method}(*{args!r}, **{kwargs!r}) gave {error!r}, seed {seed}") from error
    finally:
        _amcore.set_isa(info["isa"])
        _amcore.set_num_threads(info["num_threads"])
    return made, seen


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    options = parser.parse_args()
    print("seed", options.seed, flush=True)
    print("{} calls, exceptions seen: {}".format(*run(options.seed, seconds=options.seconds)))
