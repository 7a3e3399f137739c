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
    words = ", ".join(f"{key} {value:.3e}" for key, value in numbers.items() if key != "passes")
    assert not math.isnan(numbers["naive_max"]) and not math.isinf(numbers["naive_max"]), (
        f"{name}: the naive twin or the reference is not finite where the other is ({words})"
    )
    assert numbers["passes"], f"{name}: worse than {factor:g} times naive plus {ulp:g} ulp: {words}"
    return numbers


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
    dtype = dtype_name(ours if dtype is None else dtype)
    ours, naive, ref = to_float64(ours), to_float64(naive), to_float64(ref64)
    largest = float(np.abs(ref[np.isfinite(ref)]).max(initial=0.0))
    floor = ulp * ulp_of(largest, dtype)
    scale = float(np.linalg.norm(ref[np.isfinite(ref)])) or 1.0
    relative_floor = floor / largest if largest else floor
    ours_max, ours_fro = _errors(ours, ref, scale)
    naive_max, naive_fro = _errors(naive, ref, scale)
    limit_max, limit_fro = factor * naive_max + floor, factor * naive_fro + relative_floor
    return {
        "passes": bool(ours_max <= limit_max and ours_fro <= limit_fro),  # a NaN compares false
        "ours_max": ours_max,
        "limit_max": limit_max,
        "naive_max": naive_max,
        "ours_fro": ours_fro,
        "limit_fro": limit_fro,
        "naive_fro": naive_fro,
        "largest": largest,
        "floor": floor,
    }


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


def _errors(x, ref, scale):
    """Largest element and relative Frobenius norm of x - ref; equal infinities differ by 0, any NaN gives NaN."""
    if x.size == 0:
        return 0.0, 0.0
    with np.errstate(invalid="ignore", over="ignore"):
        difference = np.where(np.isinf(x) & (x == ref), 0.0, x - ref)
        return float(np.abs(difference).max()), float(np.linalg.norm(difference)) / scale
