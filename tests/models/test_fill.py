"""Models that are sharded on the meta device and then filled: the same weights, and each rank reads its own alone."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from automodel_c.models import qwen3_5
from automodel_c.models.qwen3_5.quantized import dequantise, scale_shape, scale_slices
from tests.models import fill_worker as worker
from tests.patch import models

LARGEST = 448.0  # of float8_e4m3fn


def mapping(family="qwen3_5_moe", **text):
    config = models.config(family).to_dict()
    config["text_config"] |= {"mtp_num_hidden_layers": 1, **text}
    return config


def written(folder, seed=3, family="qwen3_5_moe", **options):
    """The state of a random model, in a directory."""
    torch.manual_seed(seed)
    model = qwen3_5.load(mapping(family))
    model.save_pretrained(folder, **options)
    return model.state_dict()


def same(state, expected):
    assert state.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(state[key], value), key


@pytest.mark.parametrize(
    ("ranks", "ep", "tp", "pp", "experts"),
    [
        (2, 1, 1, 1, "split"),
        (2, 2, 1, 1, "grouped"),
        (4, 2, 1, 1, "split"),
        (2, 1, 2, 1, "split"),
        (4, 4, 2, 1, "grouped"),
        (2, 1, 1, 2, "split"),
        (4, 2, 1, 2, "split"),
    ],
)
def test_each_rank_reads_its_own_part_alone(rank_pools, tmp_path, ranks, ep, tp, pp, experts):
    """All ranks together read each number once; none more than its shards."""
    expected = written(tmp_path, experts=experts)
    found = rank_pools(ranks).run(worker.filled, str(tmp_path), ep, tp, pp)
    same(found[0][0], expected)
    assert [read for _, read, _ in found] == [4 * held for _, _, held in found]
    assert sum(read for _, read, _ in found) == sum(4 * p.numel() for p in expected.values())


@pytest.mark.parametrize(
    ("family", "ranks", "ep", "tp", "pp"),
    [
        ("qwen3_5_moe", 4, 2, 1, 1),
        ("qwen3_5_moe", 4, 4, 1, 1),
        ("qwen3_5", 2, 1, 1, 1),
        ("qwen3_5", 4, 1, 2, 1),
        ("qwen3_5_moe", 4, 2, 1, 2),
    ],
)
def test_drawn_weights_do_not_depend_on_ranks(rank_pools, family, ranks, ep, tp, pp):
    torch.manual_seed(7)
    expected = qwen3_5.load(mapping(family)).state_dict()
    found = rank_pools(ranks).run(worker.filled, mapping(family), ep, tp, pp, 7)
    same(found[0][0], expected)
    assert all(read == 0 for _, read, _ in found)


def quantised(weight, block):
    """(float8 values, scales, what they stand for in float64) of a weight [.., R, C]."""
    rows, columns = weight.shape[-2:]
    scales = torch.empty(scale_shape(weight.shape, block))
    values = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    truth = torch.empty_like(weight, dtype=torch.float64)
    for i in range(0, rows, block[0]):
        for j in range(0, columns, block[1]):
            at = (..., slice(i, i + block[0]), slice(j, j + block[1]))
            scale = weight[at].abs().amax((-2, -1)) / LARGEST
            values[at] = (weight[at] / scale[..., None, None]).to(torch.float8_e4m3fn)
            truth[at] = values[at].double() * scale.double()[..., None, None]
            scales[..., i // block[0], j // block[1]] = scale
    return values, scales, truth


def quantise(folder, block, config=True):
    """Rewrites a directory's products of matrices in 8-bit floats: {key: what they stand for, float64}."""
    tensors, truth = load_file(folder / "model.safetensors"), {}
    for key in [k for k in tensors if "proj" in k and ("mlp." in k or "self_attn" in k) and "visual" not in k]:
        tensors[key], tensors[f"{key}_scale_inv"], truth[key] = quantised(tensors[key].float(), block)
    save_file(tensors, folder / "model.safetensors")
    if config:
        content = json.loads((folder / "config.json").read_text())
        content["quantization_config"] = {"quant_method": "fp8", "weight_block_size": list(block)}
        (folder / "config.json").write_text(json.dumps(content))
    return truth


