"""Shards Qwen3.5 vision-language models over ranks."""

import dataclasses

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard

from automodel_c.parallel import checkpoint_context_fn
from automodel_c.parallel.fsdp_units import WideGradients

from . import megatron
from .gates import hold_gates
from .qwen3_5 import Qwen3_5
from .qwen3_5.experts import Experts
from .qwen3_5.layers import MLP, Head
from .qwen3_5.model import RECOMPUTE, SCOPES
from .qwen3_5.step import OnHost
from .qwen3_5.tensor import is_split
from .qwen3_5.text import DecoderLayer

STRATEGIES = ("fsdp2", "megatron_fsdp")


def parallelize_qwen3_5(
    model, mesh, *, moe_mesh=None, mp_policy=None, reshard_after_forward=None, experts_reshard_after_forward=None,
    activation_checkpointing=False, activation_checkpointing_scope="all", compile=False, async_tensor_parallel=False,
    strategy="fsdp2", reduce_per_microbatch=True, fp32_expert_grads=False,
):  # fmt: skip
    """Shards `model` in place over a device mesh with FSDP2, or Megatron-FSDP, and returns it.

    model: qwen3_5.Qwen3_5 or transformers' Qwen3_5(Moe)ForConditionalGeneration on this rank's device, equal on all
    ranks but for experts that they share, frozen where it shall be. A Qwen3_5 may be on the meta device:
    qwen3_5.materialise then fills the shards, and no rank ever holds all weights.
    mesh: dimensions "dp" and perhaps "cp" and "tp", in this order. Weights are sharded over all alike, for gradients
    are parts that sum over all; the model was loaded, or patched, with the ContextParallel of this rank's "cp" group,
    and loaded with the TensorParallel of its "tp". Weights that ranks of "tp" split are sharded over the rest, in units
    of their own.
    moe_mesh: None, or dimensions "ep_shard" and "ep" over the same ranks in the same order, so that "ep" is innermost;
    the model was loaded with this rank's "ep" group. Weights of experts [E, ..] become DTensors over it, sharded on
    dim 0 over "ep" and on dim 1 over "ep_shard", where FSDP2 sums their gradients: what comes from the ranks of "ep" is
    in them already. Where FSDP2 takes means, theirs is over all ranks of `mesh`, as everybody's.
    mp_policy: FSDP2's MixedPrecisionPolicy, None computes in the masters' dtype. Its output_dtype is that of the
    model's outputs alone.
    reshard_after_forward: whether units are freed after forward and gathered again for backward; None leaves it to
    FSDP2, which frees all but the root. experts_reshard_after_forward: of experts that ranks share; None as the rest.
    activation_checkpointing: False, True or "full", "selective" (see qwen3_5.load). activation_checkpointing_scope:
    "all", "language" (decoder and MTP head) or "vision"; a frozen tower keeps nothing and is never in it.
    async_tensor_parallel: whether ranks of "tp" send rows while they compute, see `parallel.tensor.compiled`.
    strategy: "fsdp2", or "megatron_fsdp" for a Qwen3_5 on GPUs, see `models.megatron`; reduce_per_microbatch: of the
    latter, for which it is settled here what `set_grad_reduction` settles before each backward of the former.
    fp32_expert_grads: gradients of the weights of experts that compute in bf16 are made in float32 and added to what a
    step has of them without a rounding, so that FSDP2 reduces what was not rounded; where it frees each microbatch's
    gradients it takes twice the bytes for those of one layer. mp_policy then has a param_dtype of bfloat16 and a
    reduce_dtype of float32.
    Order: weights over "tp" and experts over "ep" (the model was loaded so), checkpointing, compilation, FSDP2: gate
    parameters (always fp32), experts that ranks share, weights that ranks split with the norms between them, vision
    blocks, vision tower, decoder layers, MTP head, root; context parallelism goes on inside forward.
    NotImplementedError for a mesh with other dimensions of more than one rank, for "cp" with a model that was not
    patched over it, for "tp", "ep", selective checkpointing and scopes with transformers' model, and for `compile`.
    ValueError where the model's cp, tp or experts are of other ranks, `moe_mesh` has other dimensions or another order
    of ranks than said, a weight that ranks split or share cannot be sharded evenly, or fp32_expert_grads is of a model
    that has no such experts or dtypes.
    """
    own = isinstance(model, Qwen3_5)
    cp = model.cp if own else getattr(vars(model).get("_amcore_report"), "cp", None)
    if compile:
        raise NotImplementedError(
            "distributed.enable_compile=True is not supported: a layer is compiled for one pack's plan, and would be"
            " compiled again for every step's; what compilation fuses, the operators of this package do already"
        )
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy is {strategy!r}, one of {', '.join(STRATEGIES)} is needed")
    _check_dimensions(mesh, cp, model.tp if own else None)
    _check_experts(model, mesh, moe_mesh)
    mp_policy = mp_policy or MixedPrecisionPolicy()
    if strategy == "megatron_fsdp":
        if fp32_expert_grads:
            raise NotImplementedError(
                "distributed.strategy=megatron_fsdp with distributed.moe.fp32_weight_grads=true is not supported: its"
                " buffers take gradients of the weights' dtype"
            )
        zero = megatron.check(model, mesh, moe_mesh, mp_policy, reshard_after_forward, reduce_per_microbatch)
    _checkpoint_activations(model, activation_checkpointing, activation_checkpointing_scope, cp)
    if own and async_tensor_parallel:
        model.tp.send_in_pieces()
    for module, _ in _split_modules(model):
        if not isinstance(module, Head):
            module.asynchronous = async_tensor_parallel
    if strategy == "megatron_fsdp":
        return megatron.shard(model, mesh, mp_policy, zero)
    gates = hold_gates(model)
    options = {"mesh": _flat(mesh, "dp", "cp", "tp"), **_given(reshard_after_forward=reshard_after_forward)}
    if {mp_policy.param_dtype, *(p.dtype for p in model.parameters())} - {None, torch.float32}:
        for gate in gates:
            fully_shard(gate, **options)
    # between units layers decide about dtypes, and statistics stay float32
    options["mp_policy"] = dataclasses.replace(mp_policy, output_dtype=None)
    if own and not model.pp.is_last:
        mp_policy = options["mp_policy"]  # its outputs are another stage's inputs
    for experts in _shared_experts(model):
        own_reshard = _given(reshard_after_forward=experts_reshard_after_forward)
        _shard_experts(experts, moe_mesh, **options | own_reshard)
    for module, between in _split_modules(model):
        stays = {"reshard_after_forward": False} if isinstance(module, Head) else {}  # backward begins there
        for norm in between:
            fully_shard(norm, **options)
        _shard_split(module, options["mesh"], **stays | options | {"mesh": _flat(mesh, "dp", "cp")})
    for unit in fsdp_units(model):
        fully_shard(unit, **options | ({"mp_policy": mp_policy} if unit is model else {}))
    if fp32_expert_grads:
        _widen_expert_grads(model, mp_policy)
    if own:
        register_fsdp_forward_method(model, "logits")
        model.compute_dtype = mp_policy.param_dtype or model.compute_dtype
        logits = model.logits
        model.logits = lambda batch, rows=None, *stage: logits(batch if stage else OnHost(batch), rows, *stage)
    return model


