"""Reads a recipe: YAML and `key=value` overrides into the dataclasses of schema.py, or an error that names the key."""

import dataclasses
import math
import types
import typing
from pathlib import Path

import yaml

from ..keys import check_known
from .schema import Recipe
from .targets import wrong_targets

# besides its own error, yaml lets through those of bytes, dates and numbers that are none, and of deep nesting
_NOT_YAML = (yaml.YAMLError, ValueError, RecursionError)
_BACKENDS = ("gloo", "nccl", "cpu:gloo,cuda:nccl")
_OPERATORS = ("automodel_c", "patched", "transformers")
_FRAMES = "distributed.multimodal.vision.frame_sharding"
_MEDIA = ("image_pixels", "clip_frames", "clip_pixels")
_MAY_BE_INFINITE = "clip_grad_norm.max_norm"
_LEAST = {
    **dict.fromkeys(
        (
            "step_scheduler.global_batch_size",
            "step_scheduler.local_batch_size",
            "step_scheduler.num_epochs",
            "step_scheduler.max_steps",
            "step_scheduler.ckpt_every_steps",
            "step_scheduler.val_every_steps",
            "step_scheduler.gc_every_steps",
            "checkpoint.max_recent_checkpoints",
            "distributed.dp_size",
            "distributed.cp_size",
            "distributed.tp_size",
            "distributed.pp_size",
            "pipeline.stages_per_rank",
            "distributed.ep_size",
            "lr_scheduler.lr_decay_steps",
            "lr_scheduler.wd_incr_steps",
            "lr_scheduler.wsd_decay_steps",
            "dataset.limit",
            "validation_dataset.limit",
            *(f"{data}.max_{what}" for data in ("dataset", "validation_dataset") for what in _MEDIA),
            "processor.min_pixels",
            "processor.max_pixels",
            "processor.video_processor.size.shortest_edge",
            "processor.video_processor.size.longest_edge",
            "processor.video_processor.min_frames",
            "processor.video_processor.max_frames",
        ),
        1,
    ),
    **dict.fromkeys(
        (
            "seed",
            "rng.seed",
            "optimizer.lr",
            "optimizer.eps",
            "optimizer.weight_decay",
            "lr_scheduler.lr_warmup_steps",
            "lr_scheduler.init_lr",
            "lr_scheduler.max_lr",
            "lr_scheduler.min_lr",
            "lr_scheduler.start_wd",
            "lr_scheduler.end_wd",
            "clip_grad_norm.max_norm",
            "dataloader.num_workers",
        ),
        0,
    ),
    "dist_env.timeout_minutes": 0.001,
    "processor.video_processor.fps": 0.001,
}


class RecipeError(ValueError):
    """The recipe says something that cannot be right; the message names the key."""


def load_recipe(path, overrides=()):
    """Reads the recipe at `path`.

    path: a YAML file. overrides: strings `dotted.key=value`, values parsed as YAML.
    Returns a schema.Recipe with output_dir filled in and the grad-sync keys agreed.
    Raises RecipeError for an unknown key (naming the nearest known one), a value of the wrong type or keys
    that disagree, and NotImplementedError for a known key whose value is not carried out. Of several that cannot be
    read each alone, all are named.
    """
    path = Path(path)
    tree = _read_yaml(path)
    for override in overrides:
        _apply_override(tree, override)
    wrong = []
    recipe = _fill(Recipe, tree, "", wrong)
    if recipe.output_dir is None:
        recipe.output_dir = str(Path("runs") / path.stem)
    wrong += wrong_targets(recipe, RecipeError)
    _raise(wrong)
    _agree(recipe)
    return recipe


def _raise(wrong):
    """Raises the one exception of `wrong`, or one that says them all."""
    if len(wrong) == 1:
        raise wrong[0]
    if wrong:
        kind = NotImplementedError if all(isinstance(e, NotImplementedError) for e in wrong) else RecipeError
        raise kind("\n  ".join([f"{len(wrong)} keys:", *map(str, wrong)]))


def _read_yaml(path):
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(f"recipe {path}: {error.strerror}") from None
    except _NOT_YAML as error:
        raise RecipeError(f"recipe {path} is not YAML: {error}") from None
    if not isinstance(tree, dict):
        raise RecipeError(f"recipe {path}: expected a mapping of keys, found {type(tree).__name__}")
    return tree


def _apply_override(tree, override):
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise RecipeError(f"override {override!r}: expected key=value")
    try:
        value = yaml.safe_load(text)
    except _NOT_YAML:
        raise RecipeError(f"override {override!r}: the value is not YAML") from None
    *parents, last = key.split(".")
    node = tree
    for parent in parents:
        if not isinstance(node.get(parent), dict):
            node[parent] = {}
        node = node[parent]
    node[last] = value


