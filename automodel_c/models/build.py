"""A Qwen3.5 vision-language model, ours or transformers', and its processor, from configuration or from a directory."""

import dataclasses
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForImageTextToText

from ..keys import check_known
from . import qwen3_5
from .patch import patch_transformers
from .processor import build_processor, load_processor, special_token_ids

# keys that transformers takes besides the fields of its configuration classes
_EXTRA_KEYS = {
    "": {"model_type"},
    "text_config.": {"full_attention_interval", "partial_rotary_factor", "mtp_num_hidden_layers"},
}
_MTP_LAYOUT = "mtp_expert_hf_layout"  # a key of text_config that says how files name MTP's experts
_MTP_LAYOUTS = {
    **dict.fromkeys(("split", "per-expert", "per_expert", "per-expert-safetensors"), "split"),
    **dict.fromkeys(("grouped", "group"), "grouped"),
}
_CONFIGS_WITH_EXPERTS = ("qwen3_5_moe",)
_CONFIGS = ("qwen3_5", *_CONFIGS_WITH_EXPERTS)


def model_config(mapping, processor=None):
    """The transformers configuration that a mapping describes.

    mapping: keys of Qwen3_5MoeConfig (or Qwen3_5Config with model_type: qwen3_5), text_config and vision_config
    among them. processor: fills in the special ids and, where absent, the vocabulary size.
    ValueError for an unknown key (naming the nearest), or a vocabulary smaller than the tokenizer's.
    """
    mapping = {"model_type": "qwen3_5_moe", **mapping}
    if mapping["model_type"] not in _CONFIGS:
        raise ValueError(f"model.config.model_type: expected one of {_CONFIGS}, found {mapping['model_type']!r}")
    _check_keys(mapping)
    text, vision = dict(mapping.get("text_config") or {}), dict(mapping.get("vision_config") or {})
    vision.setdefault("out_hidden_size", text.get("hidden_size"))
    if processor is not None:
        needed = len(processor.tokenizer)
        text.setdefault("vocab_size", needed)
        if not isinstance(text["vocab_size"], int):
            raise ValueError(f"model.config.text_config.vocab_size: expected an int, found {text['vocab_size']!r}")
        if text["vocab_size"] < needed:
            raise ValueError(
                f"model.config.text_config.vocab_size={text['vocab_size']}: the tokenizer has {needed} tokens"
            )
        text.setdefault("pad_token_id", processor.pad_token_id)
        text.setdefault("eos_token_id", processor.eos_token_id)
        mapping = {**mapping, **special_token_ids(processor)}
    try:
        return AutoConfig.for_model(**{**mapping, "text_config": text, "vision_config": vision})
    except (StrictDataclassError, TypeError, ValueError) as error:  # of transformers, on a value
        raise ValueError(f"model.config: {' '.join(str(error).split())}") from error


def _check_keys(mapping):
    for name in ("text_config", "vision_config"):
        if not isinstance(mapping.get(name) or {}, dict):
            raise ValueError(f"model.config.{name}: expected a mapping, found {mapping[name]!r}")
    reference = AutoConfig.for_model(mapping["model_type"])
    sections = {"": (mapping, reference)}
    for name in ("text_config", "vision_config"):
        sections[f"{name}."] = (mapping.get(name) or {}, getattr(reference, name))
    for where, (keys, config) in sections.items():
        known = {f.name for f in dataclasses.fields(config)} | _EXTRA_KEYS.get(where, set())
        for key in keys:
            check_known(key, known, f"model.config.{where}")


def build_model(section, processor_section, how, processor_how, **parallel):
    """(model, Processor) for a recipe's `model` and `processor` sections (schema.Model, schema.Processor).

    how, processor_how: what their `_target_` means. section.operators: "automodel_c" is our own definition, "patched"
    transformers' on our operators, "transformers" transformers' as it comes. parallel: cp, frame_sharding, ep_group,
    tp, tp_plan and pp as qwen3_5.load takes them, for our own, which is on the meta device: `materialise` gives it its
    weights once it is sharded. transformers' is on the CPU. Either is fp32: what FSDP2 shards are the masters.
    ValueError where the ranks of ep_group do not divide the experts.
    """
    processor = processor_of(section, processor_section, how, processor_how)
    folder = None if how == "from_config" else _directory(section, "model")
    if folder is None:
        config = model_config(section.config, processor)
    else:
        config = directory_config(folder, section)
    if section.operators == "automodel_c":
        return own(folder, config, section, **parallel), processor
    model = _transformers(folder, config, section.attn_implementation)
    if section.operators == "patched":
        patch_transformers(model)
    return model, processor


def _check_experts(config, ep_group):
    ranks, experts = 1 if ep_group is None else ep_group.size(), getattr(config.text_config, "num_experts", None)
    if ranks > 1 and (not experts or experts % ranks):
        found = f"{experts} experts, no multiple of it" if experts else "no experts"
        raise ValueError(f"distributed.ep_size={ranks}: the model has {found}")


