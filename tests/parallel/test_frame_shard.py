"""Vision frames spread over ranks: who runs what, and that nobody can tell from the result."""

import itertools
import types

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig, AutoModel

from automodel_c import frame_partition
from automodel_c.parallel import shard_vision
from automodel_c.parallel.frame_plan import FrameSharding, frames_of, padding_frames, plan_frames, tower_width

ON = {"enabled": True, "min_tokens": 0, "min_frames": 0, "min_local_patch_rows": 0}
GRID = [[1, 2, 2], [2, 2, 4], [1, 4, 4], [2, 2, 2], [1, 2, 4]]


class Tower(nn.Module):
    """Mixes the patches of a frame, and no others: [patches, 8] -> tokens [patches / 4, 6] and two deepstack levels."""

    spatial_merge_size = 2

    def __init__(self, kind="object", short=None):
        super().__init__()
        torch.manual_seed(3)
        self.into = nn.Linear(8, 6)
        self.out = nn.ModuleList(nn.Linear(24, 6) for _ in range(1 if kind == "tensor" else 3))
        self.kind, self.short, self.calls = kind, short, []

    def forward(self, pixel_values, grid_thw):
        if pixel_values is None:
            self.calls.append(None)
            return None
        self.calls.append((len(pixel_values), grid_thw.tolist()))
        x = self.into(pixel_values)
        frames = x.split(frames_of(grid_thw.tolist()))
        x = torch.cat([torch.tanh(f + f.mean(0)) for f in frames])
        tokens = [layer(x.view(-1, 24)) for layer in self.out]
        if self.short == (dist.get_rank() if dist.is_initialized() else 0):
            tokens = [t[1:] for t in tokens]
        if self.kind == "tensor":
            return tokens[0]
        if self.kind == "tuple":
            return tokens[0], tokens[1:]
        return types.SimpleNamespace(pooler_output=tokens[0], deepstack_features=tokens[1:], last_hidden_state=x)


def pixels(grid=GRID, width=8):
    torch.manual_seed(0)
    return torch.randn(sum(t * h * w for t, h, w in grid), width)


def levels(result):
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, tuple):
        return [result[0], *result[1]]
    return [result.pooler_output, *(getattr(result, "deepstack_features", None) or [])]


def part_of_loss(result, rank, world):
    """Every rank's loss reads its own slice of the tokens, as a shard of the text does."""
    total = 0
    for level, x in enumerate(levels(result)):
        weights = torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x) * (level + 1)
        total = total + (x * weights).tensor_split(world)[rank].sum()
    return total


def sharded(grid, kind, options):
    """What a rank sees: results, the tower's gradients, its calls."""
    tower, rank, world = Tower(kind), dist.get_rank(), dist.get_world_size()
    result = shard_vision(tower, pixels(grid), torch.tensor(grid), dist.group.WORLD, {**ON, **options})
    part_of_loss(result, rank, world).backward()
    assert not isinstance(result, types.SimpleNamespace) or result.last_hidden_state is None
    return [x.detach() for x in levels(result)], [p.grad for p in tower.parameters()], tower.calls


def alone(grid, kind):
    tower = Tower(kind)
    result = tower(pixels(grid), torch.tensor(grid))
    part_of_loss(result, 0, 1).backward()
    return [x.detach() for x in levels(result)], [p.grad for p in tower.parameters()]


CASES = {
    "D4": (2, GRID, "object", {}),
    "tensor": (2, GRID, "tensor", {}),
    "tuple": (3, GRID, "tuple", {}),
    "D6, one clip": (3, [[7, 2, 4]], "object", {}),
    "fewer frames than ranks": (3, [[1, 2, 2], [1, 4, 4]], "object", {}),
    "one frame": (2, [[1, 2, 2]], "object", {}),
    "two images on four ranks": (4, [[1, 2, 2], [1, 4, 4]], "tuple", {}),
    "D12, floor 24": (4, [[8, 2, 2]], "tensor", {"min_local_patch_rows": 24}),
    "floor, mixed": (2, GRID, "tuple", {"min_local_patch_rows": 100}),
    "alpha": (2, GRID, "tensor", {"cost_alpha": 50}),
}


@pytest.mark.parametrize("name", CASES)
def test_shard_vision_equals_one_rank(rank_pools, name):
    check(rank_pools, *CASES[name])


def test_eight_ranks(rank_pools):
    """A clip and images for all of them, and two images for which six have nothing."""
    check(rank_pools, 8, [[7, 2, 4], *GRID], "tuple", {})
    check(rank_pools, 8, [[1, 2, 2], [1, 4, 4]], "object", {})
    rank_pools(8).close()


