"""The model over gloo ranks that share a pack: parts of the loss and of every gradient sum to those of one rank.

The error rule: transformers in float32 is the twin (for multi-token prediction, which it has not, this package's model
on one rank), transformers in float64, each document alone, the truth.
"""

import contextlib
import functools

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForImageTextToText

from automodel_c.reference.moe import aux_loss, load_balancing_loss
from tests.models import cp_worker as worker
from tests.models import mtp_reference, packs
from tests.models.cp_worker import DOCUMENTS, MODELS, PACKS
from tests.numerics import assert_as_good_as
from tests.patch import models
from tests.ranks import RanksFailed

SEEDS = range(2)


@functools.cache
def one_rank(name, seed, *chosen):
    """(loss and gradients, metrics of the last) of packs, one after another."""
    model, total = worker.build(name, seed), 0
    model.zero_grad(set_to_none=True)
    for pack in chosen:
        loss, metrics = model({**PACKS[pack], "num_label_tokens": label_count(chosen)})
        loss.backward()
        total = total + loss.detach()
    return {"loss": total, **packs.gradients(model)}, metrics


def label_count(chosen):
    return sum(packs.label_count(DOCUMENTS[pack]) for pack in chosen)


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    """truth(name, seed, *packs): loss and gradients in float64."""
    folder = tmp_path_factory.mktemp("exact")
    return functools.cache(functools.partial(by_transformers, folder, torch.float64))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """plain(name, seed, *packs): the same of the twin."""
    found = functools.partial(by_transformers, tmp_path_factory.mktemp("plain"), torch.float32)

    def of(name, seed, *chosen):
        ours, theirs = one_rank(name, seed, *chosen)[0], found(name, seed, *chosen)
        return {key: ours[key] if key.startswith("mtp.") else value for key, value in theirs.items()}

    return functools.cache(of)


def by_transformers(folder, dtype, name, seed, *chosen):
    """Loss and gradients in `dtype`, those of multi-token prediction by float64."""
    model, twin = their_twin(folder / f"{name}{seed}", name, seed, dtype)
    mtp = {key: p.detach().double().requires_grad_() for key, p in model.named_parameters() if key.startswith("mtp.")}
    leaves = {**dict(twin.named_parameters()), **mtp}
    with models.Exact() if dtype == torch.float64 else contextlib.nullcontext():
        loss = sum(their_loss(model, twin, leaves, DOCUMENTS[pack], label_count(chosen), dtype) for pack in chosen)
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    grads = [torch.zeros_like(p) if g is None else g for p, g in zip(leaves.values(), grads, strict=True)]
    return {"loss": loss.detach().to(dtype), **dict(zip(leaves, grads, strict=True))}


def their_twin(folder, name, seed, dtype=torch.float64):
    """(model, transformers' with the same weights in `dtype`)."""
    model = worker.build(name, seed)
    model.save_pretrained(folder)
    twin = AutoModelForImageTextToText.from_pretrained(folder, experts_implementation="eager").train()
    return model, models.in_float64(twin) if dtype == torch.float64 else twin


def their_loss(model, twin, leaves, documents, count, dtype):
    total, routed, config = 0, [], model.config
    head = leaves["lm_head.weight"]
    for d in documents:
        row = packs.as_row(d, dtype)
        embedded = []
        with contextlib.ExitStack() as hooks:
            hooks.enter_context(_inputs(twin.model.language_model, embedded, "inputs_embeds"))
            for layer in twin.model.language_model.layers if config.text.num_experts else ():
                routed.append((layer.mlp.gate, []))
                hooks.enter_context(_inputs(*routed[-1]))
            hidden = twin.model(**row).last_hidden_state[0]
        total = total + F.cross_entropy(F.linear(hidden, head), d["labels"], reduction="sum", ignore_index=-100)
        if model.mtp is not None:
            grids = {k: row.get(k) for k in ("image_grid_thw", "video_grid_thw")}
            positions = twin.model.get_rope_index(row["input_ids"], row["mm_token_type_ids"], **grids)[0][:, 0]
            p = mtp_reference.below(leaves, "mtp.")
            wide = (x.double() for x in (hidden, embedded[0][0]))
            more = mtp_reference.loss_sum(*wide, d["labels"], positions, p, head.double(), config.text)
            total = total + 0.1 * more
    loss = total / count
    if model.aux_loss is not None:
        loss = loss + config.text.router_aux_loss_coef * exact_aux(model, routed)
    return loss


