"""What a rank does in the tests of models that are sharded without memory and then filled."""

import torch
import torch.distributed as dist

from automodel_c.models import qwen3_5
from automodel_c.models.export import full_state_dict
from automodel_c.models.parallelize import parallelize_qwen3_5
from automodel_c.models.qwen3_5.shards import Part
from automodel_c.parallel import TensorParallel
from automodel_c.parallel.fsdp_units import frees
from automodel_c.recipes.runtime import runtime_over


def on_meta(source, ep, tp=1, pp=1, **options):
    """A model of a directory or a configuration, sharded over all ranks, without memory."""
    where = runtime_over((dist.get_world_size() // (tp * pp), 1, tp, pp), torch.device("cpu"), ep)
    shared = {"ep_group": where.ep_group, "tp": TensorParallel(where.tp_mesh), "pp": where.pp}
    model = qwen3_5.load(source, device="meta", dtype=torch.float32, **shared)
    parallelize_qwen3_5(model, where.mesh, moe_mesh=where.moe_mesh, **options)
    assert all(p.is_meta for p in model.parameters())
    return model


def parts_made_again(source, frozen, **options):
    """What each part of a sharded model makes again in backward, or the error."""
    where = runtime_over((dist.get_world_size(), 1), torch.device("cpu"))
    model = qwen3_5.load(source, device="meta")
    model.model.visual.requires_grad_(not frozen)
    try:
        parallelize_qwen3_5(model, where.mesh, **options)
    except (ValueError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return [part.recompute for part in (model.model.language_model, model.mtp, model.model.visual)]


def resharded(source, ep, **options):
    """Whether each unit is freed after forward: of experts, of layers, of the root."""
    model = qwen3_5.materialise(on_meta(source, ep, **options), weights=False)
    model._get_fsdp_state()._lazy_init()
    layer = model.model.language_model.layers[0]
    return [frees(unit) for unit in (layer.mlp.experts, layer, model)]


def filled(source, ep, tp=1, pp=1, seed=0):
    """(whole state on rank 0, bytes read, numbers held by this rank)."""
    model = on_meta(source, ep, tp, pp)
    torch.manual_seed(seed)
    qwen3_5.materialise(model)
    held = sum(Part.of(p).tensor.numel() for p in model.parameters())
    return full_state_dict(model), model.bytes_read, held
