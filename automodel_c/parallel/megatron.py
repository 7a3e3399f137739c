"""Megatron-FSDP in FSDP2's place: the package megatron-fsdp, from 0.5 on, keeps the weights, gradients and optimizer
state of a unit in flat buffers, of which each rank has an equal piece, cut where rows end.

Between steps the parameters of a model are DTensors, float32 and uneven: what the optimizer steps and checkpoints hold.
From the first forward of a step until its gradients are finished they are the weights that modules compute with, whose
memory comes and goes. A step is

    set_grad_reduction(model, ..); loss.backward()      of every microbatch
    finish_gradients(model)                             then clip
    optimizer.step()                                    of an optimizer that `follow` was told of

Its ways to hold a model are named as there: "optim_grads_params" frees weights outside of their unit and reduces in
every backward, "optim_grads" keeps them whole, "optim" keeps gradients whole as well and reduces in the last backward.
"""

import importlib
import importlib.metadata
import re
import warnings

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from . import uneven

LEAST = (0, 5)
_HELD = "_amcore_megatron"


def require(device_type):
    """The package. NotImplementedError says what is missing: a GPU, the package, or a release of it."""
    strategy = "distributed.strategy=megatron_fsdp"
    if device_type != "cuda":
        raise NotImplementedError(
            f"{strategy} trains on GPUs alone, found device {device_type!r}: megatron-fsdp gathers and reduces on CUDA"
            " streams of its own; distributed.strategy=fsdp2 trains on the CPU as well"
        )
    needed = ".".join(map(str, LEAST))
    install = f"pip install 'megatron-fsdp>={needed}'"
    try:
        found = importlib.metadata.version("megatron-fsdp")
    except importlib.metadata.PackageNotFoundError:
        raise NotImplementedError(f"{strategy} needs the package megatron-fsdp, which is not here: {install}") from None
    if tuple(map(int, re.findall(r"\d+", found)[:2])) < LEAST:
        raise NotImplementedError(f"{strategy} needs megatron-fsdp {needed} or later, found {found}: {install}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it does without Transformer Engine and Apex
        return importlib.import_module("megatron_fsdp")


def zero_strategy(per_microbatch, reshard_after_forward):
    """The package's name for when gradients are reduced (bool) and whether weights are freed (bool, None: where they
    can be). ValueError where it has no such way."""
    if per_microbatch:
        return "optim_grads" if reshard_after_forward is False else "optim_grads_params"
    if reshard_after_forward:
        raise ValueError(
            "distributed.strategy=megatron_fsdp frees weights after forward only where it reduces in every microbatch:"
            " distributed.reshard_after_forward=true needs distributed.defer_fsdp_grad_sync=false"
        )
    return "optim"


def flat_mesh(mesh):
    """A mesh of "dp_cp", the ranks over which weights are cut, and "tp", of a mesh of "dp" and perhaps "cp", "tp"."""
    tp = dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True)).get("tp", 1)
    return DeviceMesh(mesh.device_type, mesh.mesh.reshape(-1, tp), mesh_dim_names=("dp_cp", "tp"))


def of(model):
    """The `Shards` of a model, None where it is not sharded so."""
    return vars(model).get(_HELD)


def shard(model, mesh, *, device, units, zero, reduce_dtype=torch.float32, split=None, experts=False, package=None):
    """Shards a model in place and returns its `Shards`.

    mesh: of `flat_mesh`. device: of this rank. units: classes of modules that are gathered and reduced as one. zero: of
    `zero_strategy`. reduce_dtype: in which gradients travel; they are added up in float32. split: {name of a parameter:
    the axis that the ranks of "tp" split}; the parameter is this rank's part, a plain tensor. Gradients of the others
    are parts that sum over "tp". experts: whether there are parameters of experts, which the package cuts by a mesh of
    their own. package: the package, None for the one that `require` finds. Weights on the meta device come without
    values: write to the parameters, then `Shards.install`.
    """
    package = package or require(mesh.device_type)
    for name, axis in (split or {}).items():
        model.get_parameter(name)._tensor_parallel_mode = ("column", "row")[axis]
    parameters = list(model.parameters())
    masters = any(p.requires_grad and p.dtype != torch.float32 for p in parameters)
    policy = package.MixedPrecisionPolicy(
        main_params_dtype=torch.float32 if masters else None,
        main_grads_dtype=torch.float32,
        grad_comm_dtype=None if reduce_dtype == torch.float32 else reduce_dtype,
    )
    meta = parameters[0].is_meta
    with _nothing_is_drawn(model if meta else None):
        wrapper = package.fully_shard_model(
            module=model,
            device_mesh=mesh,
            dp_shard_dim="dp_cp",
            tp_dim="tp",
            expt_device_mesh=mesh if experts else None,
            fsdp_unit_modules=list(units),
            zero_dp_strategy=zero,
            device=device,
            init_model_with_meta_device=meta,
            mixed_precision_policy=policy,
            sync_model_each_microbatch=False,
            calculate_per_token_loss=True,  # sums, not means
            preproc_state_dict_for_dcp_ckpt=False,
        )
    shards = Shards(model, wrapper, mesh, split or {})
    model.__dict__[_HELD] = shards  # not as a module: the wrapper holds the model
    return shards


