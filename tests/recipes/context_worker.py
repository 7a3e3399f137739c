"""What a rank does in test_context_parallel: runs of a recipe in the process group that there is."""

from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from automodel_c.models.export import export_hf
from automodel_c.parallel import faults, fsdp_units
from automodel_c.recipes import finetune_vlm
from automodel_c.recipes.calls import OwnCalls
from automodel_c.recipes.config import load_recipe
from automodel_c.recipes.evaluate import evaluate
from automodel_c.recipes.finetune_vlm import _loader, build, describe, fit
from automodel_c.recipes.runtime import mesh_shape, runtime_over, stages_on
from automodel_c.recipes.step import accumulate_gradients
from tests.models.packs import well_conditioned
from tests.recipes.step_worker import WAYS, _first_batches, _gradients


def started(recipe, overrides):
    """A Run over all ranks of the group."""
    recipe = load_recipe(recipe, overrides)
    shape = mesh_shape(recipe.distributed, dist.get_world_size())
    return build(
        recipe, runtime_over(shape, torch.device("cpu"), recipe.distributed.ep_size or 1, stages_on(recipe.pipeline))
    )


def first_weights(recipe, overrides, folder):
    """Writes the model that a run with these overrides starts from, on one rank."""
    run = started(recipe, overrides)
    with torch.no_grad():
        well_conditioned(run.model)
    export_hf(run.model, run.processor, folder)


def trained(recipe, overrides):
    """A whole run but for the picture; what it says of itself."""
    run = started(recipe, overrides)
    with mock.patch.object(finetune_vlm, "draw_curves"):
        fit(run)
    return describe(run)


def held(recipe, overrides):
    """Bytes of (masters, moments, gradients, largest unit as it is gathered) on this rank after a step."""
    run, units = started(recipe, overrides), []
    for unit in fsdp_units.units(run.model):
        unit.register_forward_pre_hook(lambda module, _: units.append(_own_bytes(module)))
    batches = [batch for _, batch in zip(range(run.sampler.microbatches), _loader(run), strict=False)]
    accumulate_gradients(run.model, batches, 1, runtime=run.runtime, per_microbatch=True)
    run.optimizer.step()
    local = [(_nbytes(p), sum(map(_nbytes, run.optimizer.state[p].values())), p.grad) for p in run.model.parameters()]
    masters, moments = (sum(of[at] for of in local) for at in (0, 1))
    return masters, moments, sum(_nbytes(grad) for *_, grad in local if grad is not None), max(units)


def _nbytes(tensor):
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()


def _own_bytes(unit):
    """Of the plain tensors that a unit's gathered parameters are just then, of those that its own group holds."""
    group = fsdp_units.param_group(unit)
    return 0 if group is None else sum(_nbytes(p._unsharded_param) for p in group.fsdp_params)


def first_step(recipe, overrides):
    """Losses, counts and gradients of the first global batch in each of WAYS, and what the held-out data say."""
    run = started(recipe, overrides)
    batches = _first_batches(run)
    found = [_gradients(run, batches, *way) for way in WAYS]
    return found, evaluate(run.model, run.held_out, run.processor, batch_size=5, runtime=run.runtime)


def seen_frames(recipe, overrides, count):
    """Of the first microbatches: (tokens, documents' edges, images, clips, patches, patches that this rank ran)."""
    run, ran = started(recipe, overrides), []
    visual = run.model.model.visual
    handle = visual.register_forward_pre_hook(lambda _, args: ran.append(len(args[0])))
    found = []
    for _, batch in zip(range(count), _loader(run), strict=False):
        run.model(batch)[0].backward()
        images, clips = (len(batch.get(key, ())) for key in ("image_grid_thw", "video_grid_thw"))
        patches = sum(len(batch.get(key, ())) for key in ("pixel_values", "pixel_values_videos"))
        found.append((OwnCalls.tokens(batch), batch["cu_seqlens"].tolist(), images, clips, patches, ran[-1]))
    handle.remove()
    assert visual.recompute and run.model.model.language_model.recompute
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in run.model.parameters())
    return found


def failing(recipe, overrides, rank, step):
    """A run whose tower returns one token too few on `rank` in `step`."""
    run = started(recipe, overrides)
    visual, calls = run.model.model.visual, []
    if dist.get_rank() == rank:

        def too_few(_, args, out):
            calls.append(1)
            return out[:-1] if len(calls) > (step - 1) * run.sampler.microbatches else out

        visual.register_forward_hook(too_few)
    with faults.guard():
        fit(run)
