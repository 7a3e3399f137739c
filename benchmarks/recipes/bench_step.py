"""A training step's forward and backward on the model of examples/digits.yaml, beside transformers' own.

The same fp32 weights and the same microbatch of packs. transformers' gated delta net knows no documents on a CPU, so a
pack would be another model to it: its model gets every conversation as a row, padded to the longest, the fewest tokens
that it can take in one forward and give the same loss. Experts run in each of transformers' ways.

    python -m benchmarks.recipes.bench_step

Needs the packages of the extra `train`; writes the digits to .cache/digits where they are not there yet.
"""

import math
import tempfile

import torch
import transformers
from transformers import AutoModelForImageTextToText

from automodel_c.data.build import build_dataset, prepare_data
from automodel_c.data.packing import build_packs
from automodel_c.data.sampler import GlobalBatchSampler
from automodel_c.models import qwen3_5
from automodel_c.models.build import build_model
from automodel_c.recipes.calls import OwnCalls, TransformersCalls
from automodel_c.recipes.config import load_recipe
from benchmarks.harness import ROOT, Case, main
from benchmarks.peers import Peer
from tests.numerics import assert_as_good_as
from tests.patch.models import Exact, in_float64

EXPERTS = ("eager", "batched_mm", "grouped_mm")


def cases():
    recipe = load_recipe(ROOT / "examples/digits.yaml", ["model.operators=transformers", *PLAIN])
    torch.manual_seed(recipe.seed)
    theirs, processor = build_model(recipe.model, recipe.processor, "from_config", "build")
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = qwen3_5.load(folder, dtype=torch.float32)
        twins = {name: _loaded(folder, name) for name in EXPERTS}
    packs, conversations = _microbatch(processor)
    packed, rows = OwnCalls.collate(packs, processor), TransformersCalls.collate(conversations, processor)
    count = int((packed["labels"] != -100).sum())
    tokens, padded = OwnCalls.tokens(packed), rows["input_ids"].numel()
    assert TransformersCalls.tokens(rows) == tokens
    shape = f"{tokens} tokens, {len(conversations)} documents; rows of {rows['input_ids'].shape[1]}: {padded}"
    peers = [_peer(name, twin, rows, count) for name, twin in twins.items()]
    gate = _gate(twins["eager"], rows, count)
    yield Case("step", "fwd+bwd", shape, "float32", _step(OwnCalls, ours, packed, count), gate, peers)


def _peer(experts, model, rows, count):
    call = _step(TransformersCalls, model, rows, count)
    return Peer(f"transformers, {experts}", transformers.__version__, lambda _: call)


PLAIN = ("packed_sequence.enabled=false", "loss_fn._target_=MaskedCrossEntropy")


def _loaded(folder, experts):
    options = {"dtype": torch.float32, "experts_implementation": experts}
    return AutoModelForImageTextToText.from_pretrained(folder, **options).train()


def _microbatch(processor):
    """(the packs of the first microbatch of examples/digits.yaml on one of two ranks, their conversations)."""
    recipe = load_recipe(ROOT / "examples/digits.yaml")
    recipe.dataset.path_or_dataset = str(ROOT / ".cache/digits")
    prepare_data("digits", recipe.dataset)
    dataset = build_dataset(recipe.dataset, processor, recipe.seed)
    packed = build_packs(dataset, recipe.packed_sequence, shuffle=False)
    steps = recipe.step_scheduler
    chosen = next(iter(GlobalBatchSampler(
        len(packed), global_batch_size=steps.global_batch_size, local_batch_size=steps.local_batch_size, dp_rank=0,
        dp_size=2, seed=recipe.seed,
    )))  # fmt: skip
    return [packed[i] for i in chosen], [dataset[i] for pack in chosen for i in packed.packs[pack]]


def _step(calls, model, batch, count):
    """A call that runs forward and backward and returns (loss, model), whose gradients are those of this call."""
    parameters = list(model.parameters())

    def run():
        for parameter in parameters:
            parameter.grad = None
        losses = calls.losses(model, batch, count, 1.0, torch.device("cpu"), fused=True)  # each with its own loss
        losses.total.backward()
        return losses.lm.detach(), model

    return run


def _gate(model, rows, count):
    """Loss and the gradient of all weights against transformers in float64; its float32 is the plain twin."""

    def gate(outcomes):
        wide = {k: v.double() if v is not None and v.is_floating_point() else v for k, v in rows.items()}
        with Exact():
            truth = _told(*_step(TransformersCalls, in_float64(model), wide, count)())
        numbers = {}
        naive = _told(*outcomes["transformers, eager"])
        for name in outcomes:
            found = _told(*outcomes[name])
            told, true = found["loss"].item(), truth["loss"].item()
            assert math.isclose(told, true, rel_tol=1e-6), f"{name}: loss {told}, transformers in float64 {true}"
            numbers[name] = assert_as_good_as(found["gradient"], naive["gradient"], truth["gradient"], name=name)
        return numbers

    return gate


def _told(loss, model):
    whole = [(name, p.grad.flatten()) for name, p in model.named_parameters() if p.grad is not None]
    return {"loss": loss, "gradient": torch.cat([gradient for _, gradient in sorted(whole, key=lambda part: part[0])])}


if __name__ == "__main__":
    main("step", {"digits": cases})