def _given(**options):
    return {name: value for name, value in options.items() if value is not None}


def _checkpoint_activations(model, value, scope, cp):
    if value not in RECOMPUTE:
        raise ValueError(f"activation_checkpointing is {value!r}, False, True, 'full' or 'selective' is needed")
    if scope not in SCOPES:
        raise ValueError(f"activation_checkpointing_scope is {scope!r}, one of {', '.join(SCOPES)} is needed")
    if not isinstance(model, Qwen3_5):
        if value == "selective" or (value and scope != "all"):
            raise NotImplementedError(
                f"activation_checkpointing={value!r} in scope {scope!r} is not supported for transformers' model, which"
                " makes all activations again, or none"
            )
        if value:
            kept = {} if cp is None else {"context_fn": checkpoint_context_fn}
            model.gradient_checkpointing_enable({"use_reentrant": False, **kept})
        return
    visual = model.model.visual
    frozen = visual is None or not any(p.requires_grad for p in visual.parameters())
    if frozen and scope == "vision":
        value = False
    model.recompute(value, "language" if frozen and scope == "all" else scope)


def _shard_experts(experts, moe_mesh, *, mesh, mp_policy, **options):
    """Makes an Experts a unit of its own over `moe_mesh`; `mesh` is that of all ranks."""
    for name, weight in list(experts.named_parameters()):
        spread = DTensor.from_local(weight.detach(), moe_mesh["ep"], [Shard(0)], run_check=False)
        setattr(experts, name, nn.Parameter(spread, requires_grad=weight.requires_grad))
    # its inputs are the layer's own
    mp_policy = dataclasses.replace(mp_policy, cast_forward_inputs=False)
    fully_shard(
        experts, mesh=moe_mesh["ep_shard"], shard_placement_fn=lambda _: Shard(1), mp_policy=mp_policy, **options
    )
    experts.set_gradient_divide_factor(float(mesh.size()))
    # gloo multiplies nothing before it sums; over one rank FSDP2 would divide by a factor twice
    experts.set_force_sum_reduction_for_comms(moe_mesh["ep_shard"].size() > 1)


