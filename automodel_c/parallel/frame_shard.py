"""A vision tower whose frames are spread over the ranks of a group."""

import collections
import copy
import hashlib
import zlib

import numpy as np
import torch
import torch.distributed as dist

from automodel_c.parallel import alarms
from automodel_c.parallel.exchange import Route, exchange
from automodel_c.parallel.frame_plan import FrameSharding, plan_frames, replicates

_NOTE, _DIGEST = 256, 8  # bytes of a note that ranks exchange, and of each digest at its front


def shard_vision(visual, pixel_values, grid_thw, group, config):
    """Runs `visual` on this rank's frames and returns what it returns for all of them.

    Args:
        visual: called as ``visual(pixel_values, grid_thw=grid_thw)``; returns tokens [tokens, width], (tokens, list of
            such), or an object with `pooler_output` and perhaps a list `deepstack_features`. Its `spatial_merge_size`
            (its configuration's, else 2) is the side of a token in patches.
        pixel_values: [patches, width], frames one after another, the same on all ranks; or None.
        grid_thw: int [n, 3], (t, h, w) in patches of every image or clip; or None.
        group: ranks that share the work, None for nobody.
        config: a `FrameSharding`, or a mapping with its keys.

    Returns:
        The same kind of result as `visual`'s, for all frames in order; an object's other tensors are None.

    Every rank differentiates its own part of a loss: the gradients of the tower's parameters are parts that sum over
    the group to those of one rank. A rank without a frame runs a frame of zeros, so that its gradients exist, and are
    0. Where the group is None or of one rank, config says disabled, all ranks lack media, or the batch is below both
    thresholds, `visual` runs whole on every rank.

    Raises:
        ValueError: on every rank, naming the rank, when the ranks' media or configurations differ, rows of pixels and
            grid disagree on one of them, or the results of their towers differ in more than the number of tokens that
            their frames make; a bad configuration; a trainable tower whose ranks are not those of context parallelism
            alone.
        TypeError: `enabled` that is no bool, or a result of another kind.
        RankFailure: another rank's tower or configuration raised.

    Ranks say what they hold in a message of 256 bytes before the tower runs, since a rank that has no media would leave
    the others waiting, and what their towers returned in another before the tokens travel.
    """
    world = 1 if group is None else dist.get_world_size(group)
    with alarms.everywhere(group if world > 1 else None):
        config = config if isinstance(config, FrameSharding) else FrameSharding.from_mapping(config)
        if world > 1:
            alarms.pass_by(group, f"shard_vision, {'enabled' if config.enabled else 'not enabled'}")
        if not config.enabled or world == 1:
            return visual(pixel_values, grid_thw=grid_thw)
        refuse_trainable(visual, config)
        merge = _merge_size(visual)
        numbers = {
            "merge": merge,
            "min_tokens": config.min_tokens,
            "min_frames": config.min_frames,
            "min_local_patch_rows": config.min_local_patch_rows,
            "alpha": config.alpha(visual),
        }
        grid = _agree(pixel_values, grid_thw, numbers, group)
        if not grid or replicates(grid, merge, config):
            return visual(pixel_values, grid_thw=grid_thw)
        plan = plan_frames(
            grid,
            world,
            dist.get_rank(group),
            merge=merge,
            alpha=numbers["alpha"],
            min_local_patch_rows=config.min_local_patch_rows,
        )
        result = run_frames(visual, pixel_values, grid_thw, plan)
        return _with_tokens(result, _gather(result, plan, merge, group))


def run_frames(visual, pixel_values, grid_thw, plan, grid_device=None):
    """What `visual` returns for a FramePlan's own frames, zero frames behind them. Their grid is made on grid_device,
    where `visual` is if None."""
    pixels, grid = pixel_values[slice(*plan.rows)], list(plan.grid)
    if plan.padding:
        t, h, w = plan.padding
        pixels = torch.cat([pixels, pixels.new_zeros(t * h * w, pixels.shape[1])])
        if grid and grid[-1][1:] == (h, w):  # one clip of equal frames costs less than two
            grid[-1] = (grid[-1][0] + t, h, w)
        else:
            grid.append(plan.padding)
    made = torch.tensor(grid, dtype=grid_thw.dtype, device=grid_device or _device(visual, pixel_values))
    return visual(pixels, grid_thw=made)


def _device(visual, pixel_values):
    parameters = visual.parameters() if isinstance(visual, torch.nn.Module) else iter(())
    return next((p.device for p in parameters), pixel_values.device)


def refuse_trainable(visual, config):
    """ValueError where a tower that trains would be shared with other ranks than those of context parallelism."""
    trains = isinstance(visual, torch.nn.Module) and any(p.requires_grad for p in visual.parameters())
    if trains and list(config.mesh_dims) != ["cp"]:
        raise ValueError(
            f"frame_sharding.mesh_dims is {list(config.mesh_dims)} and the vision tower trains: tensor-parallel ranks "
            "would count its gradients twice. Freeze the tower or give [cp]"
        )


def _merge_size(visual):
    found = getattr(visual, "spatial_merge_size", None)
    return found or getattr(getattr(visual, "config", None), "spatial_merge_size", None) or 2