def check(rank_pools, world, grid, kind, options):
    want, want_grads = alone(grid, kind)
    outcomes = rank_pools(world).run(sharded, grid, kind, options)
    for got, _, calls in outcomes:
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)
        assert all(torch.equal(x, y) for x, y in zip(got, outcomes[0][0], strict=True))
        assert len(calls) == 1 and calls[0][0] >= options.get("min_local_patch_rows", 0)
    for index, true in enumerate(want_grads):
        total = sum(grads[index] for _, grads, _ in outcomes)
        torch.testing.assert_close(total, true, rtol=1e-6, atol=1e-6 * float(true.abs().max() + 1))


def test_idle_ranks_have_zero_gradients(rank_pools):
    outcomes = rank_pools(3).run(sharded, [[1, 4, 4]], "object", {})
    assert all(float(g.abs().max()) > 0 for g in outcomes[0][1])
    for _, grads, calls in outcomes[1:]:
        assert calls == [(4, [[1, 2, 2]])]
        assert all(g is not None and not g.any() for g in grads)


def _whole(case):
    tower = Tower("tensor")
    media = (pixels(), torch.tensor(GRID))
    group, config = dist.group.WORLD, dict(ON)
    if case == "disabled":
        config["enabled"] = False
    elif case == "no group":
        group = None
    elif case == "no media":
        media = (None, None)
    elif case == "no pixels":
        media = (None, torch.tensor(GRID))
    elif case == "small":
        config |= {"min_tokens": 10_000, "min_frames": 1_000}
    shard_vision(tower, *media, group, config)
    return tower.calls


@pytest.mark.parametrize("case", ["disabled", "no group", "no media", "no pixels", "small"])
def test_plain_calls(ranks, case):
    whole = None if case in ("no media", "no pixels") else (len(pixels()), GRID)
    assert ranks.run(_whole, case) == [[whole], [whole]]


def _many_small_frames():
    tower = Tower("tensor")
    shard_vision(tower, pixels([[40, 2, 2]]), torch.tensor([[40, 2, 2]]), dist.group.WORLD, {"enabled": True})
    return tower.calls


def test_many_frames_shard_whatever_their_size(ranks):
    assert ranks.run(_many_small_frames) == [[(96, [[24, 2, 2]])]] * 2  # 20 frames, and zeros up to 96 rows


def _fails(what):
    """The words of the error on this rank."""
    rank = dist.get_rank()
    media = [pixels(), torch.tensor(GRID)]
    tower, config = Tower("tensor", short=1 if what == "short tower" else None), dict(ON)
    if what == "no media on one" and rank == 1:
        media = [None, None]
    elif what == "no grid" and rank == 0:
        media[1] = None
    elif what == "other grid" and rank == 1:
        media[1] = media[1].flip(0)
    elif what == "lost rows" and rank == 1:
        media[0] = media[0][:-4]
    elif what == "odd side" and rank == 0:
        media = [pixels([[1, 3, 4]]), torch.tensor([[1, 3, 4]])]
    with pytest.raises(ValueError) as caught:
        shard_vision(tower, *media, dist.group.WORLD, config)
    return str(caught.value)


@pytest.mark.parametrize(
    "what, words",
    [
        ("no media on one", "ranks 0 and 1 of the group hold different media"),
        ("no grid", "ranks 0 and 1 of the group hold different media"),
        ("other grid", "ranks 0 and 1 of the group hold different media"),
        ("lost rows", "rank 1: pixel_values has 48 rows, grid_thw asks for 52"),
        ("odd side", "rank 0: grid_thw has (1, 3, 4): sides must be positive multiples of 2"),
        ("short tower", "the tower returned|rank 1's tower returned another number"),
    ],
)
def test_every_rank_raises(ranks, what, words):
    for said in ranks.run(_fails, what):
        assert any(word in said for word in words.split("|")), said


def _after_a_failure():
    _fails("short tower")
    return sharded(GRID, "tensor", {})[0]


def test_the_next_call_works(ranks):
    for got in ranks.run(_after_a_failure):
        torch.testing.assert_close(got[0], alone(GRID, "tensor")[0][0], rtol=1e-6, atol=1e-6)


def _qwen(trainable):
    torch.manual_seed(1)
    config = AutoConfig.for_model(
        "qwen3_5", vision_config={"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2,
                                  "patch_size": 4, "num_position_embeddings": 16, "out_hidden_size": 24}
    )  # fmt: skip
    tower = AutoModel.from_config(config.vision_config).requires_grad_(trainable)
    return tower, pixels(GRID, 3 * 2 * 4 * 4)


def _sharded_qwen(trainable):
    tower, values = _qwen(trainable)
    result = shard_vision(tower, values, torch.tensor(GRID), dist.group.WORLD, ON)
    if trainable:
        part_of_loss(result.pooler_output, dist.get_rank(), dist.get_world_size()).backward()
    return result.pooler_output.detach(), [p.grad for p in tower.parameters()]


