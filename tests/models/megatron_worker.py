"""What a rank does in the tests of Megatron-FSDP beside FSDP2, on GPUs or under `streams.on_cpu`."""

import contextlib
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

from automodel_c.models import qwen3_5
from automodel_c.models.export import full_state_dict
from automodel_c.models.gates import published_name
from automodel_c.models.parallelize import parallelize_qwen3_5
from automodel_c.optim import FusedAdamW, clip_grad_norm_
from automodel_c.parallel import megatron, uneven
from automodel_c.recipes.checkpoint import load_checkpoint, save_checkpoint
from automodel_c.recipes.parts import install_reduction
from tests.models import tp_worker
from tests.models.cp_worker import PACKS
from tests.models.ep_worker import runtime
from tests.models.streams import on_cpu
from tests.patch import models
from tests.ranks import here

LR, DECAY = 1e-3, 0.1


@contextlib.contextmanager
def allowed():
    """Where this rank has no GPU the package runs on the CPU, whose refusal is put aside."""
    with contextlib.ExitStack() as stack:
        if here().type == "cpu":
            package = stack.enter_context(on_cpu())
            stack.enter_context(mock.patch.object(megatron, "require", lambda _: package))
        yield


def sharded(strategy, name, seed, shape, per_microbatch, dtype=None, **options):
    """(model, its optimizer)."""
    where = runtime(shape, 1)
    model = tp_worker.build(name, seed, shape)
    policy = MixedPrecisionPolicy(dtype or torch.float32, torch.float32)
    model = parallelize_qwen3_5(
        model.to(here()), where.mesh, mp_policy=policy, strategy=strategy, reduce_per_microbatch=per_microbatch,
        **options,
    )  # fmt: skip
    install_reduction(model, where.device)
    optimizer = FusedAdamW([p for p in model.parameters() if p.requires_grad], lr=LR, weight_decay=DECAY)
    megatron.follow(model, optimizer)
    return model, optimizer


def backward(model, chosen, where, count, per_microbatch):
    loss = tp_worker.backward(model, chosen, where, count, per_microbatch)
    megatron.finish_gradients(model)
    return loss


def whole(model, of=lambda p: p):
    """{name: the whole tensor}."""
    return {published_name(n): uneven.whole(uneven.follow(of(p), p)).cpu() for n, p in model.named_parameters()}


def steps(strategy, name, seeds, shape, chosen, count, per_microbatch, dtype=None, max_norm=float("inf"), **options):
    """Of every seed two steps: [(loss, norm, whole gradients, whole parameters before them)] and parameters at last."""
    where, found = runtime(shape, 1), []
    with allowed():
        for seed in seeds:
            model, optimizer = sharded(strategy, name, seed, shape, per_microbatch, dtype, **options)
            taken = []
            for _ in range(2):
                before = whole(model)
                loss = backward(model, chosen, where, count, per_microbatch)
                norm = clip_grad_norm_(model.parameters(), max_norm)
                taken.append((loss, norm, whole(model, lambda p: p.grad), before))
                optimizer.step()
                optimizer.zero_grad()
            megatron.rest(model)
            found.append((taken, whole(model)))
    return found if dist.get_rank() == 0 else None


def empties(name, shape):
    """(parameters of which this rank has nothing, all; whether their steps count)."""
    where = runtime(shape, 1)
    with allowed():
        model, optimizer = sharded("megatron_fsdp", name, 0, shape, True)
        backward(model, ("text", "tiny"), where, 50, True)
        optimizer.step()
        states = [(p.to_local().numel(), float(optimizer.state[p]["step"])) for p in model.parameters()]
    return sum(n == 0 for n, _ in states), len(states), all(step == 1.0 for _, step in states)


