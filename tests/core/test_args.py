"""Arguments by table: how they are given, what is said when they are wrong, what hostile objects can do."""

import gc
import sys

import numpy as np
import pytest
import torch

from automodel_c import _amcore

OPTIONS = {"alpha": 0, "bisect": False}
partition = _amcore.frame_partition


class Index:
    def __init__(self, value):
        self.value = value

    def __index__(self):
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


@pytest.mark.parametrize(
    ("arguments", "keywords"),
    [
        (([1, 2], 2), OPTIONS),
        (([1, 2],), {"world": 2, **OPTIONS}),
        ((), {"bisect": False, "alpha": 0, "world": 2, "patches": [1, 2]}),
        (((1, 2), Index(2)), {"alpha": np.int64(0), "bisect": False}),
        (([Index(1), np.int32(2)], torch.tensor(2)), OPTIONS),
    ],
)
def test_ways_to_give(arguments, keywords):
    assert partition(*arguments, **keywords).tolist() == [0, 1, 2]


def test_keyword_that_is_equal_but_not_interned():
    assert partition([1], **{"".join(["wor", "ld"]): 1}, **OPTIONS).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("arguments", "keywords", "error", "words"),
    [
        (([1], 1, 0), {}, TypeError, "frame_partition() takes at most 2 positional arguments but 3 were given"),
        ((), OPTIONS, TypeError, "frame_partition() missing required argument 'patches'"),
        (([1],), OPTIONS, TypeError, "frame_partition() missing required argument 'world'"),
        (([1], 1), {"alpha": 0}, TypeError, "frame_partition() missing required argument 'bisect'"),
        (([1], 1), {**OPTIONS, "x": 1}, TypeError, "frame_partition() got an unexpected keyword argument 'x'"),
        (([1], 1), {**OPTIONS, "\0é": 1}, TypeError, "frame_partition() got an unexpected keyword argument '\0é'"),
        (([1], 1), {**OPTIONS, "world": 1}, TypeError, "frame_partition() got multiple values for 'world'"),
        (([1], None), OPTIONS, TypeError, "frame_partition: argument 'world' must be an int, not NoneType"),
        (([1], 1.5), OPTIONS, TypeError, "frame_partition: argument 'world' must be an int, not float"),
        (([1], True), OPTIONS, TypeError, "frame_partition: argument 'world' must be an int, not bool"),
        (([1], "1"), OPTIONS, TypeError, "frame_partition: argument 'world' must be an int, not str"),
        (([1], Index("1")), OPTIONS, TypeError, "__index__ returned non-int (type str)"),
        (([1], Index(OSError("own words"))), OPTIONS, OSError, "own words"),
        (([1], 2**63), OPTIONS, ValueError, "frame_partition: argument 'world' does not fit in 64 bits"),
        (([1], -(2**63) - 1), OPTIONS, ValueError, "frame_partition: argument 'world' does not fit in 64 bits"),
        (([1], 1), {"alpha": 0, "bisect": 1}, TypeError, "frame_partition: argument 'bisect' must be a bool, not int"),
        (([1], 1), {"alpha": 0, "bisect": None}, TypeError, "argument 'bisect' must be a bool, not NoneType"),
        (([1, None], 1), OPTIONS, TypeError, "argument 'patches' holds something other than integers at 1"),
        (([1, Index(OSError("own words"))], 1), OPTIONS, OSError, "own words"),
        (([Index(2**64)], 1), OPTIONS, ValueError, "argument 'patches' does not fit in 64 bits at 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_refusals(arguments, keywords, error, words):
    with pytest.raises(error) as caught:
        partition(*arguments, **keywords)
    assert type(caught.value) is error and words in str(caught.value)


def test_extremes_of_64_bits():
    assert partition([0], 2**63 - 1, **OPTIONS) is None
    with pytest.raises(ValueError, match="world is -9223372036854775808"):
        partition([0], -(2**63), **OPTIONS)
    edge = [2**63 - 1, -(2**63), -1]
    assert _amcore.index_array(edge).tolist() == edge


@pytest.mark.parametrize("length", [2**61, 2**62, -1, 0, 1])
@pytest.mark.parametrize("base", [list, tuple])
def test_sequence_that_lies_about_its_length(base, length):
    """A list whose __len__ said 2^61 got a buffer of one byte, and every item was written behind it."""
    liar = type("Liar", (base,), {"__len__": lambda self: length, "__getitem__": lambda self, i: 7})
    assert _amcore.index_array(liar([1, 2, 3])).tolist() == [1, 2, 3]


def test_list_that_shrinks_while_it_is_read():
    victim = [1, 2, 3]

    class Shrinks:
        def __index__(self):
            victim.clear()
            gc.collect()
            return 5

    victim[1] = Shrinks()
    with pytest.raises(IndexError):
        _amcore.index_array(victim)


def test_no_reference_to_arguments_is_kept():
    values, world, wrong = [Index(1), Index(2)], Index(2), [Index(1), 1.5]
    objects = [values, world, wrong, *values, wrong[0]]
    before = [sys.getrefcount(obj) for obj in objects]
    for _ in range(50):
        partition(values, world, **OPTIONS)
        for bad in (lambda: partition(wrong, world, **OPTIONS), lambda: partition(values, world, alpha=0, beta=world)):
            try:
                bad()
            except TypeError:
                pass
    gc.collect()
    assert [sys.getrefcount(obj) for obj in objects] == before


def test_results_are_fresh_arrays():
    array = np.arange(5)
    copy = _amcore.index_array(array)
    assert copy.flags.owndata and copy.flags.writeable and not np.shares_memory(array, copy)
    assert sys.getrefcount(copy) == 2


def test_every_method_has_a_docstring_and_a_signature():
    for name in (n for n in dir(_amcore) if not n.startswith("_")):
        method = getattr(_amcore, name)
        assert method.__doc__ and method.__text_signature__, name
