"""Lists of tensors, tensors that are written, numbers and devices, through adam_step and its neighbours."""

import gc
import sys

import numpy as np
import pytest
import torch

from automodel_c import _amcore
from tests.core.producers import Producer

NUMBERS = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.0}
NAMES = ("params", "exp_avgs", "exp_avg_sqs", "steps", "grads")


def arguments(sizes=(2, 0, 3), **changes):
    state = {name: [torch.zeros(1 if name == "steps" else n) for n in sizes] for name in NAMES}
    return {**state, **NUMBERS, **changes}


def step(**changes):
    values = arguments(**changes)
    _amcore.adam_step(**values)
    return values


def test_lists_and_tuples():
    for kind in (list, tuple):
        values = step(grads=kind([torch.ones(2), torch.zeros(0), torch.ones(3)]))
        assert [p.tolist() for p in values["params"]] == [[pytest.approx(-0.1)] * 2, [], [pytest.approx(-0.1)] * 3]
        assert [s.item() for s in values["steps"]] == [1, 1, 1]


def test_numpy_and_capsules_are_written():
    array = np.zeros(2, np.float32)
    producer = Producer([0, 0], numpy_dtype=np.float32)
    step(sizes=(2, 2), params=[array, producer], grads=[torch.ones(2), np.ones(2, np.float32)])
    assert array == pytest.approx(-0.1) and producer.array == pytest.approx(-0.1) and producer.deleted == 1


def test_parameters_that_require_gradients_are_written():
    parameter = torch.nn.Parameter(torch.zeros(2))
    step(sizes=(2,), params=[parameter], grads=[torch.ones(2)])
    assert parameter.tolist() == pytest.approx([-0.1, -0.1]) and parameter.requires_grad


def frozen_array():
    array = np.zeros(2, np.float32)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"params": torch.zeros(2)}, TypeError, "'params' must be a list or tuple of tensors, not Tensor"),
        ({"grads": None}, TypeError, "'grads' must be a list or tuple of tensors, not NoneType"),
        ({"grads": (x for x in ())}, TypeError, "'grads' must be a list or tuple of tensors, not generator"),
        ({"grads": [torch.zeros(2), 3]}, TypeError, r"'grads\[1\]' must be a tensor"),
        ({"params": [frozen_array()]}, ValueError, r"'params\[0\]' is read-only and cannot be written"),
        (
            {"params": [Producer([1], numpy_dtype=np.float32, flags=1)]},
            ValueError,
            r"'params\[0\]' is read-only and cannot be written",
        ),
        ({"grads": [torch.zeros(2, device="meta")]}, ValueError, r"'grads\[0\]' has no memory"),
        (
            {"grads": [Producer([1], numpy_dtype=np.float32, device=(2, 0))]},
            ValueError,
            "'.*' is on c.*:0, the tensors",
        ),
        ({"lr": "0.1"}, TypeError, "'lr' must be a real number, not str"),
        ({"lr": True}, TypeError, "'lr' must be a real number, not bool"),
        ({"lr": [0.1, None]}, TypeError, "'lr' must be a real number, not NoneType"),
        ({"lr": 10**400}, ValueError, "'lr' does not fit in a double"),
        ({"lr": float("nan")}, ValueError, "lr"),
        ({"found_inf": 3}, TypeError, "'found_inf' must be a tensor"),
        ({"group_sizes": [1.5]}, TypeError, "'group_sizes' holds something other than integers at 0"),
    ],
    ids=lambda value: None,
)
def test_refusals_write_nothing(changes, error, words):
    values = arguments(grads=[torch.ones(2), torch.ones(0), torch.ones(3)])
    before = [t.clone() for name in NAMES for t in values[name]]
    with pytest.raises(error, match=words):
        _amcore.adam_step(**{**values, **changes})
    assert all(torch.equal(x, y) for x, y in zip(before, [t for name in NAMES for t in values[name]], strict=True))


def test_read_only_arrays_are_read():
    values = step(sizes=(2,), grads=[frozen_array()])
    assert values["params"][0].tolist() == [0, 0]
    step(sizes=(1,), grads=[Producer([1], numpy_dtype=np.float32, flags=1)])


def test_capsules_taken_before_an_error_are_given_back():
    producers = [Producer([1, 2], numpy_dtype=np.float32) for _ in range(3)]
    with pytest.raises(TypeError, match=r"'grads\[3\]' must be a tensor"):
        step(sizes=(2,) * 4, grads=[*producers, "no"])
    assert [p.deleted for p in producers] == [1, 1, 1]


def test_list_that_shrinks_while_it_is_read():
    victims = [torch.zeros(2) for _ in range(3)]

    class Shrinks(Producer):
        def __dlpack__(self, **keywords):
            victims.clear()
            gc.collect()
            return super().__dlpack__(**keywords)

    victims[0] = Shrinks([1, 2], numpy_dtype=np.float32)
    with pytest.raises(IndexError):
        step(sizes=(2,) * 3, grads=victims)


def test_optional_arguments_may_be_none():
    step(masters=None, group_sizes=None, lr_tensors=None, found_inf=None, grad_scale=None)


def test_no_reference_is_kept():
    values = arguments()
    everything = [t for name in NAMES for t in values[name]] + [values[name] for name in NAMES]
    before = [sys.getrefcount(x) for x in everything]
    for _ in range(30):
        _amcore.adam_step(**values)
        for bad in ({"lr": "x"}, {"grads": values["grads"][:1]}):
            try:
                _amcore.adam_step(**{**values, **bad})
            except (TypeError, ValueError):
                pass
    del bad
    gc.collect()
    assert [sys.getrefcount(x) for x in everything] == before


class Drops:
    """A producer that drops what stands before it in a list while it is read."""

    def __init__(self, tensors):
        self.tensors, self.tensor = tensors, torch.ones(1)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()

    def __dlpack__(self, **options):
        self.tensors[0] = None
        self.reused = [torch.full((1000,), float("nan")) for _ in range(100)]
        return self.tensor.__dlpack__(**options)


def test_list_that_drops_a_tensor_that_was_read():
    """Tensors that were read already are borrowed: they live until the call returns."""
    tensors = []
    tensors += [torch.ones(1000), Drops(tensors), torch.ones(3)]
    total = torch.zeros(1, dtype=torch.float64)
    _amcore.grad_sumsq(total, torch.zeros(1024, dtype=torch.float64), tensors)
    assert total == 1004 and tensors[0] is None
