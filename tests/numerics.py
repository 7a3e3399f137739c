"""The error rule: no hand-picked tolerances.

Truth is float64. A result passes when its error is at most `factor` times that of the plain formula in the operator's
dtype, plus a floor of `ulp` units in the last place of the largest reference value. The error is taken twice: as
relative Frobenius norm and as the largest element. Torch tensors (any dtype, any device) and NumPy arrays.
"""

import math

import numpy as np
import torch

_MANTISSA = {"float64": (52, -1022), "float32": (23, -126), "float16": (10, -14), "bfloat16": (7, -126)}


def assert_as_good_as(ours, naive, ref64, *, name, factor=2.0, ulp=2, dtype=None):
    """AssertionError with all numbers unless `ours` is as near to `ref64` as the error rule asks.

    `naive` is the plain formula in the operator's dtype. `dtype` names the operator's dtype where the result has
    another one (a float32 gradient of a bfloat16 operator); left out, it is that of `ours`. Returns the numbers.
    """
    _same_kind(ours, naive, ref64, name)
    numbers = measure(ours, naive, ref64, factor=factor, ulp=ulp, dtype=dtype)
    return assert_numbers(numbers, name=name, factor=factor, ulp=ulp)


def draws_for(elements, enough=64):
    """How many independent draws of so many elements make a fair comparison: of one number the naive twin may be lucky.

    Small cases are run that many times, and `pool` puts their results side by side before the rule is asked.
    """
    return max(1, enough // max(1, elements))


def pool(draws):
    """[draw][part] tensors -> [part] flat tensors, each the draws one after another."""
    return [torch.cat([part.reshape(-1) for part in parts]) for parts in zip(*draws, strict=True)]


def measure(ours, naive, ref64, *, factor=2.0, ulp=2, dtype=None):
    """Errors, limits and verdict of the rule as a dict; asserts nothing."""
    parts = Parts()
    parts.add(ours, naive, ref64)
    return parts.measure(dtype_name(ours if dtype is None else dtype), factor=factor, ulp=ulp)


class Parts:
    """The rule for results that are too large for float64 all at once: `add` one part after another, then `measure`."""

    def __init__(self):
        self.largest, self.norm = 0.0, 0.0
        self.errors = {"ours": (0.0, 0.0), "naive": (0.0, 0.0)}  # largest element, norm

    def add(self, ours, naive, ref64):
        """A part of each."""
        ref = to_float64(ref64)
        finite = ref[np.isfinite(ref)]
        self.largest = max(self.largest, float(np.abs(finite).max(initial=0.0)))
        self.norm = math.hypot(self.norm, float(np.linalg.norm(finite)))
        for name, x in (("ours", ours), ("naive", naive)):
            largest, norm = self.errors[name]
            more, rest = _errors(to_float64(x), ref)
            self.errors[name] = float(np.maximum(largest, more)), math.hypot(norm, rest)  # NaN stays

    def measure(self, dtype, *, factor=2.0, ulp=2):
        """As the function of that name, of all parts together."""
        floor = ulp * ulp_of(self.largest, dtype)
        relative_floor = floor / self.largest if self.largest else floor
        (ours_max, ours_norm), (naive_max, naive_norm) = self.errors["ours"], self.errors["naive"]
        ours_fro, naive_fro = (norm / (self.norm or 1.0) for norm in (ours_norm, naive_norm))
        limit_max, limit_fro = factor * naive_max + floor, factor * naive_fro + relative_floor
        return {
            "passes": bool(ours_max <= limit_max and ours_fro <= limit_fro),  # a NaN compares false
            "ours_max": ours_max,
            "limit_max": limit_max,
            "naive_max": naive_max,
            "ours_fro": ours_fro,
            "limit_fro": limit_fro,
            "naive_fro": naive_fro,
            "largest": self.largest,
            "floor": floor,
        }


def assert_numbers(numbers, *, name, factor=2.0, ulp=2):
    """AssertionError with all of them unless a `measure` passes."""
    words = ", ".join(f"{key} {value:.3e}" for key, value in numbers.items() if key != "passes")
    assert not math.isnan(numbers["naive_max"]) and not math.isinf(numbers["naive_max"]), (
        f"{name}: the naive twin or the reference is not finite where the other is ({words})"
    )
    assert numbers["passes"], f"{name}: worse than {factor:g} times naive plus {ulp:g} ulp: {words}"
    return numbers


def ulp_of(value, dtype):
    """Distance from `value` to the next larger number of `dtype`."""
    mantissa, smallest_exponent = _MANTISSA[dtype_name(dtype)]
    exponent = math.frexp(value)[1] - 1 if value else smallest_exponent
    return math.ldexp(1.0, max(exponent, smallest_exponent) - mantissa)


def dtype_name(thing):
    """'bfloat16' for torch.bfloat16, np.dtype, a tensor of that dtype, or the name itself."""
    return str(getattr(thing, "dtype", thing)).removeprefix("torch.")


def to_float64(x):
    """A NumPy float64 copy of a tensor or array."""
    if hasattr(x, "detach"):
        return x.detach().cpu().double().numpy().copy()
    return np.array(x, dtype=np.float64)


def _same_kind(ours, naive, ref64, name):
    shapes = [tuple(x.shape) for x in (ours, naive, ref64)]
    assert shapes[0] == shapes[1] == shapes[2], f"{name}: shapes of ours, naive, ref64 are {shapes}"
    assert dtype_name(ref64) == "float64", f"{name}: the reference is {dtype_name(ref64)}, not float64"
    assert dtype_name(ours) == dtype_name(naive), (
        f"{name}: ours is {dtype_name(ours)}, the naive twin {dtype_name(naive)}"
    )
    assert dtype_name(ours) in _MANTISSA, f"{name}: {dtype_name(ours)} is not a floating dtype"


def _errors(x, ref):
    """Largest element and norm of x - ref; equal infinities differ by 0, any NaN gives NaN."""
    if x.size == 0:
        return 0.0, 0.0
    with np.errstate(invalid="ignore", over="ignore"):
        difference = np.where(np.isinf(x) & (x == ref), 0.0, x - ref)
        return float(np.abs(difference).max()), float(np.linalg.norm(difference))
