"""How many held-out conversations the model answers right."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..data.collate import collate
from ..data.encode import IGNORE_INDEX
from .step import cross_entropy_sum, model_inputs


@dataclass
class Evaluation:
    right: int
    total: int
    loss: float

    @property
    def accuracy(self):
        return self.right / self.total


def evaluate(model, dataset, processor, *, batch_size, runtime):
    """Reads every sample of `dataset` once, over all ranks. Returns the same Evaluation everywhere.

    A conversation counts as right when the model's first choice is right at every token of its answers, each after
    the right beginning: just then greedy decoding writes the whole answer. Every rank runs the same number of
    forwards; a rank without a sample left runs the first one and counts nothing.
    """
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=runtime.device)
    with torch.no_grad():
        for first in range(0, len(dataset), batch_size * runtime.world):
            start = first + batch_size * runtime.rank
            indices = range(start, min(start + batch_size, len(dataset)))
            batch = collate([dataset[i] for i in indices or [0]], processor)
            logits = model(**model_inputs(batch, runtime.device), use_cache=False).logits
            if indices:
                sums += _score(logits, batch["labels"].to(runtime.device))
    dist.all_reduce(sums)
    model.train()
    right, loss, labels = sums.tolist()
    return Evaluation(int(right), len(dataset), loss / max(labels, 1))


def _score(logits, labels):
    """fp64 [3]: conversations answered right, summed cross-entropy, labels."""
    is_label = labels != IGNORE_INDEX
    right = ((logits.argmax(-1) == labels) | ~is_label).all(-1) & is_label.any(-1)
    values = (right.sum(), cross_entropy_sum(logits, labels), is_label.sum())
    return torch.stack([value.double() for value in values])
