"""How many held-out conversations the model answers right."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..data.collate import collate
from ..data.encode import IGNORE_INDEX
from .step import cross_entropy_sum, model_inputs

KINDS = ("video", "image", "text")  # what a conversation is about: the first of these that is in it


@dataclass
class Evaluation:
    """parts: (right, total) of every kind of conversation that there is, by its name in KINDS."""

    right: int
    total: int
    loss: float
    parts: dict

    @property
    def accuracy(self):
        return self.right / self.total

    def describe(self):
        """One line for people, or two where there is more than one kind."""
        lines = [f"held-out accuracy: {_share(self.right, self.total)}"]
        if len(self.parts) > 1:
            lines.append(", ".join(f"{kind}s {_share(*counts)}" for kind, counts in self.parts.items()))
        return "\n  ".join(lines)

    def row(self):
        """What a row of validation.jsonl says besides the step."""
        row = {"loss": self.loss, "accuracy": self.accuracy}
        if len(self.parts) > 1:
            row |= {f"accuracy_{kind}": right / total for kind, (right, total) in self.parts.items()}
        return row


def evaluate(model, dataset, processor, *, batch_size, runtime):
    """Reads every sample of `dataset` once, over all ranks. Returns the same Evaluation everywhere.

    A conversation counts as right when the model's first choice is right at every token of its answers, each after
    the right beginning: just then greedy decoding writes the whole answer. Every rank runs the same number of
    forwards; a rank without a sample left runs the first one and counts nothing.
    """
    model.eval()
    counts = torch.zeros(2, len(KINDS), dtype=torch.float64, device=runtime.device)
    losses = torch.zeros(2, dtype=torch.float64, device=runtime.device)
    with torch.no_grad():
        for first in range(0, len(dataset), batch_size * runtime.world):
            start = first + batch_size * runtime.rank
            indices = range(start, min(start + batch_size, len(dataset)))
            samples = [dataset[i] for i in indices or [0]]
            batch = collate(samples, processor)
            logits = model(**model_inputs(batch, runtime.device, model.config), use_cache=False).logits
            if indices:
                right, loss = _score(logits, batch["labels"].to(runtime.device))
                kinds = torch.nn.functional.one_hot(_kinds(samples), len(KINDS)).to(counts)
                counts += torch.stack([right[: len(samples)].to(counts) @ kinds, kinds.sum(0)])
                losses += loss
    dist.all_reduce(counts)
    dist.all_reduce(losses)
    model.train()
    loss, labels = losses.tolist()
    columns = zip(KINDS, counts.t().long().tolist(), strict=True)
    parts = {kind: tuple(column) for kind, column in columns if column[1]}
    return Evaluation(int(counts[0].sum()), len(dataset), loss / max(labels, 1), parts)


def _score(logits, labels):
    """(bool [B] rows answered right, fp64 [2] summed cross-entropy and labels)."""
    is_label = labels != IGNORE_INDEX
    right = ((logits.argmax(-1) == labels) | ~is_label).all(-1) & is_label.any(-1)
    return right, torch.stack([cross_entropy_sum(logits, labels).double(), is_label.sum().double()])


def _kinds(samples):
    """int64 [n]: the index in KINDS of each sample."""
    present = [[len(s["video_grid_thw"]) > 0, len(s["image_grid_thw"]) > 0, True] for s in samples]
    return torch.tensor([flags.index(True) for flags in present])


def _share(right, total):
    return f"{100 * right / total:.1f} % ({right} of {total})"
