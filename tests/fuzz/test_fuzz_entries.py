"""What the fuzzer of the extension's methods has kept, and some inputs that nobody has seen."""

import random

import pytest

from automodel_c import _amcore
from tests.core.memcheck import load_hostile
from tests.fuzz import entries


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    return load_hostile(tmp_path_factory.mktemp("hostile"))


@pytest.fixture(autouse=True)
def _settings_restored():
    info = _amcore.build_info()
    _amcore.set_num_threads(1)  # which costs little where others compute too
    yield
    _amcore.set_isa(info["isa"])
    _amcore.set_num_threads(info["num_threads"])


def run(inputs, hostile):
    """Kinds of exceptions, None where a call worked, and the methods that were called."""
    seen, methods = set(), set()
    for data in inputs:
        case = entries.Case(data, hostile)
        seen.add(type(case.run()))
        methods.add(case.method)
    return seen, methods


def test_corpus(hostile):
    inputs = entries.corpus()
    seen, methods = run(inputs, hostile)
    assert len(inputs) > 1000 and methods == set(entries.METHODS)
    assert {type(None), ValueError, TypeError, NotImplementedError, BufferError} <= seen


def test_random_inputs(hostile, seed):
    random_ = random.Random(seed)
    seen, methods = run((random_.randbytes(random_.choice([4, 12, 40, 80])) for _ in range(2000)), hostile)
    assert {type(None), ValueError, TypeError} <= seen and len(methods) > len(entries.METHODS) // 2


def test_what_is_broken_is_seen(hostile, monkeypatch):
    """A method that writes and then fails, and one that raises what is not ours."""

    def writes(out, *_, **__):
        out.fill_(7)
        raise ValueError

    data = bytes([entries.METHODS.index("gelu_forward"), 1, 0, 0])
    assert entries.Case(data, hostile).run() is None
    monkeypatch.setattr(entries, "_amcore", type("broken", (), {"gelu_forward": writes}))
    with pytest.raises(AssertionError, match="written before"):
        entries.Case(data, hostile).run()
    monkeypatch.setattr(entries, "_amcore", type("broken", (), {"gelu_forward": lambda *_, **__: {}["x"]}))
    with pytest.raises(KeyError):
        entries.Case(data, hostile).run()
