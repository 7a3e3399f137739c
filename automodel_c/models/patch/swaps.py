"""Which forward replaces which, one function a class of transformers; each fills a Report."""

import torch
from torch import nn

from automodel_c import build_info

from . import experts, gated_delta_net, layers, loss, text, tower

_HEAD_DIMS = (16, 32, 64, 72, 80, 128, 256)
_FAMILIES = ("transformers.models.qwen3_5.", "transformers.models.qwen3_5_moe.")


def family_name(module):
    """The name of a module's class in transformers, without the family; "" for other modules."""
    for cls in type(module).__mro__:
        if cls.__module__.startswith(_FAMILIES):
            return cls.__name__.removeprefix("Qwen3_5").removeprefix("Moe")
    return ""


def left_between_ranks(report):
    """What transformers' code would do with a rank's rows alone where it needs the other ranks', of `report.left`."""
    mixers = ("documents of a pack", "gated delta rule, convolution", "loss")
    text = [("attention", "self_attn"), *((what, "") for what in mixers)]
    return [left for left in report.left if any(left.what == w and left.path.endswith(end) for w, end in text)]


def _cannot(module):
    if "forward" in vars(module):
        return "its forward is replaced already"
    there = {p.device.type for p in module.parameters(recurse=False)} - {"cpu", "meta"}
    if there - {"cuda"}:
        return f"{(there - {'cuda'}).pop()} has no kernel, the CPU and CUDA have"
    if there and not build_info()["cuda"]:
        return "built without CUDA"
    odd = [p.dtype for p in module.parameters(recurse=False) if p.dtype not in (torch.float32, torch.bfloat16)]
    return f"{odd[0]} has no kernel, float32 and bfloat16 have" if odd else None


def _swap(report, path, module, what, by, function, *, unless=None):
    """Binds `function` and reports it, or reports why not; `unless` is a reason of the caller's."""
    why = unless or _cannot(module)
    if why:
        report.leave(path, what, why)
    else:
        report.bind(module, function)
        report.swap(path, what, by)
    return not why


def _rms_norm(report, path, module):
    _swap(report, path, module, "RMSNorm", "ops.rms_norm", layers.rms_norm)


def _gated_rms_norm(report, path, module):
    act = getattr(module, "activation", "silu")
    why = None if act in ("silu", "swish") else f"its gate is {act!r}, not silu"
    _swap(report, path, module, "gated RMSNorm", "ops.gated_rms_norm", layers.gated_rms_norm, unless=why)


def _mlp(report, path, module):
    act = module.config.hidden_act
    why = None if act in ("silu", "swish") else f"hidden_act is {act!r}, not silu"
    _swap(report, path, module, "SwiGLU", "ops.swiglu", layers.mlp, unless=why)


def _sparse_moe(report, path, module):
    parts = (module, module.gate, module.experts)
    why = next(filter(None, map(_cannot, parts)), None) or experts.misfit(module)
    name = f"{path}.experts".lstrip(".")
    if why:
        report.leave(name, "routed experts", why)
        return
    report.bind(module, experts.sparse_moe)
    report.swap(name, "routed experts", "ops.moe")
    report.swap(path, "shared expert's gate", "ops.add_shared_expert")


def _decoder_layer(report, path, module):
    """Layers with experts that are swapped tell them the padding."""
    if family_name(module.mlp) != "SparseMoeBlock" or any(map(_cannot, (module.mlp.gate, module.mlp.experts))):
        return
    if _cannot(module.mlp) or experts.misfit(module.mlp):
        return
    why = _cannot(module)
    if why:
        report.leave(path, "padding of the routed experts", why)
    else:
        report.bind(module, experts.decoder_layer)


def _text_model(report, path, module):
    """The text model hands its layers the documents; all of its attention is swapped, or none."""
    why = _cannot(module)
    if why:
        report.leave(path, "documents of a pack", why)
        return
    report.bind(module, text.text_model)
    report.swap(path, "documents of a pack", "Pack" if report.cp is None else "ContextParallel.plan")
    full = [(f"{path}.layers.{i}.self_attn".lstrip("."), m.self_attn) for i, m in _layers(module, "self_attn")]
    why = _attention_misfit(module.config, [m for _, m in full])
    _, no_rope = text.rope_settings(module.config)
    for name, attention in full:
        if _swap(report, name, attention, "attention", f"{_mixer(report)}.attention", text.attention, unless=why):
            report.swap(name, "sigmoid gate", "ops.sigmoid_gate")
            _report_rope(report, name, "mRoPE", "ops.mrope", no_rope)
    for i, layer in _layers(module, "linear_attn"):
        _gated_delta_net(report, f"{path}.layers.{i}.linear_attn".lstrip("."), layer.linear_attn)