@pytest.mark.parametrize("trainable", [True, False], ids=["trainable", "frozen"])
def test_real_tower(ranks, trainable):
    tower, values = _qwen(trainable)
    want = tower(values, grid_thw=torch.tensor(GRID)).pooler_output
    outcomes = ranks.run(_sharded_qwen, trainable)
    for got, _ in outcomes:
        torch.testing.assert_close(got, want.detach(), rtol=1e-5, atol=1e-5)
    if trainable:
        part_of_loss(want, 0, 1).backward()
        for index, p in enumerate(tower.parameters()):
            total = sum(grads[index] for _, grads in outcomes)
            torch.testing.assert_close(total, p.grad, rtol=1e-5, atol=1e-5 * float(p.grad.abs().max() + 1))


def _with_tensor_parallel():
    frozen, config = Tower("tensor").requires_grad_(False), {**ON, "mesh_dims": ["cp", "tp"]}
    got = shard_vision(frozen, pixels(), torch.tensor(GRID), dist.group.WORLD, config)
    with pytest.raises(ValueError, match="the vision tower trains"):
        shard_vision(Tower("tensor"), pixels(), torch.tensor(GRID), dist.group.WORLD, config)
    return got


def test_tensor_parallel_ranks_share_only_frozen_towers(ranks):
    for got in ranks.run(_with_tensor_parallel):
        torch.testing.assert_close(got, alone(GRID, "tensor")[0][0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "config, error, words",
    [
        ({"enabled": 1}, TypeError, "enabled is 1"),
        ({"min_frames": -1}, ValueError, "min_frames is -1: it must be a non-negative integer"),
        ({"min_tokens": True}, ValueError, "min_tokens"),
        ({"min_local_patch_rows": 1.0}, ValueError, "min_local_patch_rows"),
        ({"min_local_patch_rows": "96"}, ValueError, "min_local_patch_rows"),
        ({"cost_alpha": -1}, ValueError, "cost_alpha"),
        ({"cost_alpha": True}, ValueError, "cost_alpha"),
        ({"cost_alpha": "AUTO"}, ValueError, "cost_alpha"),
        ({"mesh_dims": ["dp"]}, ValueError, "mesh_dims"),
        ({"mesh_dims": "cp"}, ValueError, "mesh_dims"),
        ({"min_tokns": 3}, ValueError, "min_tokens"),
    ],
)
def test_configuration_errors(config, error, words):
    with pytest.raises(error, match=words):
        shard_vision(Tower(), None, None, None, config)


def test_configuration_defaults():
    made = FrameSharding.from_mapping({"cost_alpha": None, "mesh_dims": ["cp"]})
    assert (made.enabled, made.min_tokens, made.min_frames, made.min_local_patch_rows) == (False, 2048, 32, 96)
    assert made.alpha(Tower()) == 0


@pytest.mark.parametrize(
    "config, width",
    [
        ({"hidden_size": 1152}, 1152),
        ({"embed_dim": 1280, "hidden_size": 3584}, 1280),
        ({"text_config": {"hidden_size": 4096}, "vision_config": {"hidden_size": 768}}, 768),
        ({"text_config": {"hidden_size": 4096}, "hidden_size": 4096}, 0),
        ({"d_model": 64}, 64),
        ({}, 0),
        (None, 0),
    ],
)
def test_tower_width(config, width):
    assert tower_width(config) == width
    assert FrameSharding().alpha(types.SimpleNamespace(config=config)) == 3 * width


@pytest.mark.parametrize(
    "numbers, extra",
    [
        ((4, 4, 96), 23),
        ((8, 4, 96), 22),
        ((92, 4, 96), 1),
        ((96, 4, 96), 0),
        ((100, 4, 96), 0),
        ((4, 0, 96), 0),
        ((4, 4, 0), 0),
    ],
)
def test_padding_frames(numbers, extra):
    assert padding_frames(*numbers) == extra


def test_plan_covers_every_frame_once():
    for world in range(1, 12):
        plans = [plan_frames(GRID, world, rank, merge=2, alpha=7) for rank in range(world)]
        ends = [p.rows[1] for p in plans]
        assert [p.rows[0] for p in plans] == [0, *ends[:-1]] and ends[-1] == sum(frames_of(GRID))
        assert all(p.tokens == [(b - a) // 4 for a, b in (q.rows for q in plans)] for p in plans)
        assert [f for p in plans for f in frames_of(p.grid)] == frames_of(GRID)
        if world <= len(frames_of(GRID)):
            costs = [sum(f * (f + 7) for f in frames_of(p.grid)) for p in plans]
            cuts = frame_partition(frames_of(GRID), world, alpha=7)
            every = [f * (f + 7) for f in frames_of(GRID)]
            assert max(costs) == max(sum(every[a:b]) for a, b in itertools.pairwise(cuts))
            assert all(p.grid for p in plans)


def _frame_costs():
    tower = Tower("tensor")
    values = pixels()
    with torch.no_grad():  # evaluation shards too
        shard_vision(tower, values, torch.tensor(GRID), dist.group.WORLD, ON)
    return tower.calls[0][0]


def test_evaluation_shards_too(ranks):
    assert sum(ranks.run(_frame_costs)) == len(pixels())
