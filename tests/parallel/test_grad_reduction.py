"""When gradients are reduced: what stays alive, what the sums are, and the recipe's two keys."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from automodel_c.parallel import grad_reduction_from_config, install_comm_hooks, set_grad_reduction, sum_gradients
from automodel_c.parallel.fsdp_units import param_group, trainable, units
from tests.parallel.test_fsdp_hooks import BF16, Net, assert_as_good, build, data, full_grads, mesh_here, oracle, shard


def full_size_gradient_bytes(model):
    """What FSDP2 keeps beyond the shards: gathered gradients, accumulated ones, and its reduce-scatter inputs."""
    held = []
    for group in filter(None, map(param_group, units(model))):
        for p in trainable(group):
            held += [p._unsharded_param.grad, p.unsharded_accumulated_grad]
        held += [state.reduce_scatter_input for state in _reduce_states(group.comm_ctx)]
    return sum(t.untyped_storage().nbytes() for t in held if t is not None)


def _reduce_states(context):
    states = getattr(context, "reduce_scatter_states", None)
    if states is None:  # torch 2.11
        states = [context.reduce_scatter_state] if context.reduce_scatter_state else []
    return states


def largest_shard(p):
    """Elements of a parameter on the rank that holds most of it."""
    return -(-p.shape[0] // dist.get_world_size()) * p[0].numel()


def gradient_bytes(model):
    """What the gradients of the shards hold; those of a unit lie in one block."""
    blocks = {s.data_ptr(): s.nbytes() for s in (p.grad.to_local().untyped_storage() for p in model.parameters())}
    return sum(blocks.values())


def check_memory(hooks):
    rank = dist.get_rank()
    model = shard(build(), hooks, param_dtype=BF16, reduce_dtype=torch.float32)
    seen = {}
    for per_microbatch in (True, False):
        set_grad_reduction(model, per_microbatch)
        model(data(0, rank, 4)).backward()
        seen[per_microbatch] = full_size_gradient_bytes(model)
        if per_microbatch:
            assert gradient_bytes(model) <= 4 * sum(map(largest_shard, model.parameters()))
    set_grad_reduction(model, True)
    model(data(1, rank, 4)).backward()
    seen["last"] = full_size_gradient_bytes(model)
    elements = sum(p.numel() for p in Net().parameters())
    assert seen == {True: 0, False: 4 * elements, "last": 0}, (seen, elements)
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("hooks", [True, False], ids=["ours", "torch"])
def test_set_grad_reduction_frees_full_size_gradients(rank_pools, hooks, world):
    """What is left after a microbatch is the shards."""
    rank_pools(world).run(check_memory, hooks)


def step(model, seeds, deferred, rows=None):
    """One optimizer step's worth of microbatches; ``rows`` differ, as packs do."""
    rank = dist.get_rank()
    for i, seed in enumerate(seeds):
        set_grad_reduction(model, not deferred or i == len(seeds) - 1)
        model(data(seed, rank, rows[i] if rows else 4)).backward()


def check_accumulation(policy):
    seeds = [0, 1, 2]
    truth = oracle(seeds, 4)
    grads = {}
    for hooks in (True, False):
        for deferred in (True, False):
            model = shard(build(), hooks, **policy)
            sum_gradients(model)
            step(model, seeds, deferred)
            grads[hooks, deferred] = full_grads(model)
    for deferred in (True, False):
        assert_as_good(grads[True, deferred], grads[False, not deferred], truth)


@pytest.mark.parametrize("policy", [{}, {"param_dtype": BF16, "reduce_dtype": torch.float32}], ids=["fp32", "mixed"])
def test_set_grad_reduction_accumulates(ranks, policy):
    ranks.run(check_accumulation, policy)


def check_two_steps():
    """F3: microbatches of different lengths, and a second step after zero_grad: nothing is lost or left over."""
    world = dist.get_world_size()
    per, held = shard(build()), shard(build())
    for seeds, rows in (([0, 1], [4, 9]), ([2, 3], [9, 2])):
        truth, plain = build().double(), build()
        for seed, n in zip(seeds, rows, strict=True):
            for rank in range(world):
                for model, dtype in ((truth, torch.float64), (plain, torch.float32)):
                    (model(data(seed, rank, n).to(dtype)) / world).backward()
        want = {name: p.grad for name, p in truth.named_parameters()}
        twin = {name: p.grad for name, p in plain.named_parameters()}
        for model, deferred in ((per, False), (held, True)):
            step(model, seeds, deferred, rows)
            assert_as_good(full_grads(model), twin, want)
            model.zero_grad()


def test_set_grad_reduction_over_steps(ranks):
    ranks.run(check_two_steps)


def check_first_used_later(deferred):
    """F1: `side` first gets a gradient in the second microbatch, beside gradients held in another dtype."""
    rank, policy = dist.get_rank(), {"param_dtype": BF16, "reduce_dtype": torch.float32}
    model = shard(build(), **policy)
    set_grad_reduction(model, not deferred)
    model(data(0, rank, 4), side=False).backward()
    set_grad_reduction(model, True)
    model(data(1, rank, 4)).backward()
    alone = shard(build(), **policy)
    alone(data(1, rank, 4)).backward()
    assert torch.equal(full_grads(model)["side.weight"], full_grads(alone)["side.weight"])
    return float(full_grads(alone)["side.weight"].abs().max())


