"""FSDP2 with our reduce-scatter against float64 sums over the ranks; torch's own reduce-scatter is the plain twin."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from automodel_c.parallel import install_comm_hooks, sum_gradients
from automodel_c.parallel.bf16_shards import Bf16Shards
from automodel_c.parallel.fsdp_hooks import ReduceParts, scale_of
from automodel_c.parallel.fsdp_units import param_group
from tests.ranks import RanksFailed, here

BF16 = torch.bfloat16


class Net(nn.Module):
    """Sizes that do not divide: 7 and 5 rows, a single row (empty on most ranks), a vector."""

    def __init__(self):
        super().__init__()
        self.up, self.side = nn.Linear(6, 7), nn.Linear(7, 7, bias=False)
        self.gain = nn.Parameter(torch.ones(5))
        self.down, self.last = nn.Linear(7, 5), nn.Linear(5, 1)

    def forward(self, x, side=True):
        x = torch.tanh(self.up(x))
        if side:
            x = x + self.side(x)
        return self.last(self.gain * torch.tanh(self.down(x))).float().square().sum()


def build(dtype=torch.float32):
    torch.manual_seed(1)
    return Net().to(here(), dtype)


def mesh_here():
    """FSDP2 would take the GPU of a machine that has one, whatever the ranks' device."""
    return init_device_mesh(here().type, (dist.get_world_size(),))


def shard(model, hooks=True, mesh=None, wire_dtype=None, **policy):
    mesh = mesh or mesh_here()
    for module in (model.up, model.down):
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(**policy))
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(**policy))
    if hooks:
        install_comm_hooks(model, wire_dtype=wire_dtype)
    return model


def data(seed, rank, rows):
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(1000 * seed + rank)).to(here())


def oracle(seeds, rows, dtype=torch.float32):
    """Float64 sums over ranks and microbatches of the gradients of one float64 model."""
    model = build(dtype).double()
    for seed in seeds:
        for rank in range(dist.get_world_size()):
            model(data(seed, rank, rows).double()).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def full_grads(model):
    return {name: p.grad.full_tensor().double() for name, p in model.named_parameters()}


def assert_as_good(ours, plain, truth):
    for name, reference in truth.items():
        for size in (torch.linalg.vector_norm, lambda t: t.abs().max()):
            mine, theirs = size(ours[name] - reference), size(plain[name] - reference)
            floor = 2 * torch.finfo(torch.float32).eps * size(reference)
            assert mine <= 2 * theirs + floor, (name, float(mine), float(theirs))


def check_gradients(scaling, wire):
    world, rank = dist.get_world_size(), dist.get_rank()
    plain_policy = {"reduce_dtype": wire} if wire else {}
    results = []
    for hooks in (True, False):
        model = shard(build(), hooks, wire_dtype=wire, **({} if hooks else plain_policy))
        if scaling == "sum":
            sum_gradients(model)
        elif scaling == "factor" and hooks:
            for unit in (model, model.up, model.down):
                unit.set_gradient_divide_factor(3.0)
        model(data(0, rank, 4)).backward()
        results.append(full_grads(model))
    ours, plain = results
    factor = {"mean": 1 / world, "sum": 1.0, "factor": 1 / 3}[scaling]
    truth = {name: g * factor for name, g in oracle([0], 4).items()}
    if scaling == "factor":  # gloo has no PREMUL_SUM of its own: scale the mean
        plain = {name: g * (world / 3) for name, g in plain.items()}
    assert_as_good(ours, plain, truth)
    return [float(p.grad.to_local().numel()) for p in model.parameters()]


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("wire", [None, BF16], ids=["fp32", "bf16wire"])
@pytest.mark.parametrize("scaling", ["mean", "sum", "factor"])
def test_install_comm_hooks(rank_pools, world, scaling, wire):
    shards = rank_pools(world).run(check_gradients, scaling, wire)
    assert any(0.0 in local for local in shards)  # a rank with an empty shard took part


def check_slice_of_all_reduce(lengths, dtype, out_dtype, op_name):
    """A buffer of R slices of each length: to the bit the sum in rank order, the same from every rank's place."""
    world, rank = dist.get_world_size(), dist.get_rank()
    op = dist._make_nccl_premul_sum(0.125) if op_name == "premul" else getattr(dist.ReduceOp, op_name)
    for n in lengths:
        inputs = [
            torch.randn(world * n, generator=torch.Generator().manual_seed(7 * n + r)).to(dtype) for r in range(world)
        ]
        out = torch.full((n,), float("nan"), dtype=out_dtype)
        ReduceParts()(out, inputs[rank], dist.group.WORLD, op)
        total = inputs[0].float()
        for r in range(1, world):
            total = total + inputs[r].float()
        want = (total * np.float32(scale_of(op, world)).item()).to(out_dtype)
        assert torch.equal(out, want[rank * n : (rank + 1) * n]), n


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    "dtype,out_dtype",
    [(torch.float32, torch.float32), (BF16, torch.float32), (BF16, BF16)],
    ids=["fp32", "bf16-fp32", "bf16"],
)
@pytest.mark.parametrize("op", ["SUM", "AVG", "premul"])
def test_reduce_scatter_is_a_slice_of_the_all_reduce(rank_pools, world, dtype, out_dtype, op):
    rank_pools(world).run(check_slice_of_all_reduce, [0, 1, 15, 257, 40_000], dtype, out_dtype, op)