def round_trip(folder, strategies, name, shape, per_microbatch, dtype=None):
    """Whether training goes on, to the bit or nearly, from what was saved after a step: (differences, saved names)."""
    where, results = runtime(shape, 1), []
    data = {"samples": 3}
    with allowed():
        for strategy, seed in zip(strategies, (0, 7), strict=True):
            model, optimizer = sharded(strategy, name, seed, shape, per_microbatch, dtype)
            if not results:
                backward(model, ("text", "tiny"), where, 50, per_microbatch)
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():  # an evaluation in between leaves what modules compute with
                    model.logits({k: v for k, v in PACKS["text"].items() if k != "labels"})
                results.append(save_checkpoint(folder, 1, model, optimizer, where, data=data))
            else:
                assert load_checkpoint(results[0], model, optimizer, where, data=data) == 1
            backward(model, ("clips", "padding"), where, 50, per_microbatch)
            optimizer.step()
            optimizer.zero_grad()
            megatron.rest(model)
            results.append(whole(model))
    _, first, second = results
    return {key: float((first[key] - second[key]).abs().max()) for key in first}


def from_meta(folder, source, dtype):
    """(whether the shards of a model that was loaded without memory are one rank's weights; whether what is exported
    is)."""
    where = runtime((2, 1, 1), 1)
    mapping = models.config("qwen3_5").to_dict()
    torch.manual_seed(3)
    alone = qwen3_5.load(mapping)
    if source == "files":
        if dist.get_rank() == 0:
            alone.save_pretrained(f"{folder}/hf")
        dist.barrier()
    with allowed():
        model = qwen3_5.load(f"{folder}/hf" if source == "files" else mapping, device="meta")
        policy = MixedPrecisionPolicy(dtype, torch.float32)
        model = parallelize_qwen3_5(model, where.mesh, mp_policy=policy, strategy="megatron_fsdp")
        torch.manual_seed(3)
        qwen3_5.materialise(model, here())
        found = whole(model)
        loss, _ = model(PACKS["text"])
        loss.backward()
        megatron.finish_gradients(model)
        exported = full_state_dict(model)
    expected = {published_name(n): p.detach() for n, p in alone.named_parameters()}
    same = all(torch.equal(found[n].cpu(), p) for n, p in expected.items()) and bool(torch.isfinite(loss))
    if exported:
        same_export = all(torch.equal(exported[n], p) for n, p in alone.state_dict().items())
    return same, not exported or same_export


def uneven_round_trip(folder):
    """Whether rows of 5 and 0, then of 1 and 4, come back."""
    mesh, rank = runtime((2, 1, 1), 1).mesh["dp"], dist.get_rank()
    expected = torch.arange(15.0).view(5, 3)

    def of(cuts, values):
        local = values[cuts[rank] : cuts[rank + 1]].clone()
        found = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=values.shape, stride=values.stride())
        uneven.place(found, (cuts[rank], 0))
        return found

    saved = of((0, 5, 5), expected)
    same = torch.equal(uneven.whole(saved), expected) and uneven.place_of(saved) == ((0, 0), (5, 0))[rank]
    dcp.save({"x": saved}, checkpoint_id=folder)
    read = of((0, 1, 5), torch.zeros(5, 3))
    dcp.load({"x": read}, checkpoint_id=folder)
    return same and torch.equal(uneven.whole(read), expected)


def flattened(shape):
    mesh = megatron.flat_mesh(runtime(shape, 1).mesh)
    return mesh.mesh_dim_names, tuple(mesh.shape), mesh["tp"].mesh.tolist(), mesh["dp_cp"].mesh.tolist()


def refused():
    return _said(lambda: parallelize_qwen3_5(tp_worker.build("dense", 0, (2, 1, 1)), runtime((2, 1, 1), 1).mesh,
                                             strategy="megatron_fsdp"))  # fmt: skip


def refusals():
    where = runtime((2, 1, 1), 1)
    shared = runtime((2, 1, 1), 2)

    def shard(model, strategy="megatron_fsdp", **options):
        return _said(lambda: parallelize_qwen3_5(model, where.mesh, strategy=strategy, **options))

    with allowed():
        return [
            shard(tp_worker.build("experts", 0, (2, 1, 1), 2), moe_mesh=shared.moe_mesh),
            shard(models.build()),
            shard(tp_worker.build("dense", 0, (2, 1, 1)), mp_policy=MixedPrecisionPolicy(output_dtype=torch.bfloat16)),
            shard(tp_worker.build("dense", 0, (2, 1, 1)), strategy="ddp"),
        ]


def _said(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def trained(recipe, overrides):
    """A whole run of a recipe but for the picture."""
    from tests.recipes import context_worker

    with allowed():
        context_worker.trained(recipe, overrides)
