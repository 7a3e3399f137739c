"""One rank of test_step: the gradients of one global batch, whole, into a file on rank 0."""

import sys

import torch

from automodel_c.models.export import full_state_dict
from automodel_c.recipes.calls import calls_of
from automodel_c.recipes.config import load_recipe
from automodel_c.recipes.finetune_vlm import build
from automodel_c.recipes.runtime import start_ranks
from automodel_c.recipes.step import accumulate_gradients, global_counts

WAYS = [(True, False), (False, False), (True, True), (False, True)]  # reduced in every microbatch; recomputed


def gradients(recipe, path):
    """Saves {"lm", "aux", "mtp", "labels", "gradients"} of the first global batch of `recipe` to `path`, a list: in
    each of WAYS."""
    with start_ranks(recipe) as runtime:
        run = build(recipe, runtime)
        batches = _first_batches(run)
        results = [_gradients(run, batches, *way) for way in WAYS]
        if runtime.is_main:
            torch.save(results, path)


def _gradients(run, batches, per_microbatch, recompute):
    run.model.recompute(recompute)
    labels, _ = global_counts(run.model, batches, run.runtime)
    losses = accumulate_gradients(run.model, batches, labels, runtime=run.runtime, per_microbatch=per_microbatch)
    for value in losses.values():
        torch.distributed.all_reduce(value)
    weights = {}
    for parameter in run.model.parameters():
        weights[parameter] = parameter.data
        parameter.data, parameter.grad = parameter.grad.clone(), None
    state = full_state_dict(run.model)
    for parameter, weight in weights.items():
        parameter.data = weight
    return {**{name: value.item() for name, value in losses.items()}, "labels": labels, "gradients": state}


def _first_batches(run):
    """This rank's first microbatches; four packs of the global batch lose their labels, so that ranks hold different
    label counts."""
    collate, runtime, made = calls_of(run.model).collate, run.runtime, []
    for number, indices in enumerate(list(run.sampler)[: run.sampler.microbatches]):
        first = (number * runtime.dp_size + runtime.dp_rank) * len(indices)
        samples = [dict(run.dataset[i]) for i in indices]
        for at, sample in enumerate(samples, first):
            if at in (0, 1, 2, 5):
                sample["labels"] = torch.full_like(sample["labels"], -100)
        made.append(collate(samples, run.processor))
    return made


if __name__ == "__main__":
    gradients(load_recipe(sys.argv[1], sys.argv[3:]), sys.argv[2])
