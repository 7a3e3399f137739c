"""Applies data parallelism to Qwen3.5 vision-language models."""

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from .gates import hold_gates
from .qwen3_5 import Qwen3_5


def parallelize_qwen3_5(model, mesh, *, mp_policy=None, reshard_after_forward=True, activation_checkpointing=False):
    """Shards `model` in place over a device mesh with FSDP2, and returns it.

    model: qwen3_5.Qwen3_5 or transformers' Qwen3_5(Moe)ForConditionalGeneration on this rank's device, equal on all
    ranks, frozen where it shall be.
    mesh: one dimension, named "dp". mp_policy: FSDP2's MixedPrecisionPolicy, None computes in the masters' dtype.
    Order: checkpointing, gate parameters (always fp32), vision blocks, vision tower, decoder layers, MTP head, root.
    NotImplementedError for a mesh with other dimensions of more than one rank: tensor, pipeline, context and expert
    parallelism are not done here.
    """
    for name, size in zip(mesh.mesh_dim_names, mesh.shape, strict=True):
        if name != "dp" and size > 1:
            raise NotImplementedError(f"distributed.{name}_size={size} is not supported for this model; only 1 is")
    own = isinstance(model, Qwen3_5)
    if own:
        model.recompute(bool(activation_checkpointing))
    elif activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    gates = hold_gates(model)
    mp_policy = mp_policy or MixedPrecisionPolicy()
    options = {"mesh": mesh["dp"], "reshard_after_forward": reshard_after_forward}
    if mp_policy.param_dtype not in (None, torch.float32):
        for gate in gates:
            fully_shard(gate, **options)
    options["mp_policy"] = mp_policy
    for unit in fsdp_units(model):
        fully_shard(unit, **options)
    if own:
        register_fsdp_forward_method(model, "logits")
    return model


def fsdp_units(model):
    """The modules that are gathered and reduced as one, inner ones first."""
    visual, language = model.model.visual, model.model.language_model
    heads = [head for head in (getattr(model, "mtp", None), model) if head is not None]
    return [*visual.blocks, visual, *language.layers, *heads]