class _nothing_is_drawn:
    """Around the package's way to give a model on the meta device memory, which asks every module to fill itself."""

    def __init__(self, model):
        self.modules = [] if model is None else [m for m in model.modules() if m._parameters]

    def __enter__(self):
        for module in self.modules:
            module.__dict__["reset_parameters"] = lambda: None

    def __exit__(self, *raised):
        for module in self.modules:
            del module.__dict__["reset_parameters"]


class Shards:
    """What `shard` made of a model."""

    def __init__(self, model, wrapper, mesh, split):
        offsets_of = importlib.import_module("megatron_fsdp.uneven_dtensor").gather_and_compute_chunk_metadata
        self.model, self.wrapper = model, wrapper
        self.tp = mesh["tp"].get_group() if mesh["tp"].size() > 1 else None
        self.split, self.zero = split, wrapper.data_parallel_sharding_strategy
        groups = wrapper.param_and_grad_buffer.parameter_groups
        self.loose = [p for group in groups if group.fsdp_unit_id is None for p in group.params]
        self.places = {}
        for name, p in model.named_parameters():
            self.places[name] = tuple(offsets_of(p).offsets)
            uneven.place(p, self.places[name])
        model.register_state_dict_pre_hook(lambda *_: self.rest())
        model.register_state_dict_post_hook(lambda *told: self._place(*told))
        model.register_forward_pre_hook(lambda *_: self.begin(), prepend=True)

    def begin(self):
        """Before a forward: modules get the weights that they compute with, and those that belong to no unit are
        gathered, for the module that holds one need not be the one that uses it."""
        self.wrapper._replace_param_with_raw_if_needed()
        self.wrapper.all_gather_and_wait_parameters_ready(self.loose, prefetch=False)

    def rest(self):
        """Parameters are the optimizer's DTensors again."""
        if not self.wrapper.is_param_fsdp_distributed:
            self.wrapper.synchronize_param_gather()

    def reduce(self, now):
        """Whether the next backward is to reduce: of "optim" the last of a step alone; the others reduce in any."""
        self.wrapper.is_last_microbatch = now

    @torch.no_grad()
    def finish(self):
        """After the last backward of a step: gradients are on the parameters, summed over all ranks."""
        self.wrapper.finish_grad_sync()
        for name, p in self.model.named_parameters():
            if not p.requires_grad:
                continue
            if p.grad is None:  # a rank without rows: the optimizer counts its steps as the others do
                p.grad = torch.zeros_like(p)
            elif self.tp is not None and name not in self.split:
                dist.all_reduce(p.grad.to_local(), group=self.tp)

    def follow(self, optimizer):
        """After every step of `optimizer` modules compute with what it made, and there are no gradients."""
        optimizer.register_step_post_hook(lambda *_: self.install())

    @torch.no_grad()
    def install(self):
        """Modules compute with what the parameters are now, and gradients are gone."""
        self.wrapper.install_optimized_model_weights()
        self.wrapper.zero_grad_buffer()

    @torch.no_grad()
    def fill(self, weights, first):
        """Parameters from {name: tensor}, which begins at first[name] (offsets; absent: 0) of the whole weight."""
        for name, p in self.model.named_parameters():
            if name not in weights:
                continue
            local, offsets = p.to_local(), self.places[name]
            starts = [o - f for o, f in zip(offsets, first.get(name, [0] * p.ndim), strict=True)]
            local.copy_(weights[name][tuple(slice(o, o + n) for o, n in zip(starts, local.shape, strict=True))])
        self.install()

    def _place(self, _model, state, prefix, _metadata):
        for name, offsets in self.places.items():
            if prefix + name in state:
                uneven.place(state[prefix + name], offsets)


def rest(model):
    """Parameters are what the optimizer steps, as before a forward: nothing but for a model that `shard` sharded."""
    if (shards := of(model)) is not None:
        shards.rest()


def place_states(model, states):
    """Notes where shards of {parameter: {name: tensor}}, an optimizer's states, lie, as `rest`."""
    for name, offsets in of(model).places.items() if of(model) is not None else ():
        for tensor in states.get(name, {}).values():
            if isinstance(tensor, DTensor):
                uneven.place(tensor, offsets)


def finish_gradients(model):
    """After the last backward of a step and before clipping: nothing but for a model that `shard` sharded."""
    if (shards := of(model)) is not None:
        shards.finish()


def follow(model, optimizer):
    """Tells an optimizer of the parameters of a model what to do after a step: nothing but for one that `shard`
    sharded."""
    if (shards := of(model)) is not None:
        shards.follow(optimizer)
