from ranks import rank_pools, ranks  # noqa: F401
