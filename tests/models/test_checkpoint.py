"""Directories of weights: every key accounted for, both key styles of experts, and back to transformers."""

import json
import subprocess
import sys
import textwrap

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from automodel_c import optim
from automodel_c.models import qwen3_5
from tests.models import packs
from tests.patch import models

FAMILIES = ["qwen3_5", "qwen3_5_moe"]


def with_mtp(folder, *, layers=1, **options):
    """A directory of a random model with an MTP head."""
    torch.manual_seed(3)
    config = models.config("qwen3_5_moe").to_dict()
    config["text_config"]["mtp_num_hidden_layers"] = layers
    model = qwen3_5.load(config)
    model.save_pretrained(folder, **options)
    return model


def rewrite(folder, change):
    """Lets `change` edit the tensors of a directory of one file."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({key: t.contiguous() for key, t in tensors.items()}, folder / "model.safetensors")


def same(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_is_the_files(tmp_path, family):
    reference, model = packs.checkpoint(tmp_path, family)
    theirs = reference.state_dict()
    assert theirs.keys() == model.state_dict().keys()
    for key, value in model.state_dict().items():
        assert torch.equal(value, theirs[key]), key


def test_a_head_that_is_the_embedding(tmp_path):
    """Its gradient is the sum of both; files that hold it twice are read too; transformers reads what is written."""
    mapping = models.config("qwen3_5").to_dict()
    torch.manual_seed(4)
    tied = qwen3_5.load({**mapping, "tie_word_embeddings": True})
    batch = packs.pack(packs.PACKS["image"])
    assert tied.lm_head is None and "lm_head.weight" not in tied.state_dict()
    untied = qwen3_5.load(mapping)
    embedding = "model.language_model.embed_tokens.weight"
    untied.load_state_dict({**tied.state_dict(), "lm_head.weight": tied.state_dict()[embedding]})
    found, expected = packs.ours(tied, batch), packs.ours(untied, batch)
    assert torch.equal(found["loss"], expected["loss"])
    torch.testing.assert_close(found[embedding], expected[embedding] + expected["lm_head.weight"])
    tied.save_pretrained(tmp_path / "tied")
    assert json.loads((tmp_path / "tied" / "config.json").read_text())["tie_word_embeddings"] is True
    theirs = AutoModelForImageTextToText.from_pretrained(tmp_path / "tied")
    torch.testing.assert_close(packs.theirs(theirs, packs.PACKS["image"])["loss"], found["loss"])
    rewrite(tmp_path / "tied", lambda tensors: tensors.update({"lm_head.weight": tensors[embedding].clone()}))
    assert same(qwen3_5.load(tmp_path / "tied"), tied)


@pytest.mark.parametrize("experts", [None, "split", "grouped"])
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_what_is_written(tmp_path, family, experts):
    reference, model = packs.checkpoint(tmp_path / "in", family)
    model.save_pretrained(tmp_path / "out", experts=experts)
    again = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", experts_implementation="eager")
    row = packs.as_row(packs.PACKS["images"][1])
    with torch.no_grad():
        assert torch.equal(again(**row).logits, reference(**row).logits)
    assert same(model, qwen3_5.load(tmp_path / "out"))
    keys = load_file(tmp_path / "out" / "model.safetensors").keys()
    wanted = {} if experts == "grouped" else load_file(tmp_path / "in" / "model.safetensors").keys()
    assert not wanted or keys == wanted  # the style that transformers writes


def test_transformers_leaves_the_mtp_head(tmp_path):
    model = with_mtp(tmp_path)
    again, info = AutoModelForImageTextToText.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    state = model.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in again.state_dict().items())


@pytest.mark.parametrize("decoder", ["split", "grouped"])
@pytest.mark.parametrize("mtp", ["split", "grouped"])
def test_both_key_styles_of_experts(tmp_path, decoder, mtp):
    model = with_mtp(tmp_path / "a", experts=decoder)
    if mtp != decoder:
        model.save_pretrained(tmp_path / "b", experts=mtp)
        other = load_file(tmp_path / "b" / "model.safetensors")

        def change(tensors):
            for key in [k for k in tensors if k.startswith("mtp.")]:
                del tensors[key]
            tensors |= {k: t for k, t in other.items() if k.startswith("mtp.")}

        rewrite(tmp_path / "a", change)
    before = load_file(tmp_path / "a" / "model.safetensors").keys()
    assert any("mtp.layers.0.mlp.experts.3.up_proj.weight" in k for k in before) == (mtp == "split")
    found = qwen3_5.load(tmp_path / "a")
    assert same(found, model)
    found.save_pretrained(tmp_path / "c")  # in the styles it had
    assert load_file(tmp_path / "c" / "model.safetensors").keys() == before


def test_no_such_key_style(tmp_path):
    model = with_mtp(tmp_path / "a")
    with pytest.raises(ValueError, match=r"save: experts is 'per-expert', one of .* is needed"):
        model.save_pretrained(tmp_path / "b", experts="per-expert")
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("prefix", ["model.language_model.layers.1", "mtp.layers.0"])
def test_mixed_key_styles(tmp_path, prefix):
    with_mtp(tmp_path, experts="grouped")

    def change(tensors):
        down = tensors.pop(f"{prefix}.mlp.experts.down_proj")
        tensors |= {f"{prefix}.mlp.experts.{e}.down_proj.weight": w for e, w in enumerate(down)}

    rewrite(tmp_path, change)
    with pytest.raises(ValueError, match=r"two key styles: .*experts.(gate_up|down)_proj and .*experts\.\d\.down_proj"):
        qwen3_5.load(tmp_path)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_missing_and_foreign_keys_are_named(tmp_path, device):
    with_mtp(tmp_path, experts="split")

    def change(tensors):
        del tensors["model.language_model.layers.0.mlp.experts.2.gate_proj.weight"]
        del tensors["mtp.fc.weight"]
        tensors["model.visual.deepstack_merger_list.0.norm.weight"] = torch.zeros(3)
        tensors["model.language_model.rotary_emb.inv_freq"] = torch.zeros(3)  # older files hold it

    rewrite(tmp_path, change)
    with pytest.raises(RuntimeError) as info:
        qwen3_5.load(tmp_path, device=device)
    text = str(info.value)
    assert "missing: model.language_model.layers.0.mlp.experts.2.gate_proj.weight, mtp.fc.weight;" in text
    assert "not the model's: model.visual.deepstack_merger_list.0.norm.weight" in text and "inv_freq" not in text


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_shape_that_disagrees(tmp_path, device):
    with_mtp(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(95, 32)}))
    with pytest.raises(ValueError, match=r"lm_head.weight has shape \[95, 32\] .*needs \[96, 32\]"):
        qwen3_5.load(tmp_path, device=device)


def test_quantized_weights_are_refused(tmp_path):
    with_mtp(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(96, 32).to(torch.float8_e4m3fn)}))
    with pytest.raises(NotImplementedError, match=r"lm_head\.weight is torch\.float8_e4m3fn"):
        qwen3_5.load(tmp_path)


def test_files_decide_about_the_mtp_head(tmp_path, caplog):
    with_mtp(tmp_path, layers=2)
    assert len(qwen3_5.load(tmp_path).mtp.layers) == 2 and not caplog.records
    rewrite(tmp_path, lambda t: [t.pop(k) for k in list(t) if k.startswith("mtp.")])
    assert qwen3_5.load(tmp_path).mtp is None
    assert "mtp_num_hidden_layers 2, the files hold 0 layers" in caplog.text


def test_keys_without_the_prefix(tmp_path):
    model = with_mtp(tmp_path)

    def change(tensors):
        for key in list(tensors):
            tensors[key.removeprefix("model.")] = tensors.pop(key)

    rewrite(tmp_path, change)
    assert same(qwen3_5.load(tmp_path), model)


def test_shards(tmp_path):
    model = with_mtp(tmp_path / "one")
    from automodel_c.models.qwen3_5.checkpoint import save

    save(model, tmp_path / "many", shard_bytes=100_000)
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    names = sorted(set(index["weight_map"].values()))
    assert len(names) > 2 and names[0] == f"model-00001-of-{len(names):05d}.safetensors"
    assert index["metadata"]["total_size"] == sum(p.numel() * 4 for p in model.parameters())
    assert same(qwen3_5.load(tmp_path / "many"), model)
    reference = AutoModelForImageTextToText.from_pretrained(tmp_path / "many")
    assert torch.equal(reference.lm_head.weight, model.lm_head.weight)
    (tmp_path / "many" / names[1]).unlink()
    with pytest.raises(ValueError, match=names[1]):
        qwen3_5.load(tmp_path / "many")


def test_a_folder_is_whole_or_as_it_was(tmp_path, monkeypatch):
    model = with_mtp(tmp_path / "a")
    before = (tmp_path / "a" / "model.safetensors").read_bytes()

    def fail(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr("automodel_c.models.qwen3_5.checkpoint.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        model.save_pretrained(tmp_path / "a")
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_gates_are_float32_from_bfloat16_files_to_the_optimizer(tmp_path):
    reference = models.build("qwen3_5").bfloat16()
    reference.save_pretrained(tmp_path)
    model = qwen3_5.load(tmp_path)
    gates = {name: p for name, p in model.named_parameters() if name.endswith(("A_log", "dt_bias"))}
    theirs = reference.state_dict()
    assert model.lm_head.weight.dtype == torch.bfloat16
    for name, p in gates.items():
        assert p.dtype == torch.float32 and torch.equal(p, theirs[name].float())
    optimizer = optim.FusedAdamW(model.parameters(), lr=1e-5)
    before = {name: p.detach().clone() for name, p in gates.items()}
    model(packs.pack(packs.PACKS["short"]))[0].backward()
    optimizer.step()
    for name, p in gates.items():
        assert p.grad.dtype == torch.float32 and not torch.equal(p, before[name])
        assert not torch.equal(p, p.bfloat16().float())  # a step that bfloat16 could not hold
    model.save_pretrained(tmp_path / "out")
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(saved[name], p) for name, p in gates.items())
    assert saved["lm_head.weight"].dtype == torch.bfloat16


def test_transformers_is_not_needed(tmp_path):
    with_mtp(tmp_path)
    script = """
        import sys
        sys.modules["transformers"] = None
        import torch
        import automodel_c as amc
        model = amc.models.qwen3_5.load(sys.argv[1])
        loss, _ = model({"input_ids": torch.arange(9), "labels": torch.arange(9)})
        model.save_pretrained(sys.argv[1] + "/again")
        print(float(loss))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) > 0
