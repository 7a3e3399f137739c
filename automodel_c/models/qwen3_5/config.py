"""What a Qwen3.5 vision-language model is made of, read from config.json, a mapping or a transformers configuration."""

import dataclasses
import json
from pathlib import Path

import torch

FULL, LINEAR = "full_attention", "linear_attention"


@dataclasses.dataclass(frozen=True)
class TextConfig:
    """The decoder. Fields are keys of text_config; those of the experts are None in a dense model."""

    vocab_size: int = 248320
    hidden_size: int = 2048
    num_hidden_layers: int = 40
    layer_types: tuple = None
    num_attention_heads: int = 16
    num_key_value_heads: int = 2
    head_dim: int = 256
    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    intermediate_size: int = None
    num_experts: int = None
    num_experts_per_tok: int = None
    moe_intermediate_size: int = None
    shared_expert_intermediate_size: int = None
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.001
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    rotary_dim: int = 64
    rope_theta: float = 10000.0
    mrope_section: tuple = (11, 11, 10)
    mtp_num_hidden_layers: int = 0


@dataclasses.dataclass(frozen=True)
class VisionConfig:
    """The tower. Fields are keys of vision_config."""

    depth: int = 27
    hidden_size: int = 1152
    intermediate_size: int = 4304
    num_heads: int = 16
    in_channels: int = 3
    patch_size: int = 16
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    out_hidden_size: int = None
    num_position_embeddings: int = 2304
    initializer_range: float = 0.02
    rope_theta: float = 10000.0

    @property
    def patch_width(self):
        """Numbers in one row of pixel_values."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2


@dataclasses.dataclass(frozen=True)
class Config:
    """A whole model. `source` is the mapping it was read from: what is not used here is kept for `to_dict`."""

    text: TextConfig
    vision: VisionConfig
    image_token_id: int = 248056
    video_token_id: int = 248057
    vision_start_token_id: int = 248053
    vision_end_token_id: int = 248054
    tie_word_embeddings: bool = False  # the head is the embedding
    dtype: torch.dtype = None
    source: dict = dataclasses.field(default_factory=dict, repr=False, compare=False)

    @property
    def family(self):
        """ "qwen3_5_moe" or "qwen3_5"."""
        return "qwen3_5_moe" if self.text.num_experts else "qwen3_5"

    def to_dict(self):
        """The content of a config.json that transformers reads."""
        text, vision = dataclasses.asdict(self.text), dataclasses.asdict(self.vision)
        rope = {"rope_type": "default", "rope_theta": text.pop("rope_theta"), "mrope_interleaved": True}
        rope["partial_rotary_factor"] = text.pop("rotary_dim") / self.text.head_dim
        rope["mrope_section"] = list(text.pop("mrope_section"))
        text |= {"layer_types": list(self.text.layer_types), "rope_parameters": rope}
        vision["rope_parameters"] = {"rope_type": "axial", "rope_theta": vision.pop("rope_theta")}
        top = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name.endswith("_token_id")}
        name = "Qwen3_5Moe" if self.text.num_experts else "Qwen3_5"
        return {
            **self.source,
            **top,
            "architectures": [f"{name}ForConditionalGeneration"],
            "model_type": self.family,
            "tie_word_embeddings": self.tie_word_embeddings,
            "text_config": _joined(self.source.get("text_config"), text, f"{self.family}_text"),
            "vision_config": _joined(self.source.get("vision_config"), vision, f"{self.family}_vision"),
        }


def _joined(source, fields, model_type):
    kept = {k: v for k, v in (source or {}).items() if k not in _OLDER_ROPE}
    return {**kept, **{k: v for k, v in fields.items() if v is not None}, "model_type": model_type}


_OLDER_ROPE = ("rope_theta", "rope_scaling", "partial_rotary_factor")
_DENSE = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_key_value_heads": 4, "intermediate_size": 12288,
}  # fmt: skip
_EXPERTS = {
    "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}  # fmt: skip


def read_config(source):
    """The Config of a model directory, a mapping with text_config and vision_config, a transformers configuration
    (anything with to_dict()) or a Config.

    Keys that are absent have the value that transformers 5.24 gives them. ValueError: no such directory, a value or a
    combination that makes no model. NotImplementedError: one that this definition does not have.
    """
    if isinstance(source, Config):
        return source
    if isinstance(source, str | Path):
        path = Path(source)
        if not (path / "config.json").is_file():
            raise ValueError(f"load: {str(source)!r} is no directory with a config.json")
        source = json.loads((path / "config.json").read_text())
    elif hasattr(source, "to_dict"):
        source = source.to_dict()
    if not isinstance(source, dict):
        raise TypeError(f"load: expected a directory or a configuration, found {type(source).__name__}")
    for name in ("text_config", "vision_config"):
        if not isinstance(source.get(name), dict):
            raise ValueError(f"load: the configuration has no {name}: it is not one of a vision-language model")
    text = _read_text(source["text_config"], source.get("model_type", ""))
    vision = _read_vision(source["vision_config"], text.hidden_size)
    _refuse_unsupported(source)
    tokens = {k: v for k, v in source.items() if k.endswith("_token_id") and k in Config.__dataclass_fields__}
    tied = bool(source.get("tie_word_embeddings", source["text_config"].get("tie_word_embeddings")))
    return Config(text, vision, **tokens, tie_word_embeddings=tied, dtype=_dtype(source), source=source)


def _read_text(mapping, model_type):
    experts = "moe" in f"{model_type} {mapping.get('model_type', '')}" or bool(mapping.get("num_experts"))
    known = _known(TextConfig, mapping)
    known = {**(_EXPERTS if experts else _DENSE), **known}
    for key in ("intermediate_size",) if experts else _EXPERTS:
        known.pop(key, None)
    rope = {k: mapping[k] for k in ("rope_theta", "partial_rotary_factor") if mapping.get(k) is not None}
    rope |= mapping.get("rope_scaling") or {}
    rope |= mapping.get("rope_parameters") or {}
    if rope.get("rope_type", rope.get("type", "default")) not in ("default", "mrope"):
        raise NotImplementedError(f"load: rope_type {rope['rope_type']!r} is not supported; 'default' is")
    known["rope_theta"] = float(rope.get("rope_theta", 10000.0))
    known["rotary_dim"] = int(known.get("head_dim", 256) * rope.get("partial_rotary_factor", 0.25))
    known["mrope_section"] = tuple(rope.get("mrope_section") or (11, 11, 10))
    layers = known.get("num_hidden_layers", TextConfig.num_hidden_layers)
    interval = mapping.get("full_attention_interval", 4)
    types = known.get("layer_types") or [LINEAR if (i + 1) % interval else FULL for i in range(layers)]
    known["layer_types"] = tuple(types)
    _check_layers(known["layer_types"], layers)
    return TextConfig(**known)


def _check_layers(types, layers):
    if len(types) != layers:
        raise ValueError(f"load: layer_types names {len(types)} layers, num_hidden_layers is {layers}")
    for index, name in enumerate(types):
        if name not in (FULL, LINEAR):
            raise ValueError(f"load: layer_types[{index}] is {name!r}, {LINEAR!r} or {FULL!r} is needed")


def _read_vision(mapping, hidden_size):
    known = _known(VisionConfig, mapping)
    known["rope_theta"] = float((mapping.get("rope_parameters") or {}).get("rope_theta", 10000.0))
    for key in ("patch_size", "temporal_patch_size"):
        if isinstance(known.get(key), list | tuple):
            sizes = set(known[key])
            if len(sizes) != 1:
                raise NotImplementedError(f"load: vision_config.{key} is {known[key]}; one number is supported")
            known[key] = sizes.pop()
    known.setdefault("out_hidden_size", hidden_size)
    if known["out_hidden_size"] != hidden_size:
        raise ValueError(
            f"load: vision_config.out_hidden_size is {known['out_hidden_size']}, text_config.hidden_size {hidden_size}"
        )
    return VisionConfig(**known)


def _known(cls, mapping):
    return {k: mapping[k] for k in cls.__dataclass_fields__ if mapping.get(k) is not None}


def _refuse_unsupported(source):
    text, vision = source["text_config"], source["vision_config"]
    supported = [
        ("text_config.hidden_act", text.get("hidden_act", "silu"), "silu"),
        ("text_config.attention_bias", bool(text.get("attention_bias")), False),
        ("text_config.attention_dropout", text.get("attention_dropout") or 0, 0),
        ("vision_config.hidden_act", vision.get("hidden_act", "gelu_pytorch_tanh"), "gelu_pytorch_tanh"),
        ("vision_config.deepstack_visual_indexes", list(vision.get("deepstack_visual_indexes") or []), []),
    ]
    for name, value, only in supported:
        if value != only:
            raise NotImplementedError(f"load: {name} is {value!r}; {only!r} is supported")


def _dtype(source):
    """The dtype that a configuration names, or None."""
    text = source["text_config"]
    name = next((m[k] for m in (source, text) for k in ("dtype", "torch_dtype") if m.get(k)), None)
    dtype = getattr(torch, str(name).removeprefix("torch."), None) if name else None
    return dtype if isinstance(dtype, torch.dtype) else None


def _published(hidden, layers, heads, key_heads, value_heads, vision=None, tied=False, **mlp):
    """The mapping of a published model: what differs between them, and what all share."""
    return {
        "model_type": "qwen3_5_moe" if "num_experts" in mlp else "qwen3_5",
        "dtype": "bfloat16",
        "text_config": {
            "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": key_heads, "linear_num_value_heads": value_heads, "max_position_embeddings": 262144,
            "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]},
            "mtp_num_hidden_layers": 1, **mlp,
        },
        "vision_config": {"out_hidden_size": hidden, **(vision or {})},
        "tie_word_embeddings": tied,
    }  # fmt: skip


_SMALL_TOWER = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096}


def _experts(width):
    return {
        "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": width,
        "shared_expert_intermediate_size": width,
    }  # fmt: skip


CONFIGS = {
    "4B": _published(2560, 32, 16, 4, 32, _SMALL_TOWER, tied=True, intermediate_size=9216),
    "27B": _published(5120, 64, 24, 4, 48, intermediate_size=17408),
    "35B-A3B": _published(2048, 40, 16, 2, 32, **_experts(512)),
    "122B-A10B": _published(3072, 48, 32, 2, 64, **_experts(1024)),
}
