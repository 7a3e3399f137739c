"""The oracles: every operator's formula, written slowly, for tests and benchmark gates."""
