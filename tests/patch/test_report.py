"""What the report says, the way back, and refusals."""

import inspect

import pytest
import torch
from torch import nn

import automodel_c
from automodel_c import _amcore
from tests.models import packs
from tests.patch import models


@pytest.fixture
def batch():
    return models.pack([models.document(9, grids=[(4, 4)], seed=1)])


def test_report_names_every_swap_and_every_rest():
    report = automodel_c.patch_transformers(models.build())
    layers = "model.language_model.layers"
    assert {
        ("lm_head", "loss", "ops.linear_cross_entropy"),
        (f"{layers}.1.self_attn", "attention", "ops.attention"),
        (f"{layers}.1.self_attn", "mRoPE", "ops.mrope"),
        (f"{layers}.1.self_attn", "sigmoid gate", "ops.sigmoid_gate"),
        (f"{layers}.1.self_attn.q_norm", "RMSNorm", "ops.rms_norm"),
        (f"{layers}.0.linear_attn.norm", "gated RMSNorm", "ops.gated_rms_norm"),
        (f"{layers}.3.mlp.shared_expert", "SwiGLU", "ops.swiglu"),
        (f"{layers}.3.mlp.experts", "routed experts", "ops.moe"),
        (f"{layers}.3.mlp", "shared expert's gate", "ops.add_shared_expert"),
        (f"{layers}.2.linear_attn", "gated delta rule", "ops.gated_delta_rule"),
        (f"{layers}.2.linear_attn", "causal convolution", "ops.causal_conv1d"),
        (f"{layers}.2.linear_attn", "decay and write gates", "ops.gdn_gate"),
        ("model.visual.blocks.1.attn", "attention", "ops.attention"),
        ("model.visual.blocks.1.attn", "axial RoPE", "ops.vision_rope"),
        ("model.visual.blocks.0.norm2", "LayerNorm", "ops.layer_norm"),
        ("model.visual.blocks.0.mlp.act_fn", "GELU", "ops.gelu, tanh"),
        ("model.visual.merger.act_fn", "GELU", "ops.gelu"),
    } <= set(report.swapped)
    assert {(path, what) for path, what, _ in report.left} == {
        (f"{layers}.{i}.linear_attn", "generation") for i in (0, 2)
    }
    table = str(report)
    assert "model.language_model.layers.*.mlp.experts (4)" in table and "left: a cache is filled" in table


def test_dense_text_model_and_base_models():
    report = automodel_c.patch_transformers(models.build("qwen3_5", text_only=True))
    assert ("model.layers.0.mlp", "SwiGLU", "ops.swiglu") in report.swapped
    base = models.build().model
    assert automodel_c.patch_transformers(base).active
    tower = models.build().model.visual
    assert {path.split(".")[0] for path, _, _ in automodel_c.patch_transformers(tower).swapped} == {"blocks", "merger"}


def test_undo_gives_the_same_bits_again(batch):
    model = models.build()
    before = models.run(model, batch)
    logits = model(**batch).logits
    attributes = {name: set(vars(m)) for name, m in model.named_modules()}
    for _ in range(2):
        report = automodel_c.patch_transformers(model)
        assert automodel_c.patch_transformers(model) is report
        patched = model(**batch)
        assert patched.logits is None
        report.undo()
        report.undo()
        assert not report.active
        assert attributes == {name: set(vars(m)) for name, m in model.named_modules()}
        after = models.run(model, batch)
        assert all(torch.equal(after[name], value) for name, value in before.items())
        assert torch.equal(model(**batch).logits, logits)


def test_nothing_of_transformers_changes_for_other_models(batch):
    model, other = models.build(), models.build()
    before = models.run(other, batch)
    automodel_c.patch_transformers(model)
    model(**batch)
    after = models.run(other, batch)
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_forward_keeps_its_signature_and_parameters_stay():
    model = models.build()
    signature, names = inspect.signature(model.forward), list(model.state_dict())
    automodel_c.patch_transformers(model)
    assert inspect.signature(model.forward) == signature
    assert list(model.state_dict()) == names


def test_logits_without_labels_and_tuples(batch):
    model = models.build()
    labels = batch.pop("labels")
    plain = model(**batch).logits
    automodel_c.patch_transformers(model)
    torch.testing.assert_close(model(**batch).logits, plain)
    loss = model(**batch, labels=labels).loss
    assert torch.equal(model(**batch, labels=labels, return_dict=False)[0], loss)
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    assert torch.equal(model(**batch, labels=labels, shift_labels=shifted).loss, loss)
    nothing = torch.full_like(labels, -100)
    assert model(**batch, labels=nothing).loss == 0


def test_generation_decodes_as_before(batch):
    model = models.build().eval()
    ids = batch["input_ids"][:, :2].repeat(2, 1)
    ids = torch.cat([ids, ids + 1], 1)
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": mask, "pad_token_id": 0}
    expected = model.generate(ids, **options)
    automodel_c.patch_transformers(model)
    assert torch.equal(model.generate(ids, **options), expected)