def test_eight_ranks(rank_pools):
    for wire in (None, BF16):
        shards = rank_pools(8).run(check_gradients, "mean", wire)
        assert any(0.0 in local for local in shards)
    rank_pools(8).run(check_slice_of_all_reduce, [0, 1, 257, 5000], BF16, torch.float32, "AVG")
    rank_pools(8).close()


def check_hsdp():
    """F4: two microbatches on 2 x 2 ranks: the sum of both, over the shards and the replicas."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    results = []
    for hooks in (True, False):
        model = shard(build(), hooks, mesh)
        for seed in (0, 1):
            model(data(seed, rank, 4)).backward()
        results.append(full_grads(model))
    assert_as_good(*results, {name: g / 4 for name, g in oracle([0, 1], 4).items()})


def test_install_comm_hooks_hsdp(rank_pools):
    rank_pools(4).run(check_hsdp)


def check_unused_on_one_rank():
    """F2: rank 1 does not use `side` (in a unit with used parameters): the mean counts its zero."""
    rank = dist.get_rank()
    model = shard(build())
    model(data(0, rank, 4), side=rank == 0).backward()
    plain, truth = build(), build().double()
    for r in range(2):
        for copy_, dtype in ((plain, torch.float32), (truth, torch.float64)):
            copy_(data(0, r, 4).to(dtype), side=r == 0).backward()
    want = {name: p.grad / 2 for name, p in truth.named_parameters()}
    assert_as_good(full_grads(model), {name: p.grad / 2 for name, p in plain.named_parameters()}, want)
    return float(want["side.weight"].abs().max())


def test_a_parameter_that_one_rank_does_not_use(ranks):
    assert min(ranks.run(check_unused_on_one_rank)) > 0


def check_sharded_head():
    """L1: 64 x 32 sharded head, 8 tokens a rank: the gradient is the mean over the ranks, not this rank's slice."""
    rank = dist.get_rank()
    torch.manual_seed(3)
    head = nn.Linear(32, 64, bias=False)
    plain, truth = copy.deepcopy(head), copy.deepcopy(head).double()
    install_comm_hooks(fully_shard(head, mesh=mesh_here()))
    tokens = [torch.randn(8, 32, generator=torch.Generator().manual_seed(r)) for r in range(2)]
    head(tokens[rank]).square().sum().backward()
    for t in tokens:
        plain(t).square().sum().backward()
        truth(t.double()).square().sum().backward()
    assert_as_good(full_grads(head), {"weight": plain.weight.grad / 2}, {"weight": truth.weight.grad / 2})


def test_a_sharded_head(ranks):
    ranks.run(check_sharded_head)


def refuse(case):
    model = build()
    if case == "no unit":
        install_comm_hooks(model)
    if case == "wire":
        install_comm_hooks(shard(model, hooks=False), wire_dtype=torch.float16)
    if case == "op":
        scale_of(dist.ReduceOp.MAX, 2)
    if case == "async":
        x = torch.ones(2)
        ReduceParts()(x[:1], x, dist.group.WORLD, dist.ReduceOp.SUM, async_op=True)


@pytest.mark.parametrize(
    "case,error,words",
    [
        ("no unit", "ValueError", "Net has no FSDP2 unit"),
        ("wire", "TypeError", "wire_dtype is torch.float16"),
        ("op", "NotImplementedError", "SUM, AVG and PREMUL_SUM"),
        ("async", "ValueError", "async_op"),
    ],
)
def test_install_comm_hooks_refuses(ranks, case, error, words):
    with pytest.raises(RanksFailed) as failed:
        ranks.run(refuse, case)
    assert all(error in text and words in text for text in failed.value.reports.values())
    assert len(failed.value.reports) == 2


def test_a_unit_with_several_parameter_groups_is_refused():
    unit = SimpleNamespace(_get_fsdp_state=lambda: SimpleNamespace(_fsdp_param_groups=["dense", "experts"]))
    with pytest.raises(NotImplementedError, match="2 parameter groups"):
        param_group(unit)


@pytest.mark.parametrize(
    ("hsdp", "force_sum", "factor", "words"),
    [(True, False, None, "under HSDP"), (False, True, None, "divide factor of 1"), (False, True, 2.0, "factor of 1")],
)
def test_bf16_parameters_are_refused_where_the_sum_would_be_changed(hsdp, force_sum, factor, words):
    parameter = SimpleNamespace(sharded_param=torch.nn.Parameter(torch.ones(2, dtype=BF16)))
    group = SimpleNamespace(fsdp_params=[parameter], _is_hsdp=hsdp, gradient_divide_factor=factor)
    group.force_sum_reduction_for_comms = force_sum
    with pytest.raises(NotImplementedError, match=words):
        Bf16Shards(group).wanted()