@pytest.mark.parametrize("deferred", [True, False], ids=["deferred", "per-microbatch"])
def test_a_parameter_first_used_in_a_later_microbatch(ranks, deferred):
    assert min(ranks.run(check_first_used_later, deferred)) > 0


def check_dp_and_cp_agree():
    """C1: the same 8 rows as 2 x 4 or as 4 x 2 over ranks that all take part in the sum give the same gradients."""
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = data(0, 0, 8)
    grads = []
    for mesh_shape in ((world,), (2, world // 2)):
        mesh = dist.device_mesh.init_device_mesh("cpu", mesh_shape, mesh_dim_names=("dp", "cp")[: len(mesh_shape)])
        mesh = mesh if len(mesh_shape) == 1 else mesh._flatten("dp_cp")
        assert mesh.size() == world  # C4: the group that sums has the ranks it should
        model = shard(build(), mesh=mesh)
        sum_gradients(model)
        model(rows[rank * 2 : rank * 2 + 2]).backward()
        grads.append(full_grads(model))
    assert all(torch.equal(grads[0][name], grads[1][name]) for name in grads[0])
    whole = {dtype: build().to(dtype) for dtype in (torch.float32, torch.float64)}
    for dtype, model in whole.items():
        model(rows.to(dtype)).backward()
    assert_as_good(grads[0], *({n: p.grad for n, p in m.named_parameters()} for m in whole.values()))


def test_sum_gradients_over_data_and_context_ranks(rank_pools):
    rank_pools(4).run(check_dp_and_cp_agree)


def check_bf16_parameters(hooks, microbatches, reduce_dtype):
    """One large gradient and many that bf16 would swallow: the hook's sum is float32."""
    model = torch.nn.Linear(4, 5, bias=False).to(BF16)
    fully_shard(model, mesh=mesh_here(), mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
    if hooks:
        install_comm_hooks(model)
    sums = []
    for _ in range(2):  # the second step starts from nothing
        for i in range(microbatches):
            x = torch.full((1, 4), 1.0 if i == 0 else 2.0**-9, dtype=BF16)
            model(x).sum().backward()
        sums.append(model.weight.grad.full_tensor())
        model.zero_grad()
    for i in range(2):  # zeroed in place, which the hook is not told
        model(torch.full((1, 4), 2.0, dtype=BF16)).sum().backward()
        if i == 0:
            model.zero_grad(set_to_none=False)
    sums.append(model.weight.grad.full_tensor())
    return sums


@pytest.mark.parametrize("reduce_dtype", [BF16, torch.float32], ids=["bf16", "fp32"])
def test_bf16_parameters_accumulate_in_fp32(ranks, reduce_dtype):
    microbatches = 1 + 64
    true = torch.full((5, 4), 1 + 64 * 2.0**-9)
    for first, second, zeroed in ranks.run(check_bf16_parameters, True, microbatches, reduce_dtype):
        assert torch.equal(first.float(), true) and torch.equal(second.float(), true)
        assert torch.equal(zeroed.float(), torch.full((5, 4), 2.0))
    torchs = ranks.run(check_bf16_parameters, False, microbatches, reduce_dtype)[0][0]
    assert torch.equal(torchs.float(), torch.ones(5, 4))  # what the accumulator is for


class Recorder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.block = torch.nn.Linear(2, 2)


def check_flags():
    """G8: each of the three switches is set once on every unit."""
    model = Recorder()
    fully_shard(model.block, mesh=mesh_here())
    fully_shard(model, mesh=mesh_here())
    calls = []
    for name in ("set_is_last_backward", "set_reshard_after_backward", "set_requires_gradient_sync"):
        for unit in units(model):
            setattr(
                unit, name, lambda value, name=name, unit=unit, recurse=True: calls.append((name, value, type(unit)))
            )
    set_grad_reduction(model, False)
    set_grad_reduction(model, True)
    return len(calls), len(set(calls))


def test_set_grad_reduction_sets_each_unit_once(ranks):
    assert ranks.run(check_flags) == [(12, 12)] * 2


@pytest.mark.parametrize(
    "defer,per_microbatch,want",
    [
        (None, None, False),
        (True, None, False),
        (False, None, True),
        (None, True, True),
        (None, False, False),
        (True, False, False),
        (False, True, True),
    ],
)
def test_grad_reduction_from_config(defer, per_microbatch, want):
    assert grad_reduction_from_config(defer, per_microbatch) is want


@pytest.mark.parametrize("both", [True, False])
def test_grad_reduction_from_config_disagrees(both):
    with pytest.raises(
        ValueError, match=f"defer_fsdp_grad_sync and pipeline.reduce_grad_per_microbatch are both {both}"
    ):
        grad_reduction_from_config(both, both)


def test_grad_reduction_refuses():
    with pytest.raises(TypeError, match="defer_fsdp_grad_sync is 'no'"):
        grad_reduction_from_config("no")
    with pytest.raises(TypeError, match="per_microbatch is 1"):
        set_grad_reduction(torch.nn.Linear(1, 1), 1)
    with pytest.raises(ValueError, match="Linear has no FSDP2 unit"):
        set_grad_reduction(torch.nn.Linear(1, 1), True)
    with pytest.raises(ValueError, match="Linear has no FSDP2 unit"):
        sum_gradients(torch.nn.Linear(1, 1))