def own(folder, config, section, **options):
    """Our own definition on the meta device: of a directory, or None, and a configuration. section: schema.Model;
    options: of qwen3_5.load."""
    _check_experts(config, options.get("ep_group"))
    options |= {"dtype": torch.float32, "device": "meta"}
    model = qwen3_5.load(config, **options) if folder is None else qwen3_5.load(folder, config=config, **options)
    _set_mtp_layout(model, section)
    return model


def _set_mtp_layout(model, section):
    """Carries out model.text_config.mtp_expert_hf_layout: the keys that MTP's experts have in the files tell which
    they are, so that it says how an export names them; ValueError where it contradicts files."""
    wanted = (section.text_config or {}).get(_MTP_LAYOUT)
    if wanted is None:
        return
    if wanted not in _MTP_LAYOUTS:
        raise ValueError(f"model.text_config.{_MTP_LAYOUT}: expected one of {tuple(_MTP_LAYOUTS)}, found {wanted!r}")
    layout, found = _MTP_LAYOUTS[wanted], model.expert_layouts
    has_experts = model.mtp is not None and model.config.text.num_experts
    if model.folder is not None and has_experts and found["mtp"] != layout:
        raise ValueError(f"model.text_config.{_MTP_LAYOUT}={wanted!r}: the files of {model.folder} are {found['mtp']}")
    model.expert_layouts = {**found, "mtp": layout}


def materialise(model, device, *, weights=True):
    """Gives a model of `build_model` its weights on `device`, or memory alone, where it has none yet.

    Drawn from torch's generator: ranks that seed alike start alike. Read: each rank its own parts. See
    qwen3_5.materialise.
    """
    if isinstance(model, qwen3_5.Qwen3_5):
        qwen3_5.materialise(model, device, weights=weights)
    return model


def _transformers(folder, config, attn_implementation):
    options = {"dtype": torch.float32, "attn_implementation": attn_implementation}
    if folder is None:
        return AutoModelForImageTextToText.from_config(config, **options)
    options |= {"local_files_only": True, "use_safetensors": True, "trust_remote_code": False}
    return AutoModelForImageTextToText.from_pretrained(folder, config=config, **options)


def processor_of(section, processor_section, how, processor_how):
    bounds = {"min_pixels": processor_section.min_pixels, "max_pixels": processor_section.max_pixels}
    bounds["video"] = dataclasses.asdict(processor_section.video_processor)
    bounds["video"].pop("_target_")
    if how == "from_config" and not section.config:
        raise ValueError("model.config: expected a mapping, since model._target_ is from_config")
    if processor_how != "build":
        named = processor_section if processor_section.pretrained_model_name_or_path else section
        return load_processor(_directory(named, "processor" if named is processor_section else "model"), **bounds)
    if how != "from_config":
        raise ValueError("processor._target_: build_processor goes with a model from_config")
    vision = {"patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2}
    vision |= section.config.get("vision_config") or {}
    return build_processor(vision, words=processor_section.words, **bounds)


def directory_config(folder, section):
    """The configuration of a model directory, with the overrides of a schema.Model."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    for name in ("text_config", "vision_config"):
        _override(getattr(config, name), config_overrides(section, name), f"model.{name}.")
    return config


def config_overrides(section, name):
    """What a schema.Model's text_config or vision_config sets of the configuration."""
    return {key: value for key, value in (getattr(section, name) or {}).items() if key != _MTP_LAYOUT}


def _override(config, keys, where):
    for key, value in keys.items():
        check_known(key, {f.name for f in dataclasses.fields(config)}, where)
        setattr(config, key, value)


def _directory(section, where):
    folder = section.pretrained_model_name_or_path
    if not folder or not (Path(folder) / "tokenizer_config.json").exists():
        raise ValueError(f"{where}.pretrained_model_name_or_path={folder!r}: expected a local model directory")
    return folder


def as_dtype(name, where):
    """A torch dtype from its name, "bfloat16" or "torch.bfloat16"; ValueError names the key `where`."""
    dtype = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"{where}: expected a floating-point dtype, found {name!r}")
    return dtype


def freeze(model, section):
    """Takes the parts that a recipe's freeze_config (schema.FreezeConfig) names out of training."""
    base = model.model
    frozen = []
    if section.freeze_vision_tower:
        frozen.append(base.visual)
    if section.freeze_language_model:
        frozen += [base.language_model, model.lm_head, getattr(model, "mtp", None)]
    if section.freeze_embeddings:
        frozen.append(base.language_model.embed_tokens)
    for part in frozen:
        if part is not None:  # a stage of a pipeline may not have it
            part.requires_grad_(False)
