from tests.ranks import rank_pools, ranks  # noqa: F401