@pytest.mark.parametrize("shape", [(128, 128), (1, 1), (127, 129), (129, 257), (3, 130, 260), (256, 128)])
def test_dequantise_slices(shape):
    """Any slice, at ragged edges too, is that slice of the whole; the product of two float32 is rounded once."""
    generator = torch.Generator().manual_seed(sum(shape))
    values, scales, truth = quantised(torch.randn(shape, generator=generator), (128, 128))
    edges = [sorted({0, 1, n // 3, n // 2, n - 1, n} & set(range(n + 1))) for n in shape[-2:]]
    lead = (slice(0, shape[0]),) * (len(shape) - 2)
    for a, b in [(a, b) for a in edges[0] for b in edges[0] if a < b]:
        for c, d in [(c, d) for c in edges[1] for d in edges[1] if c < d]:
            slices = (*lead, slice(a, b), slice(c, d))
            blocks = scales[scale_slices(slices, (128, 128))]
            found = dequantise(values[slices], blocks, slices, (128, 128))
            assert found.dtype == torch.float32 and torch.equal(found, truth[slices].float())


@pytest.mark.parametrize(("block", "experts"), [((128, 128), "split"), ((8, 16), "split"), ((8, 16), "grouped")])
def test_blocks_of_8_bit_floats_are_dequantised(tmp_path, block, experts):
    """`weight` is float8 times its block's scale, to the bit; keys without scales stay as they are."""
    expected = written(tmp_path, experts=experts)
    truth = quantise(tmp_path, block)
    model = qwen3_5.load(tmp_path, dtype=torch.float32)
    model.save_pretrained(tmp_path / "out", experts=experts)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert len(truth) >= 12 and not any("scale" in key for key in found)
    for key, value in found.items():
        assert torch.equal(value, truth[key].float() if key in truth else expected[key]), key
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config, "what is written is not quantized"


@pytest.mark.parametrize(("ranks", "ep"), [(2, 1), (4, 2)])
def test_ranks_read_8_bit_floats_by_slices(rank_pools, tmp_path, ranks, ep):
    """Shards begin inside blocks; a byte a number and the scales of the blocks that it lies in."""
    written(tmp_path, experts="split")
    quantise(tmp_path, (8, 16))
    expected = qwen3_5.load(tmp_path, dtype=torch.float32)
    found = rank_pools(ranks).run(worker.filled, str(tmp_path), ep)
    same(found[0][0], expected.state_dict())
    assert all(read < 4 * held for _, read, held in found)
    whole = expected.bytes_read
    assert whole == sum(t.nbytes for t in load_file(tmp_path / "model.safetensors").values())
    assert max(read for _, read, _ in found) < 1.2 * whole / ranks


def edit(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_scales_are_accounted_for(tmp_path, device):
    written(tmp_path, experts="split")
    quantise(tmp_path, (8, 16))
    key = "model.language_model.layers.1.self_attn.o_proj.weight"
    edit(tmp_path, lambda t: t.update({f"{key}_scale_inv": t[f"{key}_scale_inv"][:, :-1].clone()}))
    words = r"o_proj.weight_scale_inv has shape \[4, 3\].*needs \[4, 4\]"  # of [32, 64]
    with pytest.raises(ValueError, match=words):
        qwen3_5.load(tmp_path, device=device)
    edit(tmp_path, lambda t: t.update({"lm_hat.weight_scale_inv": t.pop(f"{key}_scale_inv")}))
    with pytest.raises(RuntimeError, match=r"not the model's: lm_hat\.weight_scale_inv"):
        qwen3_5.load(tmp_path, device=device)


def test_8_bit_floats_without_scales(tmp_path):
    written(tmp_path)
    quantise(tmp_path, (8, 16))
    edit(tmp_path, lambda t: t.pop("model.language_model.layers.1.self_attn.o_proj.weight_scale_inv"))
    with pytest.raises(NotImplementedError, match=r"o_proj\.weight is torch\.float8_e4m3fn .* without .*_scale_inv"):
        qwen3_5.load(tmp_path)


@pytest.mark.parametrize(
    ("section", "error", "words"),
    [
        ({"quant_method": "awq"}, NotImplementedError, "quant_method is 'awq'; 'fp8' is supported"),
        ({"weight_block_size": [128, 0]}, ValueError, r"weight_block_size is \[128, 0\], two numbers above 0"),
    ],
)
def test_other_ways_of_quantizing(tmp_path, section, error, words):
    written(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": section}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(error, match=words):
        qwen3_5.load(tmp_path)


@pytest.mark.parametrize("experts", ["split", "grouped"])
@pytest.mark.parametrize("name", ["27B", "35B-A3B", "122B-A10B"])
def test_published_keys_are_accounted_for(tmp_path, monkeypatch, name, experts):
    """Every key of a published size, its experts in either style and in 8-bit floats, from headers alone."""
    from automodel_c.models.qwen3_5 import checkpoint

    model = qwen3_5.load(qwen3_5.CONFIGS[name], device="meta")
    layouts = {"decoder": "grouped" if experts == "split" else "split", "mtp": experts}
    headers = {key: (list(t.shape), "BF16") for key, t in checkpoint._published(model.state_dict(), layouts)}
    for key in [k for k in headers if k.startswith("model.language_model") and "proj" in k and len(headers[k][0]) > 1]:
        headers[f"{key}_scale_inv"] = (list(scale_shape(headers[key][0], (128, 128))), "BF16")
        headers[key] = (headers[key][0], "F8_E4M3")
    monkeypatch.setattr(checkpoint, "_contents", lambda _: [("all.safetensors", list(headers))])
    monkeypatch.setattr(checkpoint, "safe_open", lambda *_, **__: Headers(headers))
    files = checkpoint.Files(tmp_path)
    assert files.fill(model) == (layouts if model.config.text.num_experts else dict.fromkeys(layouts, "grouped"))
    size = {"BF16": 2, "F8_E4M3": 1}
    assert files.bytes_read == sum(math.prod(shape) * size[dtype] for shape, dtype in headers.values())


class Headers:
    """A file of tensors that nobody reads."""

    def __init__(self, headers, key=None):
        self.headers, self.key = headers, key

    def get_slice(self, key):
        return Headers(self.headers, key)

    def get_shape(self):
        return self.headers[self.key][0]

    def get_dtype(self):
        return self.headers[self.key][1]
