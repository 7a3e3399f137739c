"""Configurations: read as transformers reads them, written as it does, and published sizes on no memory."""

import copy

import pytest
import torch
from transformers import AutoConfig

from automodel_c.models import qwen3_5
from tests.models import packs
from tests.patch import models

BILLIONS = {  # of published sizes; the decoder's experts, its other parts, the head of multi-token prediction
    "4B": {"embed": 0.6357, "mlp": 2.265, "self_attn": 0.2936, "mtp": 0.1207, "total": 4.66},
    "27B": {"embed": 2.543, "mlp": 17.11, "linear_attn": 5.562, "self_attn": 1.678, "mtp": 0.4247, "total": 27.78},
    "35B-A3B": {"embed": 1.017, "experts": 32.21, "linear_attn": 1.012, "mtp": 0.8446, "total": 35.95},
    "122B-A10B": {
        "embed": 1.526, "experts": 115.96, "shared": 0.453, "router": 0.03775, "self_attn": 0.944, "linear_attn": 3.19,
        "visual": 0.451, "mtp": 2.52, "total": 122.6 + 2.52,
    },
}  # fmt: skip


def part(name):
    for prefix in ("mtp", "model.visual"):
        if name.startswith(prefix):
            return prefix.removeprefix("model.")
    if "embed_tokens" in name or "lm_head" in name:
        return "embed"
    words = ("shared_expert", "experts.", "mlp.gate.", "linear_attn", "self_attn", "mlp")
    found = next((word for word in words if word in name), "norm")
    return {"shared_expert": "shared", "experts.": "experts", "mlp.gate.": "router"}.get(found, found)


@pytest.mark.parametrize("name", BILLIONS)
def test_published_sizes(name):
    model = qwen3_5.load(qwen3_5.CONFIGS[name], device="meta")
    found = {"total": 0}
    for key, p in model.named_parameters():
        assert p.is_meta and p.dtype == (torch.float32 if key.endswith(("A_log", "dt_bias")) else torch.bfloat16)
        for which in (part(key), "total"):
            found[which] = found.get(which, 0) + p.numel() / 1e9
    for key, billions in BILLIONS[name].items():
        assert abs(found[key] / billions - 1) < 0.005, (key, found[key])


@pytest.mark.parametrize("name", BILLIONS)
def test_transformers_makes_the_same_parameters(name):
    from transformers import AutoModelForImageTextToText

    ours = qwen3_5.load(qwen3_5.CONFIGS[name], device="meta")
    mapping = ours.config.to_dict()
    config = AutoConfig.for_model(mapping.pop("model_type"), **copy.deepcopy(mapping))
    with torch.device("meta"):
        theirs = AutoModelForImageTextToText.from_config(config)
    shapes = {key: p.shape for key, p in ours.named_parameters() if not key.startswith("mtp.")}
    assert shapes == {key: p.shape for key, p in theirs.named_parameters()}
    assert qwen3_5.read_config(config) == qwen3_5.read_config({**ours.config.to_dict()})


def test_a_large_model_runs_on_no_memory():
    model = qwen3_5.load(qwen3_5.CONFIGS["35B-A3B"], device="meta", activation_checkpointing=True)
    tokens = 16 * 1024
    ids = torch.zeros(tokens, dtype=torch.int64)
    ids[100:4196] = model.config.image_token_id
    batch = {
        "input_ids": ids, "labels": ids, "cu_seqlens": torch.tensor([0, 9000, tokens]),
        "pixel_values": torch.empty(4 * 4096, model.config.vision.patch_width, device="meta"),
        "image_grid_thw": torch.tensor([[1, 128, 128]]),
    }  # fmt: skip
    loss, metrics = model(batch)
    loss.backward()
    assert loss.is_meta and loss.dtype == torch.float32 and metrics["mtp_loss"].is_meta
    assert all(p.grad.shape == p.shape for p in model.parameters())


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_a_configuration_is_read_alike_from_everywhere(tmp_path, family):
    theirs = models.config(family)
    theirs.save_pretrained(tmp_path)
    found = qwen3_5.read_config(theirs)
    assert found.family == family and found.text.rotary_dim == 8 and found.text.mrope_section == (2, 1, 1)
    for source in (tmp_path, str(tmp_path), theirs.to_dict(), found, found.to_dict()):
        assert qwen3_5.read_config(source) == found


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_absent_keys_are_transformers(family):
    theirs = AutoConfig.for_model(
        family, vision_config={"out_hidden_size": AutoConfig.for_model(family).text_config.hidden_size}
    )
    mapping = {"model_type": family, "text_config": {}, "vision_config": {}}
    assert qwen3_5.read_config(mapping) == qwen3_5.read_config(theirs)


def test_older_keys():
    mapping = models.config().to_dict()
    text = mapping["text_config"]
    rope = text.pop("rope_parameters")
    text |= {"rope_theta": 1e7, "partial_rotary_factor": 0.5, "full_attention_interval": 4}
    text |= {"rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]}}
    text.pop("layer_types")
    found = qwen3_5.read_config(mapping).text
    assert (found.rope_theta, found.rotary_dim, found.mrope_section) == (1e7, 8, (2, 1, 1))
    assert found.layer_types == ("linear_attention",) * 3 + ("full_attention",)


WRONG = {
    "text only": ({"vision_config": None}, ValueError, "no vision_config"),
    "layers": ({"text_config.layer_types": ["full_attention"]}, ValueError, "names 1 layers, num_hidden_layers is 4"),
    "layer": ({"text_config.layer_types": ["sliding"] * 4}, ValueError, r"layer_types\[0\] is 'sliding'"),
    "act": ({"text_config.hidden_act": "gelu"}, NotImplementedError, "hidden_act is 'gelu'; 'silu' is supported"),
    "rope": ({"text_config.rope_parameters": {"rope_type": "yarn"}}, NotImplementedError, "rope_type 'yarn'"),
    "width": ({"vision_config.out_hidden_size": 16}, ValueError, "out_hidden_size is 16, .*hidden_size 32"),
    "deepstack": ({"vision_config.deepstack_visual_indexes": [1]}, NotImplementedError, "deepstack"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors(name):
    changes, error, message = WRONG[name]
    mapping = models.config().to_dict()
    for key, value in changes.items():
        *section, last = key.split(".")
        (mapping[section[0]] if section else mapping)[last] = value
    with pytest.raises(error, match=message):
        qwen3_5.read_config(mapping)


def test_no_directory(tmp_path):
    with pytest.raises(ValueError, match=r"is no directory with a config\.json"):
        qwen3_5.load(tmp_path / "absent")
    with pytest.raises(TypeError, match="found int"):
        qwen3_5.load(3)


def test_random_weights_are_drawn_as_transformers_draws_them():
    config = models.config("qwen3_5_moe", initializer_range=0.05)
    torch.manual_seed(1)
    model = qwen3_5.load(config)
    torch.manual_seed(1)
    again = qwen3_5.load(config)
    theirs = dict(models.build("qwen3_5_moe", initializer_range=0.05).named_parameters())
    for (name, p), q in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q) and torch.isfinite(p).all(), name
        if name.endswith("A_log"):
            assert (p >= -4.7).all() and (p <= 2.8).all() and p.std() > 0
        elif p.ndim == 1:
            assert p.unique().numel() == 1, name
        elif p.numel() > 200:
            assert 0.8 < p.std() / theirs[name].std() < 1.25, name
    loss, _ = model(packs.pack(packs.PACKS["short"]))
    assert abs(loss - torch.log(torch.tensor(96.0))) < 0.3
