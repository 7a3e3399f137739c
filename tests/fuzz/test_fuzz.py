"""A short run of the argument fuzzer in the plain suite."""

from tests.fuzz import fuzz_args


def test_random_arguments(seed):
    made, exceptions = fuzz_args.run(seed, rounds=3000)
    assert made == 3000 and {"ValueError", "TypeError"} <= exceptions
