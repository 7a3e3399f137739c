"""How many held-out conversations the model answers right."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from .calls import calls_of, cross_entropy_sum

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
        return self.right / max(self.total, 1)

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

    batch_size: samples of one forward, which the ranks of a "cp" group share.

    A conversation counts as right when the model's first choice is right at every token of its answers, each after
    the right beginning: just then greedy decoding writes the whole answer; what has no label, as what stands for a bad
    sample, counts nowhere. Every rank runs the same number of
    forwards; a rank without a sample left runs the first one and counts nothing, and of ranks that share a forward
    one counts.
    """
    calls = calls_of(model)
    model.eval()
    counts = torch.zeros(2, len(KINDS), dtype=torch.float64, device=runtime.device)
    losses = torch.zeros(2, dtype=torch.float64, device=runtime.device)
    with torch.no_grad():
        for first in range(0, len(dataset), batch_size * runtime.dp_size):
            start = first + batch_size * runtime.dp_rank
            indices = range(start, min(start + batch_size, len(dataset)))
            samples = [dataset[i] for i in indices or [0]]
            answers = calls.answers(model, calls.collate(samples, processor), runtime)
            if indices and runtime.speaks:
                right, asked, loss = _score(*answers, len(samples))
                kinds = torch.nn.functional.one_hot(_kinds(samples), len(KINDS)).to(counts)
                counts += torch.stack([right.to(counts) @ kinds, asked.to(counts) @ kinds])
                losses += loss
    dist.all_reduce(counts)
    dist.all_reduce(losses)
    model.train()
    loss, labels = losses.tolist()
    columns = zip(KINDS, counts.t().long().tolist(), strict=True)
    parts = {kind: tuple(column) for kind, column in columns if column[1]}
    return Evaluation(int(counts[0].sum()), int(counts[1].sum()), loss / max(labels, 1), parts)


def _score(logits, labels, sample, samples):
    """(bool [samples] answered right, bool [samples] has a label, fp64 [2] summed cross-entropy and labels): logits
    [n, V], labels [n], and the sample that each is of [n]."""
    labelled, wrong = torch.zeros(2, samples, dtype=torch.int64, device=labels.device)
    labelled.index_add_(0, sample, torch.ones_like(sample))
    wrong.index_add_(0, sample, (logits.argmax(-1) != labels).long())
    loss = torch.stack([cross_entropy_sum(logits, labels).double(), labelled.sum().double()])
    return (labelled > 0) & (wrong == 0), labelled > 0, loss


def _kinds(samples):
    """int64 [n]: the index in KINDS of each sample."""
    present = [[len(s["video_grid_thw"]) > 0, len(s["image_grid_thw"]) > 0, True] for s in samples]
    return torch.tensor([flags.index(True) for flags in present])


def _share(right, total):
    return f"{100 * right / max(total, 1):.1f} % ({right} of {total})"
