"""Shards a Qwen3_5 with Megatron-FSDP: what `parallelize_qwen3_5` does for distributed.strategy=megatron_fsdp."""

import contextlib

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from automodel_c.parallel import megatron

from .gates import hold_gates
from .qwen3_5 import Qwen3_5
from .qwen3_5.text import DecoderLayer
from .qwen3_5.vision import Merger, VisionBlock

UNITS = (VisionBlock, Merger, DecoderLayer)  # each gives a tensor, or one first: the package sees no others


def check(model, mesh, moe_mesh, mp_policy, reshard_after_forward, per_microbatch):
    """The package's way to hold the model, see `parallel.megatron.zero_strategy`. NotImplementedError for what this
    strategy cannot do, before anything is changed."""
    megatron.require(mesh.device_type)
    strategy = "distributed.strategy=megatron_fsdp"
    if not isinstance(model, Qwen3_5):
        raise NotImplementedError(f"{strategy} needs model.operators: automodel_c")
    for name, ranks in (("ep", model.ep.ranks), ("pp", model.pp.ranks)):
        if ranks > 1:
            raise NotImplementedError(f"{strategy} with distributed.{name}_size={ranks} is not supported; only 1 is")
    if moe_mesh is not None:
        raise NotImplementedError(f"{strategy} takes no moe_mesh: every rank of the mesh holds parts of all experts")
    if mp_policy.output_dtype not in (None, torch.float32):
        raise NotImplementedError(
            f"{strategy} with distributed.mp_policy.output_dtype={mp_policy.output_dtype} is not supported: the loss is"
            " float32"
        )
    return megatron.zero_strategy(per_microbatch, reshard_after_forward)


def shard(model, mesh, mp_policy, zero):
    """Shards a model that `check` let pass. Its parameters are float32 DTensors then, as FSDP2's are, the frozen ones
    of the dtype that they compute in."""
    device = torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")
    split = _plain(model)
    meta, compute = next(model.parameters()).is_meta, mp_policy.param_dtype
    weights = {}
    if compute not in (None, torch.float32) and not meta:
        weights = {name: p.data for name, p in model.named_parameters() if p.dtype == torch.float32}
    if compute is not None:
        model.to(compute)
    hold_gates(model)
    with _in_order_of_use(model):
        shards = megatron.shard(
            model,
            megatron.flat_mesh(mesh),
            device=device,
            units=UNITS,
            zero=zero,
            reduce_dtype=mp_policy.reduce_dtype or compute or torch.float32,
            split=split,
            experts=bool(model.config.text.num_experts),
        )
    if weights:
        shards.fill(weights, {name: _first(weights[name], axis, model.tp) for name, axis in split.items()})
    model.compute_dtype = compute or model.compute_dtype
    logits = model.logits

    def gathered(batch, rows=None):
        shards.begin()
        return logits(batch, rows)

    model.logits = gathered
    return model


def _plain(model):
    """Makes plain tensors of the parts of weights that ranks of tp split; {name: the axis}. The package takes the
    columns of a DTensor's whole for those of its part."""
    split = {}
    for prefix, module in model.named_modules():
        for name, weight in list(module._parameters.items()):
            if isinstance(weight, DTensor):
                split[f"{prefix}.{name}"] = weight.placements[0].dim
                local = weight.detach().to_local()
                module._parameters[name] = nn.Parameter(local, requires_grad=weight.requires_grad)
    return split


def _first(local, axis, tp):
    """Where a rank's part of a weight begins."""
    return [tp.rank * n if dim == axis else 0 for dim, n in enumerate(local.shape)]


@contextlib.contextmanager
def _in_order_of_use(model):
    """The tower stands before the decoder meanwhile: what is gathered ahead is what the next parameters are in."""
    parts = model.model._modules
    parts["language_model"] = parts.pop("language_model")
    try:
        yield
    finally:
        parts["visual"] = parts.pop("visual")
