"""The vision tower's part of a forward: each frame on one rank, each token where its row is embedded."""

import dataclasses

import torch

from automodel_c.parallel import alarms
from automodel_c.parallel.exchange import exchange
from automodel_c.parallel.frame_plan import plan_frames, replicates
from automodel_c.parallel.frame_shard import refuse_trainable, run_frames


def see(visual, media, share, sharding, device):
    """(tokens [n, H], int64 [n] their places among the embedded rows of `share`): those that this rank splices in.

    visual: the tower. media: `Media` of the whole pack. sharding: `FrameSharding`. device: of the places.

    Where sharding is enabled and the batch is not below its thresholds, every rank runs its own frames, a rank without
    one a frame of zeros, and one exchange brings the tokens to the ranks that embed their rows, and to no other. Else
    every rank runs every frame. Without media the tower's one black frame is run on every rank, and its tokens go
    nowhere.
    """
    plan = share.plan
    tokens, places = (torch.from_numpy(x).to(device) for x in share.spliced(media.places))
    if plan is None:
        return _run(visual, media, len(media.places))[: len(places)], places
    with alarms.everywhere(plan.group):
        grid = [tuple(entry) for entry in media.grids.tolist()]
        if sharding.enabled:
            refuse_trainable(visual, sharding)
        if not len(media.places) or not sharding.enabled or replicates(grid, media.merge, sharding):
            return _run(visual, media, len(media.places)).index_select(0, tokens), places
        frames = plan_frames(
            grid, plan.ranks, plan.rank, merge=media.merge, alpha=sharding.alpha(visual),
            min_local_patch_rows=sharding.min_local_patch_rows,
        )  # fmt: skip
        made = _run_own(visual, media, frames, frames.tokens[plan.rank])
    moves = share.token_moves(media.places, frames.tokens)
    route = plan.route(moves, len(made), len(places), "vision tokens")
    # entered even where no token travels: a rank whose tower failed is found out here
    return exchange(made, dataclasses.replace(route, used=True), plan.group), places


def _run(visual, media, tokens):
    seen = visual(media.pixel_values, grid_thw=media.grids)
    return _counted(seen, tokens, max(tokens, 1))


def _run_own(visual, media, frames, tokens):
    zeros = 0 if frames.padding is None else frames.padding[0] * frames.padding[1] * frames.padding[2]
    seen = run_frames(visual, media.pixel_values, torch.from_numpy(media.grids), frames, "cpu")
    return _counted(seen, tokens, tokens + zeros // media.merge**2)


def _counted(seen, tokens, expected):
    if len(seen) != expected:
        raise ValueError(f"model: the vision tower returned {len(seen)} tokens, its frames make {expected}")
    return seen[:tokens]
