"""Shards Qwen3.5 vision-language models over ranks."""

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from .gates import hold_gates
from .qwen3_5 import Qwen3_5
from .qwen3_5.step import OnHost


def parallelize_qwen3_5(model, mesh, *, mp_policy=None, reshard_after_forward=True, activation_checkpointing=False):
    """Shards `model` in place over a device mesh with FSDP2, and returns it.

    model: qwen3_5.Qwen3_5 or transformers' Qwen3_5(Moe)ForConditionalGeneration on this rank's device, equal on all
    ranks, frozen where it shall be.
    mesh: dimensions "dp" and perhaps "cp". Weights are sharded over both alike, for gradients are parts that sum over
    both; the model was loaded with the ContextParallel of this rank's "cp" group. mp_policy: FSDP2's
    MixedPrecisionPolicy, None computes in the masters' dtype.
    Order: checkpointing, gate parameters (always fp32), vision blocks, vision tower, decoder layers, MTP head, root.
    NotImplementedError for a mesh with other dimensions of more than one rank (tensor, pipeline and expert parallelism
    are not done here), and for "cp" with transformers' model. ValueError where the model's cp is of other ranks.
    """
    own = isinstance(model, Qwen3_5)
    _check_dimensions(mesh, model.cp if own else None)
    if own:
        model.recompute(bool(activation_checkpointing))
    elif activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    gates = hold_gates(model)
    mp_policy = mp_policy or MixedPrecisionPolicy()
    options = {"mesh": _shard_mesh(mesh), "reshard_after_forward": reshard_after_forward}
    if mp_policy.param_dtype not in (None, torch.float32):
        for gate in gates:
            fully_shard(gate, **options)
    options["mp_policy"] = mp_policy
    for unit in fsdp_units(model):
        fully_shard(unit, **options)
    if own:
        register_fsdp_forward_method(model, "logits")
        logits = model.logits
        model.logits = lambda batch, rows=None: logits(OnHost(batch), rows=rows)
    return model


def _check_dimensions(mesh, cp):
    sizes = dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))
    for name, size in sizes.items():
        if size > 1 and name != "dp" and (name != "cp" or cp is None):
            raise NotImplementedError(f"distributed.{name}_size={size} is not supported for this model; only 1 is")
    ranks = 1 if cp is None else cp.ranks
    if ranks != sizes.get("cp", 1):
        raise ValueError(f"parallelize_qwen3_5: the model was loaded over {ranks} ranks of cp, the mesh has {sizes}")


def _shard_mesh(mesh):
    """One dimension over all ranks that hold shards."""
    if dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True)).get("cp", 1) == 1:
        return mesh["dp"]
    return mesh["dp", "cp"]._flatten("dp_shard_cp")


def fsdp_units(model):
    """The modules that are gathered and reduced as one, inner ones first."""
    visual, language = model.model.visual, model.model.language_model
    heads = [head for head in (getattr(model, "mtp", None), model) if head is not None]
    return [*visual.blocks, visual, *language.layers, *heads]