@contextlib.contextmanager
def _inputs(module, seen, name=None):
    def keep(_, args, kwargs):
        seen.append(kwargs[name] if name else args[0])

    handle = module.register_forward_pre_hook(keep, with_kwargs=True)
    yield
    handle.remove()


def exact_aux(model, routed):
    stats, k = [], model.config.text.num_experts_per_tok
    layers = list(dict.fromkeys(gate for gate, _ in routed))
    for layer in layers:
        x = torch.cat([seen[0].flatten(0, -2) for gate, seen in routed if gate is layer])
        p = torch.softmax(F.linear(x, layer.weight), -1)
        load = torch.bincount(p.topk(k).indices.flatten(), minlength=p.shape[1])
        stats.append((load, p.sum(0), torch.tensor(len(x))))
    if model.aux_loss == "per_layer":
        return sum(aux_loss(load, prob_sum, n, k) for load, prob_sum, n in stats)
    return load_balancing_loss(stats)


def total(found):
    return {key: torch.stack([rank[key] for rank in found]).sum(0) for key in found[0]}


def trained(name, values):
    frozen = MODELS[name][3]
    return {key: value for key, value in values.items() if not (frozen and "visual" in key)}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_loss_and_gradients_are_one_ranks(rank_pools, truth, plain, world, name):
    cases = [(name, seed, pack) for pack in PACKS for seed in SEEDS]
    results = rank_pools(world).run(worker.parts, cases, timeout=180)
    runs = {"found": [], "naive": [], "truth": []}
    for case, *ranks in zip(cases, *results, strict=True):
        metrics = one_rank(*case)[1]
        found = total([values for values, _ in ranks])
        for kind, values in (("found", found), ("naive", plain(*case)), ("truth", truth(*case))):
            runs[kind].append(trained(name, values))
        for key, value in metrics.items():
            parts = [of_rank[key] for _, of_rank in ranks]
            whole = parts[0] if key == "label_tokens" else sum(parts)
            torch.testing.assert_close(whole, value)
        assert all(of_rank["label_tokens"] == metrics["label_tokens"] for _, of_rank in ranks)
    packs.compare(*runs.values(), f"{name} on {world} ranks")


def test_eight_ranks(rank_pools, truth, plain):
    cases = [("experts", seed, pack) for pack in ("clips", "tiny", "mixed") for seed in SEEDS]
    results = rank_pools(8).run(worker.parts, cases, timeout=180)
    rank_pools(8).close()
    found = [total([values for values, _ in ranks]) for ranks in zip(*results, strict=True)]
    naive, exact = [plain(*case) for case in cases], [truth(*case) for case in cases]
    packs.compare(found, naive, exact, "experts on 8 ranks")


@pytest.mark.parametrize("name", ["experts", "dense"])
def test_recomputation_and_another_forward_change_no_bit_and_move_no_rows(rank_pools, name):
    """And a forward sends what the plan says: keys, states, halos, vision tokens and loads of experts."""
    for plan, sent in rank_pools(3).run(worker.bits, name, "mixed", "clips", timeout=120):
        assert sent[0][0] == plan and sent[0][1] > 0
        assert sent[1] == sent[0] and sent[2] == sent[0]


