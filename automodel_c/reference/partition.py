"""Oracle of `partition`: exact integers, every possibility tried, no cleverness."""

import itertools


def frame_cost(patches, alpha):
    """Attention inside a frame, and layers that see each patch alone."""
    return patches * (patches + alpha)


def part_costs(patches, cuts, alpha):
    """Cost of each part that the cuts make."""
    costs = [frame_cost(p, alpha) for p in patches]
    return [sum(costs[start:end]) for start, end in itertools.pairwise(cuts)]


def least_largest_cost(patches, world, alpha=0):
    """The least possible largest cost over all ways to cut, none empty; None when there are too few frames."""
    n = len(patches)
    if n < world:
        return None
    inner = itertools.combinations(range(1, n), world - 1)
    return min(max(part_costs(patches, (0, *cuts, n), alpha)) for cuts in inner)


def bisect_cuts(patches, world, alpha=0):
    """Cut r is how many frames fit into total * r / world, moved so that each part has one; None for too few frames."""
    n = len(patches)
    if n < world:
        return None
    running = list(itertools.accumulate(frame_cost(p, alpha) for p in patches))
    cuts = [0]
    for r in range(1, world):
        within = sum(cost * world <= running[-1] * r for cost in running)
        cuts.append(min(max(within, cuts[-1] + 1), n - (world - r)))
    return [*cuts, n]


def docs_from_ids(ids):
    """(start, end) of every maximal run of one nonzero id."""
    docs, at = [], 0
    for number, run in itertools.groupby(ids):
        length = len(list(run))
        if number != 0:
            docs.append((at, at + length))
        at += length
    return docs