def _widen_expert_grads(model, mp_policy):
    found = [m for m in model.modules() if isinstance(m, Experts) and all(p.requires_grad for p in m.parameters())]
    dtypes = (mp_policy.param_dtype, mp_policy.reduce_dtype)
    if not found or dtypes != (torch.bfloat16, torch.float32):
        raise ValueError(
            f"parallelize_qwen3_5: fp32_expert_grads: {len(found)} layers of trained experts, param_dtype {dtypes[0]}"
            f" and reduce_dtype {dtypes[1]}; experts with torch.bfloat16 and torch.float32 are needed"
        )
    WideGradients.install(model, Experts, ("gate_up_proj", "down_proj"))


def _split_modules(model):
    """(module whose weights ranks of tp split, the whole norms inside) of every layer."""
    for layer in [m for m in model.modules() if isinstance(m, DecoderLayer)] if isinstance(model, Qwen3_5) else ():
        if hasattr(layer, "self_attn") and is_split(layer.self_attn):
            yield layer.self_attn, (layer.self_attn.q_norm, layer.self_attn.k_norm)
        if isinstance(layer.mlp, MLP) and is_split(layer.mlp):
            yield layer.mlp, ()
    head = getattr(model, "lm_head", None)
    if isinstance(head, Head) and isinstance(head.weight, DTensor):
        yield head, ()


def _shard_split(module, every, *, mesh, **options):
    """Makes a module whose weights ranks of tp split a unit over `mesh`, the others; `every` is that of all ranks."""
    dims = {}
    for name, weight in module.named_parameters():
        if isinstance(weight, DTensor) and weight.to_local().shape[0] % mesh.size():
            # what FSDP2 made of uneven rows of a part would not be rows of the whole
            if weight.placements[0].is_shard(0) and weight.shape[1] % mesh.size() == 0:
                dims[weight] = Shard(1)
            elif weight.placements[0].is_shard(0):
                raise ValueError(
                    f"parallelize_qwen3_5: a rank of tp has {weight.to_local().shape[0]} x {weight.shape[1]} of"
                    f" {name}, {mesh.size()} ranks divide neither"
                )
    fully_shard(module, mesh=mesh, shard_placement_fn=dims.get, **options)
    module.set_gradient_divide_factor(float(every.size()))
    # as for experts
    module.set_force_sum_reduction_for_comms(mesh.size() > 1)


