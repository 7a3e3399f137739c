"""The error rule can fail, and fails for the right reasons."""

import numpy as np
import pytest
import torch

from tests.numerics import Parts, assert_as_good_as, measure, ulp_of

REF = torch.tensor([1.0, -2.0, 4.0, 0.5], dtype=torch.float64)


def off_by(amount, dtype=torch.float32):
    return (REF + amount).to(dtype)


def check(ours, naive=None, ref=REF, **options):
    return assert_as_good_as(ours, off_by(0) if naive is None else naive, ref, name="case", **options)


def test_exact_passes():
    assert check(off_by(0))["ours_max"] == 0


def test_within_twice_naive_passes_and_beyond_fails():
    check(off_by(1.9e-3), off_by(1e-3))
    with pytest.raises(AssertionError, match=r"case: worse than 2 times naive.*ours_max 2\.1.*limit_max 2\.0"):
        check(off_by(2.1e-3), off_by(1e-3))


def test_floor_is_two_ulp_of_the_largest():
    step = ulp_of(4.0, "float32")
    assert step == 2.0**-21
    worst = REF.clone()
    worst[2] += 2 * step
    check(worst.float())
    worst[2] += step
    with pytest.raises(AssertionError, match="ulp"):
        check(worst.float())


@pytest.mark.parametrize("where", ["ours", "naive", "ref"])
def test_nan_never_passes(where):
    values = {"ours": off_by(0), "naive": off_by(0), "ref": REF.clone()}
    values[where][1] = float("nan")
    with pytest.raises(AssertionError, match="case"):
        check(values["ours"], values["naive"], values["ref"])


def test_one_bad_element_among_many_fails_by_largest_element():
    ref = torch.ones(10_000, dtype=torch.float64)
    ours, naive = ref.float(), ref.float() + 1e-4
    ours[77] += 1e-3
    with pytest.raises(AssertionError, match="ours_max 1"):
        check(ours, naive, ref)


def test_many_small_errors_fail_by_norm():
    ref = torch.ones(10_000, dtype=torch.float64)
    ours, naive = ref.float() + 1e-4, ref.float()
    naive[5] += 1e-3
    with pytest.raises(AssertionError, match="ours_fro"):
        check(ours, naive, ref)


def test_infinities():
    ref = torch.tensor([1.0, -np.inf], dtype=torch.float64)
    check(ref.float(), ref.float(), ref)
    with pytest.raises(AssertionError):
        check(torch.tensor([1.0, 3.0]), ref.float(), ref)
    with pytest.raises(AssertionError, match="not finite"):
        check(ref.float(), torch.tensor([1.0, 3.0]), ref)


def test_mismatches_fail():
    with pytest.raises(AssertionError, match="shapes"):
        check(off_by(0)[:3])
    with pytest.raises(AssertionError, match="naive twin float32"):
        check(off_by(0, torch.bfloat16))
    with pytest.raises(AssertionError, match="not float64"):
        check(off_by(0), ref=REF.float())
    with pytest.raises(AssertionError, match="not a floating"):
        check(off_by(0, torch.int64), off_by(0, torch.int64))


def test_bfloat16_floor_and_operator_dtype():
    ours = off_by(0)
    ours[2] += 2 * ulp_of(4.0, "bfloat16")
    check(ours, dtype=torch.bfloat16)
    check(ours.bfloat16(), off_by(0, torch.bfloat16))
    with pytest.raises(AssertionError):
        check(ours)


def test_numpy_zero_reference_and_empty():
    zeros = np.zeros(3)
    assert_as_good_as(zeros.astype(np.float32), zeros.astype(np.float32), zeros, name="zeros")
    with pytest.raises(AssertionError):
        assert_as_good_as(np.full(3, 1e-20, np.float32), zeros.astype(np.float32), zeros, name="zeros")
    nothing = np.zeros((0, 4))
    assert_as_good_as(nothing.astype(np.float32), nothing.astype(np.float32), nothing, name="nothing")


@pytest.mark.parametrize("worse", [0.0, 1e-3, float("nan")], ids=str)
def test_parts_are_the_whole(rng, worse):
    ref = rng.standard_normal((7, 33))
    ours, naive = ref.astype(np.float32), ref.astype(np.float32)
    ours[6, 2] += worse
    parts = Parts()
    for rows in (slice(0, 3), slice(3, 3), slice(3, 6), slice(6, 7)):
        parts.add(ours[rows], naive[rows], ref[rows])
    found, whole = parts.measure("float32"), measure(ours, naive, ref)
    assert found["passes"] == whole["passes"] == (worse == 0.0)
    np.testing.assert_allclose([found[k] for k in whole], [whole[k] for k in whole], rtol=1e-12)
