"""What a rank does in the tests of the model whose layers several ranks hold, one behind another."""

import functools

import torch
import torch.distributed as dist

from automodel_c.models import qwen3_5
from automodel_c.models.gates import published_name
from automodel_c.models.parallelize import parallelize_qwen3_5
from automodel_c.models.qwen3_5.pipeline import Answers, Stages
from automodel_c.models.qwen3_5.shards import Part
from automodel_c.optim import clip_grad_norm_
from automodel_c.parallel import ContextParallel, TensorParallel, faults, set_grad_reduction
from automodel_c.parallel.fsdp_units import param_group, units
from automodel_c.parallel.pipeline import Pipeline
from automodel_c.recipes.parts import install_reduction
from automodel_c.recipes.prewarm import prewarm
from automodel_c.recipes.runtime import runtime_over
from automodel_c.recipes.schema import Prewarm
from tests.models import cp_worker
from tests.models.cp_worker import PACKS
from tests.ranks import here


@functools.cache
def runtime(shape, ep, chunks):
    """The meshes of (dp, cp, tp, pp) ranks of which `ep` share experts."""
    return runtime_over(shape, here(), ep, chunks)


def build(name, seed, shape, ep=1, chunks=1):
    """A model of cp_worker.MODELS as this rank holds it, sharded; its weights are the whole model's."""
    where = runtime(shape, ep, chunks)
    shared = {"tp": TensorParallel(where.tp_mesh), "ep_group": where.ep_group, "pp": where.pp}
    whole, (_, _, options, frozen, *_) = cp_worker.build(name, seed), (cp_worker.MODELS | cp_worker.MORE)[name]
    model = qwen3_5.load(whole.config, cp=ContextParallel(where.mesh.get_group("cp")), **shared, **options).to(here())
    if model.model.visual is not None:
        model.model.visual.requires_grad_(not frozen)
    parallelize_qwen3_5(model, where.mesh, moe_mesh=where.moe_mesh)
    weights = whole.state_dict()
    with torch.no_grad():
        for key, p in model.named_parameters():
            part = Part.of(p)
            part.tensor.copy_(weights[published_name(key)][part.slices])
    install_reduction(model, where.device)
    return model


def steps(name, seeds, shape, ep, chunks, chosen, count):
    """Of every seed: (loss and gradients of this rank's stages on the first rank of each, norm, most full-size
    gradients after a microbatch), gradients reduced in each microbatch for even seeds."""
    where, found = runtime(shape, ep, chunks), []
    for seed in seeds:
        model, full = build(name, seed, shape, ep, chunks), [0]
        batches = [{**PACKS[pack], "num_label_tokens": count} for pack in chosen[where.dp_rank :: where.dp_size]]
        stages = Stages(model, batches)
        pipeline = Pipeline(where.pp, where.channels, stages, where.device)

        def before(last, model=model, full=full, seed=seed):
            full.append(full_size(model))
            set_grad_reduction(model, seed % 2 == 0 or last)

        pipeline.step(len(batches), before)
        full.append(full_size(model))
        losses = torch.stack([stages.losses[key] for key in ("lm_loss", "mtp_loss", "aux_loss")])
        dist.all_reduce(losses)
        weight = model.config.text.router_aux_loss_coef if model.has_aux_loss else 0
        loss = losses @ losses.new_tensor([1.0, 0.1, weight])
        norm = clip_grad_norm_(model.parameters(), float("inf"), group=where.pp_group)
        found.append((whole(model, loss, where), norm, max(full[:-1]) if seed % 2 == 0 else full[-1]))
    return found


def full_size(model):
    """How many gradients of whole weights this rank holds."""
    groups = [group for unit in units(model) if (group := param_group(unit)) is not None]
    params = [p for group in groups for p in group.fsdp_params]
    whole = (getattr(getattr(p, "_unsharded_param", None), "grad", None) for p in params)
    return sum(grad is not None for grad in whole) + sum(p.unsharded_accumulated_grad is not None for p in params)


def whole(model, loss, where):
    found = {"loss": loss}
    for key, p in model.named_parameters():
        if p.requires_grad:
            found[published_name(key)] = p.grad.full_tensor()
    each = dist.get_world_size() // where.pp.ranks
    return found if dist.get_rank() % each == 0 else {}


def answers(name, shape, chunks, pack, rows):
    """Logits of rows of a pack, None on ranks that do not hold the last stage."""
    where, model = runtime(shape, 1, chunks), build(name, 0, shape, 1, chunks)
    batch = {key: value for key, value in PACKS[pack].items() if key != "labels"}
    with torch.no_grad():
        stages = Answers(model, batch, rows)
        Pipeline(where.pp, where.channels, stages, where.device).forward(0)
    return stages.logits


def fails(shape, chunks, rank):
    """One rank fails in a layer, in a microbatch that is not the first."""
    where, model, seen = runtime(shape, 1, chunks), build("dense", 0, shape, 1, chunks), []

    def raise_later(*_):
        seen.append(1)
        if len(seen) > 1 and dist.get_rank() == rank:
            raise KeyError("the layer's own")

    next(iter(model.model.language_model.layers.children())).register_forward_pre_hook(raise_later)
    stages = Stages(model, [PACKS[pack] for pack in ("tiny", "text", "tiny", "tiny")])
    with faults.guard():
        Pipeline(where.pp, where.channels, stages, where.device).step(4, lambda last: set_grad_reduction(model, True))


def prewarmed(shape, chunks):
    """Twice, and whether a microbatch goes through the same ways afterwards."""
    where = runtime(shape, 1, chunks)
    done = [prewarm(Prewarm(comm_groups=True), where) for _ in range(2)]
    return done, answers("dense", shape, chunks, "tiny", [0]) is not None