def _shared_experts(model):
    return [m for m in model.modules() if isinstance(m, Experts) and m.ep.group is not None]


def _check_dimensions(mesh, cp, tp):
    """cp and tp are None for a model that cannot take them."""
    sizes, own = _sizes(mesh), tp is not None
    known = {"dp": True, "cp": cp is not None, "tp": own}
    for name, size in sizes.items():
        if size > 1 and not known.get(name):
            raise NotImplementedError(f"distributed.{name}_size={size} is not supported for this model; only 1 is")
    for name, of in (("cp", cp), ("tp", tp)):
        ranks = 1 if of is None else of.ranks
        if ranks != sizes.get(name, 1):
            raise ValueError(
                f"parallelize_qwen3_5: the model was loaded over {ranks} ranks of {name}, the mesh has {sizes}"
            )
        if ranks > 1:
            _check_group(name, of.group, mesh[name])


def _check_experts(model, mesh, moe_mesh):
    sizes = {} if moe_mesh is None else _sizes(moe_mesh)
    if moe_mesh is not None and tuple(sizes) != ("ep_shard", "ep"):
        raise ValueError(f"parallelize_qwen3_5: moe_mesh has dimensions {tuple(sizes)}, ('ep_shard', 'ep') is needed")
    ep = sizes.get("ep", 1)
    if not isinstance(model, Qwen3_5):
        if ep > 1:
            raise NotImplementedError(f"distributed.ep_size={ep} is not supported for this model; only 1 is")
        return
    if ep != model.ep.ranks:
        raise ValueError(
            f"parallelize_qwen3_5: the model was loaded over {model.ep.ranks} ranks of ep_group, moe_mesh has {sizes}"
        )
    if ep == 1:
        return
    ranks, theirs = (m.mesh.flatten().tolist() for m in (mesh, moe_mesh))
    if ranks != theirs:
        raise ValueError(f"parallelize_qwen3_5: moe_mesh is over ranks {theirs}, mesh over {ranks}")
    _check_group("ep", model.ep.group, moe_mesh["ep"])
    for experts in _shared_experts(model):
        for name, weight in experts.named_parameters():
            if weight.shape[1] % sizes["ep_shard"]:
                raise ValueError(
                    f"parallelize_qwen3_5: dim 1 of experts.{name} is {weight.shape[1]}, no multiple of the"
                    f" {sizes['ep_shard']} ranks of ep_shard (all ranks over distributed.ep_size)"
                )


def _check_group(name, group, mesh):
    """That the model's group is this rank's row of the mesh: elsewhere its part of the weights would be another's."""
    ours, theirs = dist.get_process_group_ranks(group), mesh.mesh.tolist()
    if ours != theirs:
        raise ValueError(f"parallelize_qwen3_5: {name} of the mesh has ranks {theirs}, the model's group has {ours}")


def _sizes(mesh):
    if mesh.mesh_dim_names is None:
        raise ValueError(f"parallelize_qwen3_5: the dimensions of {mesh} have no names: mesh_dim_names is missing")
    return dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))


def _flat(mesh, *names):
    """One dimension over the ranks of those of the dimensions that have more than one, "dp" in any case."""
    sizes = _sizes(mesh)
    names = tuple(name for name in names if name == "dp" or sizes.get(name, 1) > 1)
    return mesh["dp"] if len(names) == 1 else mesh[names]._flatten("_".join(("dp_shard", *names[1:])))


def fsdp_units(model):
    """The modules that are gathered and reduced as one, inner ones first."""
    visual, language = model.model.visual, model.model.language_model
    towers = [] if visual is None else [*visual.blocks, visual]
    heads = [head for head in (getattr(model, "mtp", None), model) if head is not None]
    return [*towers, *language.layers, *heads]
