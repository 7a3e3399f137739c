"""A training step's forward and backward on the model of examples/digits.yaml, beside transformers' own.

The same fp32 weights and the same microbatch of packs: 507 tokens in 21 documents. What a user of transformers runs on
it, on a CPU: its gated delta net knows no documents there, so that the pack as one row is another model to it. Two ways
give the same loss and gradients: every conversation as a row, padded to the longest, the fewest tokens that it can take
in one forward, with experts in each of its ways; and the documents one by one. The pack as one row is timed too, and is
not held against the gate: it is wrong. Python's collector is off, as in the recipe.

    python -m benchmarks.recipes.bench_step

Bar, two threads: 4 times faster than transformers on the same pack.

Where the time goes, two quiet cores of Zen 4 (AVX-512), before any of what follows: 45 ms against 106 on padded rows.
The dense layers are 2.05 GFLOP, 24.4 ms of torch's products on one thread (84 of 116 GFLOP/s) and 13.7 on two; our
kernels 20.7 and 13.3 (experts 9.2 and 5.4, attention 2.8 and 1.8, the rule 2.7 and 1.6); autograd, allocation and
Python 10 to 12 on one thread whatever the threads. A quarter of 106 ms is 26: 13 ms for all that is not torch's
products.

Tried, each by itself:
  - OpenMP's team for our loops instead of threads of ours: 44.9 to 37.6 ms on two threads, one as it was. torch's
    idle thread spins on the second core after every product, and a woken worker found none free. On cores that others
    use too, a team waits for its last thread: `rms_norm` of 507 x 128 took 9.4 ms in the median at load 12, on our
    workers 0.14. So the pool leaves a team that came late alone for a while: 0.7.
  - OMP_WAIT_POLICY=passive instead, with threads of ours: 56 ms, and transformers 234: every loop pays a wake-up.
  - mixers, experts and tower blocks as one node of autograd each, gradients of inputs added by the products: 2 of 58 ms
    on one thread (three runs: 60.7 to 58.6, 72.2 to 69.1, 57.7 to 55.7), for 400 lines; not taken up. Calls from Python
    to torch and to us are as many, only autograd's own nodes, views and sums are gone.
  - on top, products of one input side by side, weights copied together (in the figures of the three runs): other bits
    than the parts give; not taken up.
  - the last layer's experts, norms and head on rows with a label alone, 45 of 507: 64.8 to 61.4 ms on one thread.
  - glibc kept from giving memory back (MALLOC_TRIM_THRESHOLD_, MALLOC_TOP_PAD_): nothing, 60.0 to 60.8 against 60.8 to
    62.9; no page fault a step is counted.
  - Python's collector off: 70.4 to 64.3 ms of one thread; it was on in the figures above.
What is left over one thread's 24 of products: our kernels, whose products run at their 107 GFLOP/s, and some thousand
calls from Python to torch and to us, 5 to 10 us each with caches that a step empties. Fewer calls, a kernel of ours for
all of a mixer between its products, would be next.

Needs the packages of the extra `train`; writes the digits to .cache/digits where they are not there yet.
"""

import gc
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
ALONE = "transformers, documents one by one"
LEAKING = "transformers, the pack as one row (wrong: states leak)"


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
    peers = [_peer(f"transformers, {name}", _step(TransformersCalls, x, rows, count)) for name, x in twins.items()]
    documents = [TransformersCalls.collate([conversation], processor) for conversation in conversations]
    peers += [
        _peer(ALONE, _alone(twins["eager"], documents, count)),
        _peer(LEAKING, _step(TransformersCalls, twins["eager"], _one_row(packed), count)),
    ]
    gate = _gate(twins["eager"], rows, count)
    yield Case("step", "fwd+bwd", shape, "float32", _step(OwnCalls, ours, packed, count), gate, peers)


def _peer(name, call):
    return Peer(name, transformers.__version__, lambda _: call)


def _one_row(packed):
    """The pack as one row, positions from 0 in every document: what transformers takes for it on a CPU."""
    row = {key: packed[key][None] for key in ("input_ids", "labels", "mm_token_type_ids")}
    return {**packed, **row, "position_ids": packed["position_ids"][:, None], "attention_mask": None}


def _alone(model, documents, count):
    """As `_step` with a forward and a backward for every document."""
    steps = [_step(TransformersCalls, model, document, count, keep=True) for document in documents]

    def run():
        _clear(model)
        return sum(step()[0] for step in steps), model

    return run


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


def _step(calls, model, batch, count, keep=False):
    """A call that runs forward and backward and returns (loss, model), whose gradients are those of this call; keep:
    added to those that are there."""

    def run():
        if not keep:
            _clear(model)
        losses = calls.losses(model, batch, count, 1.0, torch.device("cpu"), fused=True)  # each with its own loss
        losses.total.backward()
        return losses.lm.detach(), model

    return run


def _clear(model):
    for parameter in model.parameters():
        parameter.grad = None


def _gate(model, rows, count):
    """Loss and the gradient of all weights against transformers in float64; its float32 is the plain twin."""

    def gate(outcomes):
        wide = {k: v.double() if v is not None and v.is_floating_point() else v for k, v in rows.items()}
        with Exact():
            truth = _told(*_step(TransformersCalls, in_float64(model), wide, count)())
        numbers = {}
        naive = _told(*outcomes["transformers, eager"])
        for name in outcomes.keys() - {LEAKING}:
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
    gc.disable()  # as the recipe runs
    main("step", {"digits": cases}, budget_s=60)