def _layers(module, name):
    return [(i, layer) for i, layer in enumerate(module.layers) if hasattr(layer, name)]


def _attention_misfit(config, modules):
    if config.head_dim not in _HEAD_DIMS:
        return f"head dim {config.head_dim} has no kernel, {', '.join(map(str, _HEAD_DIMS))} have"
    if config.attention_dropout:
        return f"attention_dropout is {config.attention_dropout}"
    return next(filter(None, map(_cannot, modules)), None)


def _report_rope(report, path, what, by, why):
    if why:
        report.leave(path, what, why)
    else:
        report.swap(path, what, by)


def _gated_delta_net(report, path, module):
    why = _cannot(module) or _cannot(module.conv1d)
    misfit = why or gated_delta_net.misfit(module)
    if misfit:
        if not why:
            report.bind(module, gated_delta_net.left)
        report.leave(path, "gated delta rule, convolution", misfit)
        return
    report.bind(module, gated_delta_net.gated_delta_net)
    report.swap(path, "causal convolution", f"{_mixer(report)}.causal_conv1d")
    report.swap(path, "decay and write gates", "ops.gdn_gate")
    report.swap(path, "gated delta rule", f"{_mixer(report)}.gated_delta_rule")
    why = "a cache is filled and read by transformers' code, whose versions lay it out"
    report.leave(path, "generation", why if report.cp is None else "ranks that share a batch have no cache")


def _mixer(report):
    return "ops" if report.cp is None else "parallel"


def _tower(report, path, module):
    blocks = [(f"{path}.blocks.{i}".lstrip("."), block) for i, block in enumerate(module.blocks)]
    head_dim = module.config.hidden_size // module.config.num_heads
    why = None if head_dim in _HEAD_DIMS else f"head dim {head_dim} has no kernel"
    why = why or next(filter(None, (_cannot(m) for m in (module, *(b.attn for _, b in blocks)))), None)
    if not why:
        report.bind(module, tower.vision_model)
    if report.cp is not None:
        report.leave(path, "frames", f"each of the {report.cp.ranks} ranks runs all of them")
    _, no_rope = tower.rope_theta(module)
    for name, block in blocks:
        if _swap(report, f"{name}.attn", block.attn, "attention", "ops.attention", tower.vision_attention, unless=why):
            _report_rope(report, f"{name}.attn", "axial RoPE", "ops.vision_rope", no_rope)
    for name, child in module.named_modules():
        _tower_part(report, f"{path}.{name}".lstrip("."), child)


def _tower_part(report, path, module):
    if type(module) is nn.LayerNorm:
        why = None if module.elementwise_affine and module.bias is not None else "it has no weight or no bias"
        _swap(report, path, module, "LayerNorm", "ops.layer_norm", layers.layer_norm, unless=why)
    elif path.endswith(".act_fn"):
        tanh = type(module).__name__ in ("GELUTanh", "PytorchGELUTanh") or getattr(module, "approximate", "") == "tanh"
        erf = type(module).__name__ in ("GELU", "GELUActivation") and not tanh
        why = None if tanh or erf else f"{type(module).__name__} has no operator"
        by = "ops.gelu, tanh" if tanh else "ops.gelu"
        _swap(report, path, module, "GELU", by, layers.gelu_tanh if tanh else layers.gelu, unless=why)


def _inner_model(report, path, module):
    if not _cannot(module):
        report.bind(module, loss.inner_model)


def _whole_model(report, path, module):
    """The model with its head: labels become a loss without logits where the head and the loss are the usual ones."""
    why = _cannot(module)
    if why:
        report.leave(path, "loss", why)
        return
    report.bind(module, loss.causal_lm)
    name = f"{path}.lm_head".lstrip(".")
    head = module.lm_head
    if not isinstance(head, nn.Linear) or head.bias is not None:
        why = f"the head is a {type(head).__name__}, a Linear without bias is needed"
    elif module.loss_function.__name__ != "ForCausalLMLoss":
        why = f"loss_function is {module.loss_function.__name__}"
    _swap(report, name, head, "loss", "ops.linear_cross_entropy", loss.head, unless=why)


SWAPS = {
    "RMSNorm": _rms_norm,
    "RMSNormGated": _gated_rms_norm,
    "MLP": _mlp,
    "SparseMoeBlock": _sparse_moe,
    "DecoderLayer": _decoder_layer,
    "TextModel": _text_model,
    "VisionModel": _tower,
    "Model": _inner_model,
    "ForConditionalGeneration": _whole_model,
    "ForCausalLM": _whole_model,
}
