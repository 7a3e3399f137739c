"""The head of multi-token prediction: its targets, and the loss and every gradient of a model that has one."""

import copy

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForImageTextToText

from automodel_c.models import qwen3_5
from automodel_c.models.qwen3_5.step import Batch
from tests.models import mtp_reference, packs
from tests.patch import models

SEEDS = range(4)


def small(layers, family="qwen3_5"):
    mapping = models.config(family).to_dict()
    mapping["text_config"]["mtp_num_hidden_layers"] = layers
    return mapping


def targets(labels, docs, depths):
    """Labels of each depth, and the place each token's embedding comes from."""
    model = qwen3_5.load(small(depths))
    ids = torch.arange(len(labels))
    batch = Batch({"input_ids": ids, "labels": labels, "doc_ids": docs}, model.config, "cpu")
    seen = []
    model.mtp.pre_fc_norm_embedding.register_forward_pre_hook(lambda _, args: seen.append(args[0][:, 0].long()))
    size = model.config.text.hidden_size
    places = ids[:, None].float().expand(-1, size).contiguous()
    found = model.mtp(torch.zeros(len(ids), size), places, batch)
    return [labels.tolist() for _, labels in found], [place.tolist() for place in seen]


@pytest.mark.parametrize("labels, docs, expected", [
    ([11, 12, 21, 22], [1, 1, 2, 2], [[12, -100, 22, -100]]),
    ([1, 2, 3, 4, 5, 6, 7], [1] * 4 + [2] * 3, [[2, 3, 4, -100, 6, 7, -100], [3, 4, -100, -100, 7, -100, -100]]),
    ([1, 2, 3, 4, 5, 6, 7, 8], [1] * 4 + [2] * 4,
     [[2, 3, 4, -100, 6, 7, 8, -100], [3, 4, -100, -100, 7, 8, -100, -100]]),
    ([1, 2, 3, 4], [7] * 4, [[2, 3, 4, -100], [3, 4, -100, -100]]),
    ([1, 2, 3, 4], [1, 1, 2, 2], [[2, -100, 4, -100], [-100] * 4, [-100] * 4]),
    ([1, 2, 3, 4, 5], [1, 1, 0, 2, 2], [[2, -100, -100, 5, -100]]),
    ([1, -100, 3, 4], [1] * 4, [[-100, 3, 4, -100]]),
])  # fmt: skip
def test_targets(labels, docs, expected):
    found, places = targets(torch.tensor(labels), torch.tensor(docs), len(expected))
    assert found == expected
    for k, row in enumerate(places, 1):
        for t, place in enumerate(row):
            assert place == t + k or t + k >= len(docs) or docs[t + k] != docs[t] or docs[t] == 0
            assert docs[place] == docs[t]


def test_every_description_of_the_documents_gives_the_same_bits():
    torch.manual_seed(0)
    model = qwen3_5.load(small(3))
    batch = {"input_ids": torch.arange(9), "labels": torch.arange(9) + 20}
    by_offsets = packs.ours(model, {**batch, "cu_seqlens": [0, 3, 5, 9]})
    by_ids = packs.ours(model, {**batch, "doc_ids": torch.tensor([1] * 3 + [2] * 2 + [3] * 4)})
    joined = packs.ours(model, batch)
    assert all(torch.equal(by_ids[name], value) for name, value in by_offsets.items())
    assert not torch.equal(joined["mtp.fc.weight"], by_ids["mtp.fc.weight"])


def reference_run(reference, mtp, documents, config):
    """As packs.theirs, with transformers' model below an MTP head that is written out."""
    count, total = packs.label_count(documents), 0
    leaves = {**dict(reference.named_parameters()), **mtp}
    dtype = next(iter(leaves.values())).dtype
    seen = []
    handle = reference.model.language_model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["inputs_embeds"]), with_kwargs=True
    )
    for d in documents:
        row = packs.as_row(d, dtype)
        hidden = reference.model(**row).last_hidden_state[0]
        grids = {k: row.get(k) for k in ("image_grid_thw", "video_grid_thw")}
        positions = reference.model.get_rope_index(row["input_ids"], row["mm_token_type_ids"], **grids)[0][:, 0]
        head = leaves["lm_head.weight"]
        loss = F.cross_entropy(F.linear(hidden, head), d["labels"], reduction="sum", ignore_index=-100)
        p = mtp_reference.below(leaves, "mtp.")
        more = mtp_reference.loss_sum(hidden, seen.pop()[0], d["labels"], positions, p, head, config.text)
        total = total + (loss + 0.1 * more) / count
    handle.remove()
    grads = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    zeros = [torch.zeros_like(p) if g is None else g for p, g in zip(leaves.values(), grads, strict=True)]
    return {"loss": total.detach(), **dict(zip(leaves, zeros, strict=True))}


@pytest.mark.parametrize("family, depths", [("qwen3_5", 1), ("qwen3_5_moe", 1), ("qwen3_5", 2)])
def test_loss_and_gradients(tmp_path, family, depths):
    documents = [*packs.PACKS["images"], packs.document(6, ("video", 2, 2, 4), 5, seed=1), *packs.PACKS["short"]]
    runs = {"found": [], "naive": [], "truth": []}
    for seed in SEEDS:
        torch.manual_seed(seed)
        model = packs.well_conditioned(qwen3_5.load(small(depths, family)))
        with torch.no_grad():
            for name, p in model.named_parameters():
                if p.ndim == 1 and not name.endswith(("A_log", "dt_bias")):
                    p.add_(torch.randn(p.shape) * 0.1)
        model.save_pretrained(tmp_path / str(seed))
        reference = AutoModelForImageTextToText.from_pretrained(tmp_path / str(seed), experts_implementation="eager")
        reference.train()
        mtp = {name: p.detach().clone() for name, p in model.named_parameters() if name.startswith("mtp.")}
        runs["found"].append(packs.ours(model, packs.pack(documents)))
        for name, twin in (("naive", reference), ("truth", models.in_float64(reference))):
            own = {key: p.to(next(twin.parameters()).dtype).requires_grad_() for key, p in copy.deepcopy(mtp).items()}
            with models.Exact() if name == "truth" else torch.enable_grad():
                runs[name].append(reference_run(twin, own, documents, model.config))
    packs.compare(*runs.values(), "mtp")


def test_metrics_add_up_and_the_head_can_go():
    model = qwen3_5.load(small(1))
    batch = packs.pack(packs.PACKS["images"])
    loss, metrics = model(batch)
    torch.testing.assert_close(loss, metrics["lm_loss"] + 0.1 * metrics["mtp_loss"])
    model.mtp = None
    assert torch.equal(model(batch)[0], metrics["lm_loss"])


def test_checkpointing_gives_the_same_bits():
    model = qwen3_5.load(small(2, "qwen3_5_moe"))
    batch = packs.pack(packs.PACKS["mixed"])
    expected = packs.ours(model, batch)
    model.recompute(True)
    for name, value in packs.ours(model, batch).items():
        assert torch.equal(value, expected[name]), name
