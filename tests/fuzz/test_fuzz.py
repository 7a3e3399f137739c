"""Short runs of the fuzzers in the plain suite, and what they or somebody found before."""

import json

import pytest

from tests.fuzz import fuzz_args, fuzz_plan


def test_random_arguments(seed):
    made, exceptions = fuzz_args.run(seed, rounds=3000)
    assert made == 3000 and {"ValueError", "TypeError"} <= exceptions


def test_random_plans(seed):
    made, refused = fuzz_plan.run(seed, rounds=2000)
    assert made == 2000 and 0 < refused < made


@pytest.mark.parametrize("path", sorted(fuzz_plan.CORPUS.glob("*.json")), ids=lambda path: path.stem)
def test_corpus(path):
    case = json.loads(path.read_text())
    if case.get("refused"):
        with pytest.raises((ValueError, OverflowError)):
            fuzz_plan.check(case)
    else:
        fuzz_plan.check(case)
