"""One rank of test_step: the gradients of one global batch, whole, into a file on rank 0."""

import sys

import torch

from automodel_c.data.collate import collate
from automodel_c.models.export import full_state_dict
from automodel_c.recipes.config import load_recipe
from automodel_c.recipes.finetune_vlm import build
from automodel_c.recipes.runtime import start_ranks
from automodel_c.recipes.step import accumulate_gradients, global_counts


def gradients(recipe, path):
    """Saves {"loss", "labels", "gradients"} of the first global batch of `recipe` to `path`, twice: in a list, reduced
    in every microbatch and then deferred."""
    with start_ranks(recipe) as runtime:
        run = build(recipe, runtime)
        batches = [_uneven(batch, i, runtime) for i, batch in enumerate(_first_batches(run))]
        results = [_gradients(run, batches, per_microbatch) for per_microbatch in (True, False)]
        if runtime.is_main:
            torch.save(results, path)


def _gradients(run, batches, per_microbatch):
    device, world = run.runtime.device, run.runtime.world
    labels, _ = global_counts(batches, device)
    losses = accumulate_gradients(
        run.model, batches, labels, device=device, world=world, per_microbatch=per_microbatch)
    torch.distributed.all_reduce(losses)
    weights = {}
    for parameter in run.model.parameters():
        weights[parameter] = parameter.data
        parameter.data, parameter.grad = parameter.grad.clone(), None
    state = full_state_dict(run.model)
    for parameter, weight in weights.items():
        parameter.data = weight
    return {"loss": losses[0].item(), "labels": labels, "gradients": state}


def _first_batches(run):
    lists = list(run.sampler)[: run.sampler.microbatches]
    return [collate([run.dataset[i] for i in indices], run.processor) for indices in lists]


def _uneven(batch, index, runtime):
    """Takes the labels of a fixed sample of the global batch away, so that ranks hold different label counts."""
    rows = batch["labels"].shape[0]
    first = (index * runtime.world + runtime.rank) * rows
    labels = batch["labels"].clone()
    for row in range(rows):
        if first + row in (0, 1, 2, 5):
            labels[row] = -100
    return {**batch, "labels": labels}


if __name__ == "__main__":
    gradients(load_recipe(sys.argv[1], sys.argv[3:]), sys.argv[2])