def _agree(pixel_values, grid_thw, numbers, group):
    """The grid as a list of tuples, [] without media; ValueError on every rank when one of them is off."""
    grid, rows, trouble = [], 0, ""
    if pixel_values is not None and grid_thw is not None:
        grid, rows = [tuple(entry) for entry in grid_thw.tolist()], len(pixel_values)
        trouble = _trouble(grid, rows, numbers["merge"])
    media = f"{rows} rows of pixel_values in {len(grid)} images and clips [{zlib.crc32(repr(grid).encode()):08x}]"
    _compare({"media": media, "configurations": repr(numbers)}, trouble, group)
    return grid


def _compare(held, trouble, group):
    """ValueError on every rank where one is in trouble (words), or where they hold different things ({name: words})."""
    digests = [hashlib.blake2b(words.encode(), digest_size=_DIGEST).digest() for words in held.values()]
    notes = _exchange((b"".join(digests) + trouble.encode())[:_NOTE], group)
    for rank, note in enumerate(notes):
        if text := note[_DIGEST * len(held) :].rstrip(b"\0"):
            raise ValueError(f"shard_vision: rank {rank}: {text.decode(errors='replace')}")
    for i, (name, words) in enumerate(held.items()):
        digests = [note[_DIGEST * i : _DIGEST * (i + 1)] for note in notes]
        most, count = collections.Counter(digests).most_common(1)[0]
        if count < len(digests):
            odd = next(rank for rank, digest in enumerate(digests) if digest != most)
            pair = sorted((odd, digests.index(most)))
            raise ValueError(
                f"shard_vision: ranks {pair[0]} and {pair[1]} of the group hold different {name}, most ranks what rank "
                f"{digests.index(most)} does; this one has {words}"
            )


def _trouble(grid, rows, merge):
    if bad := next((e for e in grid if min(e) < 1 or e[1] % merge or e[2] % merge), None):
        return f"grid_thw has {bad}: sides must be positive multiples of {merge}"
    needed = sum(t * h * w for t, h, w in grid)
    return "" if needed == rows else f"pixel_values has {rows} rows, grid_thw asks for {needed}"


def _exchange(note, group):
    """Every rank's note, as bytes of equal length. They go from host to host."""
    mine = torch.frombuffer(bytearray(note.ljust(_NOTE, b"\0")), dtype=torch.uint8)
    notes = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    entered = alarms.enter(group, "the notes of shard_vision")
    alarms.wait(alarms.start(lambda: [alarms.host_group(group).allgather([notes], [mine])]), entered)
    return [bytes(n.tolist()) for n in notes]


def _tokens_of(result):
    """The token tensors of a tower's result, all [tokens, ..]."""
    if isinstance(result, torch.Tensor):
        return [result]
    if hasattr(result, "pooler_output"):
        return [result.pooler_output, *(getattr(result, "deepstack_features", None) or [])]
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], torch.Tensor):
        return [result[0], *result[1]]
    raise TypeError(
        f"shard_vision: the tower returned {type(result).__name__}; a tensor, (tensor, list) or an object with "
        "pooler_output is needed"
    )


def _with_tokens(result, tokens):
    """`result` with its token tensors replaced."""
    if isinstance(result, torch.Tensor):
        return tokens[0]
    if not hasattr(result, "pooler_output"):
        return tokens[0], type(result[1])(tokens[1:])
    made = copy.copy(result)
    for name, value in vars(result).items():
        if isinstance(value, torch.Tensor):
            setattr(made, name, None)
    made.pooler_output = tokens[0]
    if getattr(result, "deepstack_features", None) is not None:
        made.deepstack_features = type(result.deepstack_features)(tokens[1:])
    return made


def _gather(result, plan, merge, group):
    """All ranks' tokens of each tensor of a tower's result; one message."""
    tensors, rank = _tokens_of(result), dist.get_rank(group)
    zeros = 0 if plan.padding is None else plan.padding[0] * plan.padding[1] * plan.padding[2] // merge**2
    expected, own = plan.tokens[rank] + zeros, plan.tokens[rank]
    wrong = next((len(t) for t in tensors if len(t) != expected), None)
    trouble = "" if wrong is None else f"the tower returned {wrong} tokens, its frames make {expected}"
    of = [f"{list(t.shape[1:])} of {t.dtype} on {t.device.type}" for t in tensors]
    _compare({"results of their towers": f"{type(result).__name__}, each token {', '.join(of)}"}, trouble, group)
    joined = torch.cat([t[:own] for t in tensors], 1) if len(tensors) > 1 else tensors[0][:own]
    dtype = torch.float32 if joined.dtype == torch.float16 else joined.dtype  # gradients are not summed in float16
    route = _to_all(plan.tokens, rank, f"{sum(plan.tokens)} tokens of shard_vision, {joined.shape[1]} wide")
    made = exchange(joined.to(dtype), route, group).to(joined.dtype)
    return made.split([t.shape[1] for t in tensors], 1)


def _to_all(tokens, rank, words):
    """The Route of every rank's tokens to every rank, in the order of ranks. tokens: how many each has."""
    ranks, counts = len(tokens), np.array(tokens)
    src, dst = (x.flatten() for x in np.meshgrid(np.arange(ranks), np.arange(ranks)))
    moves = np.stack([src, dst, np.zeros_like(src), (np.cumsum(counts) - counts)[src], counts[src]], axis=1)
    return Route.of(moves, rank, ranks, tokens[rank], sum(tokens), words)