def test_logits_are_one_ranks_on_every_rank(rank_pools, tmp_path):
    pack = "mixed"
    model, twin = their_twin(tmp_path, "experts", 0)
    with models.Exact(), torch.no_grad():
        true = torch.cat([twin(**packs.as_row(d, torch.float64)).logits[0] for d in DOCUMENTS[pack]])
    for rows in (None, [0, 5, len(true) - 1, 5], []):
        results = rank_pools(3).run(worker.evaluate, "experts", pack, rows)
        assert all(torch.equal(found, results[0]) for found in results)
        with torch.no_grad():
            naive = model.logits(PACKS[pack], rows)
        chosen = slice(None) if rows is None else torch.tensor(rows, dtype=torch.int64)
        assert_as_good_as(results[0], naive, true[chosen], name="logits")


def test_a_tower_that_trains_is_not_shared_over_tensor_parallel_ranks(ranks):
    for message in ranks.run(worker.refused):
        assert "mesh_dims is ['cp', 'tp'] and the vision tower trains" in message


@pytest.mark.parametrize("pack", ["clips", "padding"])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_tower_that_returns_a_token_too_few_on_one_rank_raises_on_every_rank(rank_pools, pack, rank):
    with pytest.raises(RanksFailed) as failed:
        rank_pools(3).run(worker.one_token_too_few, "experts", pack, rank, timeout=30, grace=20)
    assert sorted(failed.value.reports) == [0, 1, 2]
    assert all("tokens, its frames make" in text for text in failed.value.reports.values())


def test_a_bad_batch_on_one_rank_raises_on_every_rank(rank_pools):
    with pytest.raises(RanksFailed) as failed:
        rank_pools(2).run(worker.bad_batch, 1, timeout=30, grace=20)
    assert sorted(failed.value.reports) == [0, 1]
    assert all("image_grid_thw asks for" in text for text in failed.value.reports.values())


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_frames_are_shared_where_that_is_enabled(ranks, training):
    rows = len(PACKS["clips"]["pixel_values"]) + len(PACKS["clips"]["pixel_values_videos"])
    assert ranks.run(worker.rows_seen, "clips", False, training) == [[rows], [rows]]
    shared = ranks.run(worker.rows_seen, "clips", True, training)
    assert [len(seen) for seen in shared] == [1, 1] and sum(seen for (seen,) in shared) == rows


@pytest.mark.parametrize("case", ["tower", "batch"])
def test_a_forward_that_raised_on_every_rank_leaves_nothing_behind(ranks, case):
    for before, after, raised in ranks.run(worker.raises_first, "clips", case):
        assert raised and before == after


# what one rank does otherwise: words of the message
DISAGREEMENTS = {
    "documents": "a plan of 1 documents",
    "media": "vision tokens",
    "dtype": "torch.bfloat16",
    "tower": 'KeyError: "the tower\'s own"',
    "sharding": "vision tokens",
    "prediction": "vision tokens",
    "auxiliary loss": "loads of experts",
}


@pytest.mark.parametrize(("world", "odd"), [(2, 1), (3, 1)])
def test_a_rank_that_does_otherwise_is_named_by_every_rank(rank_pools, world, odd):
    found = rank_pools(world).run(worker.disagreements, list(DISAGREEMENTS), odd, timeout=120)
    rank_pools(world).close()
    for (case, words), answers in zip(DISAGREEMENTS.items(), zip(*found, strict=True), strict=True):
        for rank, (text, named, took) in enumerate(answers):
            assert words in text and took < 20, (case, rank, text, took)
            assert named == odd or (rank == odd and case == "tower"), (case, rank, text)


@pytest.mark.parametrize("chosen", [("mixed", "clips"), ("text", "clips")], ids="-".join)
def test_a_mesh_with_data_parallelism(rank_pools, truth, plain, chosen):
    """dp 2 x cp 2 under FSDP2: gradients are those of one rank that has both packs, one without media among them."""
    name = "experts"
    results = rank_pools(4).run(worker.on_mesh, name, chosen, label_count(chosen), timeout=120)
    found = {**results[0], "loss": torch.stack([of_rank["loss"] for of_rank in results]).sum()}
    packs.compare([found], [plain(name, 0, *chosen)], [truth(name, 0, *chosen)], "dp 2 x cp 2")
