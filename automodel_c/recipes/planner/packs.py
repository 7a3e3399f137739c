"""Packs that a plan is made for."""

import random

FRAME = 1024  # patches of a frame of media in a plan: 512 x 512 pixels


def heavy_tailed(total, seed=0):
    """Lengths: many short documents, a few that make most of the tokens; those of the benchmarks."""
    rng, lengths = random.Random(seed), []
    while total > 0:
        lengths.append(min(total, max(64, int(rng.lognormvariate(6.2, 1.3)))))
        total -= lengths[-1]
    return tuple(lengths)


def packs(tokens):
    """{name: lengths}: what `automodel-c plan` plans for where it is told nothing else."""
    return {"mixed": heavy_tailed(tokens), "one document": (tokens,)}


def frames(tokens, share):
    """Patches of each frame, where so large a share of a pack's tokens are media's: four patches a token."""
    return (FRAME,) * int(4 * share * tokens / FRAME)