@pytest.mark.parametrize(
    ("options", "what", "why"),
    [
        ({"head_dim": 24}, "attention", "head dim 24 has no kernel"),
        ({"attention_dropout": 0.1}, "attention", "attention_dropout is 0.1"),
        ({"vision_heads": 4}, "attention", "head dim 8 has no kernel"),
        ({"hidden_act": "gelu"}, "SwiGLU", "hidden_act is 'gelu'"),
        ({"hidden_act": "gelu"}, "routed experts", "the experts' activation is GELUActivation"),
        ({"hidden_act": "gelu"}, "gated delta rule, convolution", "hidden_act is 'gelu'"),
        ({"linear_key_head_dim": 12}, "gated delta rule, convolution", "key head dim 12 has no kernel"),
        ({"linear_conv_kernel_dim": 9}, "gated delta rule, convolution", "the convolution has 9 taps"),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else "",
)
def test_what_does_not_fit_is_left_and_works(options, what, why, batch):
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    wide = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    runs = {"patched": [], "plain": [], "truth": []}
    for seed in range(5):  # how much rounding grows on the way is each model's own
        model = models.build(seed=seed, **options).eval()
        runs["plain"].append({"logits": model(**inputs).logits.detach()})
        with models.Exact():
            runs["truth"].append({"logits": models.in_float64(model).eval()(**wide).logits.detach()})
        report = automodel_c.patch_transformers(model)
        assert any(w == what and reason.startswith(why) for _, w, reason in report.left)
        runs["patched"].append({"logits": model(**inputs).logits.detach()})
    packs.compare(runs["patched"], runs["plain"], runs["truth"], "left")


def test_refusals(batch):
    with pytest.raises(ValueError, match=r"holds no Qwen3\.5 model"):
        automodel_c.patch_transformers(nn.Linear(2, 2))
    model = models.build()
    automodel_c.patch_transformers(model.model.language_model)
    with pytest.raises(ValueError, match=r"'model.language_model' is patched already"):
        automodel_c.patch_transformers(model)
    model = models.build(linear_value_head_dim=12)
    automodel_c.patch_transformers(model)
    with pytest.raises(NotImplementedError, match="gated delta nets are not swapped"):
        model(**models.pack([models.document(4, seed=1), models.document(3, seed=2)]))
    model = models.build(head_dim=24)
    automodel_c.patch_transformers(model)
    documents = models.pack([models.document(4, seed=1), models.document(3, seed=2)])
    with pytest.raises(NotImplementedError, match="attention is not swapped"):
        model(**documents)
    model = models.build()
    automodel_c.patch_transformers(model)
    for more, words in {
        "output_attentions": "output_attentions: the patched attention makes no weights",
        "use_cache": "several documents has no cache",
    }.items():
        with pytest.raises(ValueError, match=words):
            model(**documents, **{more: True})
    with pytest.raises(ValueError, match="logits_to_keep goes without labels"):
        model(**documents, logits_to_keep=1)
    with pytest.raises(TypeError, match="float64"):
        model.double()(**batch)


def test_a_step_runs_the_operators_and_not_transformers_chunks(monkeypatch, batch):
    model = models.build()
    automodel_c.patch_transformers(model)
    called = set()

    def spy(name):
        original = getattr(_amcore, name)

        def call(*args, **kwargs):
            called.add(name)
            return original(*args, **kwargs)

        return call

    names = [f"{op}_{way}" for op in ("gated_delta_rule", "causal_conv1d", "gdn_gate", "moe", "shared_expert")
             for way in ("forward", "backward")]  # fmt: skip
    for name in names:
        monkeypatch.setattr(_amcore, name, spy(name))
    layer = model.model.language_model.layers[0]
    for part in (layer.linear_attn, layer.mlp.experts, layer.mlp.gate):
        monkeypatch.setattr(type(part), "forward", _never)
    models.run(model, batch)
    assert called == set(names)


def _never(self, *args, **kwargs):
    raise AssertionError(f"transformers' {type(self).__name__} ran")


def test_weights_that_the_operators_do_not_take_are_left():
    model = models.build()
    blocks = [layer.mlp for layer in model.model.language_model.layers]
    blocks[0].experts.down_proj = nn.Parameter(blocks[0].experts.down_proj.detach().transpose(1, 2).contiguous()[:, :3])
    blocks[1].experts.half()
    blocks[2].gate.bfloat16()
    why = {path: why for path, what, why in automodel_c.patch_transformers(model).left if what == "routed experts"}
    prefix = "model.language_model.layers"
    assert set(why) == {f"{prefix}.{i}.mlp.experts" for i in range(3)}
    assert "is no parameter [4, 32, 16]" in why[f"{prefix}.0.mlp.experts"]
    assert "float16 has no kernel" in why[f"{prefix}.1.mlp.experts"]
    assert "the router torch.bfloat16" in why[f"{prefix}.2.mlp.experts"]