def _fill(cls, tree, where, wrong):
    """A `cls` from a mapping; `where` is the dotted prefix for messages. What is wrong with a key goes to `wrong`."""
    if not isinstance(tree, dict):
        raise RecipeError(f"{where.rstrip('.')}: expected a mapping of keys, found {tree!r}")
    fields = {f.name: f for f in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    values = {}
    for key, value in tree.items():
        try:
            check_known(str(key), fields, where, RecipeError)
            value = _convert(value, hints[key], where + key, wrong)
            _check_carried_out(value, fields[key], where + key)
        except (RecipeError, NotImplementedError) as error:
            wrong.append(error)
        else:
            values[key] = value
    return cls(**values)


def _check_carried_out(value, field, where):
    accepted = field.metadata.get("accepted")
    if accepted is not None and value not in accepted:
        shown = " or ".join(repr(a) for a in accepted)
        instead = {None: "null", False: "false", True: "true"}.get(accepted[0], accepted[0])
        raise NotImplementedError(
            f"{where}={value!r} is not supported yet; only {shown} is: leave the key out, or say {where}={instead}"
        )


def _convert(value, hint, where, wrong):
    """`value` as the annotation `hint` wants it, or RecipeError."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if hint is typing.Any or (value is None and type(None) in options):
        return value
    if value == "none" and type(None) in options and str not in options:
        return None  # as recipes of NeMo Automodel write it
    for option in options:
        if dataclasses.is_dataclass(option):
            return _fill(option, {} if value is None else value, where + ".", wrong)
    for option in options:
        found, converted = _convert_plain(value, option)
        if found:
            return converted
    expected = " or ".join(getattr(o, "__name__", str(o)) for o in options if o is not type(None))
    raise RecipeError(f"{where}: expected {expected}, found {value!r}")


def _convert_plain(value, option):
    origin = typing.get_origin(option)
    if origin is list:
        (item,) = typing.get_args(option)
        pairs = [_convert_plain(v, item) for v in value] if isinstance(value, (list, tuple)) else [(False, None)]
        return all(ok for ok, _ in pairs), [v for _, v in pairs]
    if option is float and not isinstance(value, bool):
        try:  # YAML reads 1e-3 as a string
            return True, float(value)
        except (TypeError, ValueError):
            return False, None
    if option is int and isinstance(value, bool):
        return False, None
    return isinstance(option, type) and isinstance(value, option), value


def _agree(recipe):
    """Settles keys that say one thing twice; RecipeError where they contradict."""
    from automodel_c.parallel import grad_reduction_from_config

    given = recipe.distributed.defer_fsdp_grad_sync, recipe.pipeline.reduce_grad_per_microbatch
    if recipe.distributed.strategy == "megatron_fsdp" and given == (None, None):
        given = None, True  # the other way holds weights and gradients whole
    try:
        per_microbatch = grad_reduction_from_config(*given)
    except ValueError as error:
        raise RecipeError(str(error)) from None
    recipe.distributed.defer_fsdp_grad_sync = not per_microbatch
    recipe.pipeline.reduce_grad_per_microbatch = per_microbatch
    if recipe.packed_sequence.enabled is None:
        recipe.packed_sequence.enabled = bool(recipe.packed_sequence.pack_size)
    if recipe.rng.seed is None:
        recipe.rng.seed = recipe.seed
    _check_ranges(recipe)


def _check_ranges(recipe):
    for key, least in _LEAST.items():
        value = recipe
        for part in key.split("."):
            value = getattr(value, part, None)  # there may be no validation_dataset
        if value is None:
            continue
        if not value >= least:
            raise RecipeError(f"{key}: expected at least {least}, found {value}")
        if value == math.inf and key != _MAY_BE_INFINITE:
            raise RecipeError(f"{key}: expected a finite number, found {value}")
    for key, seed in (("seed", recipe.seed), ("rng.seed", recipe.rng.seed)):
        if seed >= 2**32:
            raise RecipeError(f"{key}: expected less than {2**32}, found {seed}")
    _check_choices(recipe)


def _check_choices(recipe):
    if recipe.dist_env.backend not in (None, *_BACKENDS):
        raise RecipeError(
            f"dist_env.backend: expected {', '.join(_BACKENDS[:-1])} or {_BACKENDS[-1]},"
            f" found {recipe.dist_env.backend!r}"
        )
    if "" in (recipe.processor.words or ()):
        raise RecipeError("processor.words: a word is empty")
    _check_choice(recipe, "distributed.strategy", ("fsdp2", "megatron_fsdp"))
    _check_choice(recipe, "distributed.activation_checkpointing", (False, True, "full", "selective"))
    _check_choice(recipe, "distributed.activation_checkpointing_scope", (None, "all", "language", "vision"))
    if recipe.wandb is not None:
        _check_choice(recipe, "wandb.mode", (None, "online", "offline", "disabled"))
    if recipe.checkpoint.save_consolidated not in (False, "final"):
        raise NotImplementedError(
            f"checkpoint.save_consolidated={recipe.checkpoint.save_consolidated!r} is not supported yet;"
            " only false or 'final' is"
        )
    if recipe.model.operators not in _OPERATORS:
        raise RecipeError(
            f"model.operators: expected {', '.join(map(repr, _OPERATORS[:-1]))} or {_OPERATORS[-1]!r},"
            f" found {recipe.model.operators!r}"
        )
    _check_operators(recipe)
    _check_megatron(recipe)
    _check_tensor_parallel(recipe.distributed)
    _check_schedule(recipe.pipeline)
    _check_stages(recipe)
    _check_frame_sharding(recipe)
    if len(recipe.optimizer.betas) != 2:
        raise RecipeError(f"optimizer.betas: expected two numbers, found {recipe.optimizer.betas!r}")


def _check_choice(recipe, key, known):
    section, name = key.split(".")
    value = getattr(getattr(recipe, section), name)
    if value not in known:
        shown = ", ".join("false" if k is False else "true" if k is True else repr(k) for k in known if k is not None)
        raise RecipeError(f"{key}: expected one of {shown}, found {value!r}")


def _check_operators(recipe):
    frames = f"{_FRAMES}.enabled"
    ours = {
        f"distributed.cp_size={recipe.distributed.cp_size}": (recipe.distributed.cp_size or 1) > 1,
        f"distributed.ep_size={recipe.distributed.ep_size}": (recipe.distributed.ep_size or 1) > 1,
        f"distributed.tp_size={recipe.distributed.tp_size}": (recipe.distributed.tp_size or 1) > 1,
        f"distributed.pp_size={recipe.distributed.pp_size}": (recipe.distributed.pp_size or 1) > 1,
        frames: recipe.distributed.multimodal.vision.frame_sharding.enabled,
        "distributed.moe.fp32_weight_grads=true": recipe.distributed.moe.fp32_weight_grads,
    }
    packs = {
        "packed_sequence.enabled": recipe.packed_sequence.enabled,
        "loss_fn._target_": recipe.loss_fn._target_.endswith("FusedLinearCrossEntropy"),
    }
    for keys, operators in ((ours, _OPERATORS[:1]), (packs, _OPERATORS[:2])):
        for key, needs in keys.items():
            if needs and recipe.model.operators not in operators:
                raise RecipeError(f"{key} needs model.operators: {' or '.join(operators)}")


def _check_megatron(recipe):
    from automodel_c.parallel import megatron

    section = recipe.distributed
    if section.strategy != "megatron_fsdp":
        return
    strategy = "distributed.strategy=megatron_fsdp"
    if recipe.model.operators != _OPERATORS[0]:
        raise RecipeError(f"{strategy} needs model.operators: {_OPERATORS[0]}")
    for name in ("ep", "pp"):
        if (getattr(section, f"{name}_size") or 1) > 1:
            raise RecipeError(f"{strategy} needs distributed.{name}_size=1, found {getattr(section, f'{name}_size')}")
    if section.moe.fp32_weight_grads:
        raise RecipeError(f"{strategy} needs distributed.moe.fp32_weight_grads=false")
    try:
        megatron.zero_strategy(recipe.pipeline.reduce_grad_per_microbatch, section.reshard_after_forward)
    except ValueError as error:
        raise RecipeError(str(error)) from None


def _check_schedule(section):
    from automodel_c.parallel.pipeline_order import stages_per_rank

    try:
        stages_per_rank(section.pp_schedule, section.stages_per_rank)
    except ValueError as error:
        raise RecipeError(str(error)) from None


def _check_tensor_parallel(section):
    if section.enable_async_tensor_parallel and (section.tp_size or 1) == 1:
        raise RecipeError("distributed.enable_async_tensor_parallel needs distributed.tp_size above 1")
    if (section.tp_size or 1) > 1 and section.sequence_parallel is False:
        raise RecipeError(
            f"distributed.sequence_parallel=false with distributed.tp_size={section.tp_size}: rows are always divided"
            " between split weights, which sends as many bytes and holds fewer; leave it out or say true"
        )


def _check_stages(recipe):
    if recipe.freeze_config.freeze_language_model and (recipe.distributed.pp_size or 1) > 1:
        raise RecipeError(
            "freeze_config.freeze_language_model with distributed.pp_size: the later stages would have nothing to train"
        )


def _check_frame_sharding(recipe):
    from automodel_c.parallel.frame_plan import FrameSharding

    try:
        sharding = FrameSharding.from_mapping(frame_sharding(recipe.distributed))
    except (TypeError, ValueError) as error:
        raise RecipeError(f"{_FRAMES.removesuffix('frame_sharding')}{error}") from None
    if sharding.enabled and list(sharding.mesh_dims) != ["cp"] and not recipe.freeze_config.freeze_vision_tower:
        raise RecipeError(
            f"{_FRAMES}.mesh_dims={list(sharding.mesh_dims)} needs freeze_config.freeze_vision_tower: tensor-parallel"
            " ranks would count the gradients of a tower that trains twice"
        )


def frame_sharding(section):
    """The frame_sharding mapping of qwen3_5.load that a schema.Distributed section asks for."""
    found = dataclasses.asdict(section.multimodal.vision.frame_sharding)
    return {**found, "mesh_dims": ["cp"] if found["mesh_dims"] is None else found["mesh_dims"]}
