"""FusedAdamW and clip_grad_norm_ on DTensors over two ranks, shards without elements among them."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

from automodel_c.optim import FusedAdamW, clip_grad_norm_

BF16 = torch.bfloat16
MODES = [(torch.float32, True), (BF16, True), (BF16, "remainder"), (BF16, False)]
modes = pytest.mark.parametrize(("dtype", "master_weights"), MODES, ids=["f32", "bf16", "remainder", "bare"])


def build(dtype):
    """Two groups; the second has one row, so that the last rank holds nothing of it."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).to(dtype)
    return model


def optimizer_of(model, master_weights):
    groups = [{"params": list(model[0].parameters()), "lr": 0.05}, {"params": list(model[2].parameters()), "lr": 0.02}]
    return FusedAdamW(groups, master_weights=master_weights)


def train(model, optimizer, steps, start=0):
    """The same batch on every rank, so that one rank alone goes the same way."""
    for number in range(start, start + steps):
        torch.manual_seed(100 + number)
        x = torch.randn(8, 6).to(next(model.parameters()).dtype)
        model(x).float().square().mean().backward()
        norm = clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return norm


def full(tensor):
    """All of a tensor on every rank; gloo does not gather int16, so remainders travel as int32."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().clone()
    wide = tensor.to(torch.int32) if tensor.dtype == torch.int16 else tensor
    return wide.full_tensor().detach().to(tensor.dtype)


def everything(model, optimizer):
    return {
        name: {"param": full(p), **{key: full(t) for key, t in optimizer.state[p].items()}}
        for name, p in model.named_parameters()
    }


def sharded_worker(dtype, master_weights, folder):
    mesh = init_device_mesh("cpu", (2,))
    model = fully_shard(build(dtype), mesh=mesh)
    optimizer = optimizer_of(model, master_weights)
    train(model, optimizer, 3)
    last = model[2].weight
    assert last.to_local().numel() == (5 if dist.get_rank() == 0 else 0)
    for p in model.parameters():
        for key, t in optimizer.state[p].items():
            if key == "step":
                assert t == 3 and not isinstance(t, DTensor)
            else:
                assert t.placements == p.placements and t.to_local().shape == p.to_local().shape
    dcp.save(
        {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)},
        checkpoint_id=folder,
    )
    saved = everything(model, optimizer)
    again = fully_shard(build(dtype), mesh=mesh)
    other = optimizer_of(again, master_weights)
    load(again, other, folder)
    loaded = everything(again, other)
    norms = [train(model, optimizer, 2, 3), train(again, other, 2, 3)]
    return saved, loaded, everything(model, optimizer), everything(again, other), norms


def resumed_worker(dtype, master_weights, folder):
    """What two ranks saved, on any number of ranks; how many of them hold nothing of the second group."""
    model = fully_shard(build(dtype), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = optimizer_of(model, master_weights)
    load(model, optimizer, folder)
    loaded = everything(model, optimizer)
    empty = torch.tensor(float(model[2].weight.to_local().numel() == 0))
    dist.all_reduce(empty)
    train(model, optimizer, 1, 3)  # the shards take a step
    return loaded, int(empty)


def load(model, optimizer, folder):
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optim"])


def assert_equal(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].keys() == b[name].keys()
        for key in a[name]:
            assert a[name][key].dtype == b[name][key].dtype, (name, key)
            assert torch.equal(a[name][key], b[name][key]), (name, key)


@modes
@pytest.mark.filterwarnings("ignore")  # torch's checkpoint code warns of itself when it saves and loads
def test_checkpoint_goes_to_the_same_and_to_another_number_of_ranks(ranks, rank_pools, tmp_path, dtype, master_weights):
    results = ranks.run(sharded_worker, dtype, master_weights, str(tmp_path))
    saved, loaded, after, after_loaded, norms = results[0]
    assert_equal(saved, loaded)
    assert_equal(after, after_loaded)
    assert_equal(after, results[1][2])
    assert torch.equal(norms[0], norms[1]) and torch.equal(norms[0], results[1][4][0])
    model = build(dtype)
    optimizer = optimizer_of(model, master_weights)
    load(model, optimizer, str(tmp_path))
    assert_equal(saved, everything(model, optimizer))
    for world in (3, 4):
        for loaded, empty in rank_pools(world).run(resumed_worker, dtype, master_weights, str(tmp_path)):
            assert_equal(saved, loaded)
            assert empty == world - 1


def clip_worker(kinds, missing_on_one, max_norm):
    """Gradients by kind of sharding; every rank returns the norm and what its gradients became in full."""
    world, rank = dist.get_world_size(), dist.get_rank()
    flat, square = init_device_mesh("cpu", (world,)), init_device_mesh("cpu", (1, world))
    shardings = {
        "sharded": (flat, [Shard(0)]),
        "columns": (flat, [Shard(1)]),
        "replicated": (flat, [Replicate()]),
        "experts": (square, [Shard(1), Shard(0)]),
        "hybrid": (square, [Replicate(), Shard(0)]),
    }
    generator = torch.Generator().manual_seed(3)
    params, truth = [], 0.0
    for i, kind in enumerate(kinds):
        grad = torch.randn(1 + i % 3, 4, generator=generator) * 3
        truth += float(grad.double().square().sum())
        if kind == "plain":
            p = torch.zeros(grad.shape, requires_grad=True)
            p.grad = grad
        else:
            mesh, placements = shardings[kind]
            p = nn.Parameter(distribute_tensor(torch.zeros(grad.shape), mesh, placements))
            p.grad = distribute_tensor(grad, mesh, placements)
        params.append(p)
    if missing_on_one:
        params.append(nn.Parameter(distribute_tensor(torch.zeros(1, 4), square, [Replicate(), Shard(0)])))
        if rank == 0:
            params[-1].grad = distribute_tensor(torch.zeros(1, 4), square, [Replicate(), Shard(0)], src_data_rank=None)
    norm = clip_grad_norm_(params, max_norm)
    return norm, truth**0.5, [full(p.grad) for p in params[: len(kinds)]]


KINDS = ["sharded", "columns", "replicated", "experts", "hybrid", "plain"]


@pytest.mark.parametrize("kinds", [*([kind] * 3 for kind in KINDS), KINDS * 2], ids=[*KINDS, "all"])
@pytest.mark.parametrize("missing_on_one", [False, True], ids=["", "missing"])
def test_clip_counts_every_gradient_once(ranks, kinds, missing_on_one):
    (norm, truth, grads), (other, _, other_grads) = ranks.run(clip_worker, kinds, missing_on_one, 1.0)
    assert torch.equal(norm, other)
    assert norm == torch.tensor(truth, dtype=torch.float64).float()
    total = sum(float(g.double().square().sum()) for g in grads) ** 0.5
    assert abs(total - 1.0) < 1e-6
    for a, b in zip(grads, other_grads, strict=True):
        assert torch.equal(a, b)


def not_finite_worker(value):
    mesh = init_device_mesh("cpu", (2,))
    p = nn.Parameter(distribute_tensor(torch.zeros(3), mesh, [Shard(0)]))
    p.grad = distribute_tensor(torch.tensor([9.0, 9.0, value]), mesh, [Shard(0)])
    return clip_grad_norm_([p], 1.0), full(p.grad)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_non_finite_shard_shows_on_every_rank(ranks, value):
    for norm, grad in ranks.run(not_finite_worker, value):
        assert not norm.isfinite() and norm.isnan() == torch.tensor(value).isnan()
        assert torch.equal(grad[:2], torch.tensor([9.0, 9.0]))


def found_inf_worker():
    """pytorch 140514: found_inf beside DTensors."""
    mesh = init_device_mesh("cpu", (2,))
    model = fully_shard(build(torch.float32), mesh=mesh)
    optimizer = optimizer_of(model, True)
    train(model, optimizer, 1)
    before = copy.deepcopy(everything(model, optimizer))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step(found_inf=torch.ones(1))
    optimizer.step(found_inf=distribute_tensor(torch.ones(()), mesh, [Replicate()]))
    skipped = everything(model, optimizer)
    optimizer.step(found_inf=distribute_tensor(torch.zeros(()), mesh, [Replicate()]))
    return before, skipped, float(optimizer.state[model[0].weight]["step"])


def test_found_inf_with_dtensors_is_a_no_op(ranks):
    for before, skipped, step in ranks.run(found_inf_worker):
        assert_equal(before, skipped)
        assert step == 2
