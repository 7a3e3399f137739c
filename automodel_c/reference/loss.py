"""Cross-entropy in float64, row by row."""

import torch


def cross_entropy(logits, labels, *, num_label_tokens=None, ignore_index=-100):
    """Sum over labelled rows of logsumexp(row) - row[label], over the count; float64, 0 for a count of 0.

    logits [T, V] of any float dtype, labels [T]. Rows labelled `ignore_index` are never looked at.
    """
    rows = [t for t in range(len(labels)) if labels[t] != ignore_index]
    count = len(rows) if num_label_tokens is None else int(num_label_tokens)
    total = logits.new_zeros((), dtype=torch.float64)
    for t in rows if count else []:
        row = logits[t].double()
        total = total + torch.logsumexp(row, 0) - row[labels[t]]
    return total / max(count, 1) + 0.0 * logits[rows].double().sum()


def linear_cross_entropy(hidden, weight, labels, *, num_label_tokens=None, ignore_index=-100):
    """`cross_entropy` of the logits hidden [T, H] @ weight [V, H]^T."""
    logits = hidden.double() @ weight.double().T
    return cross_entropy(logits, labels, num_label_tokens=num_label_tokens, ignore_index=ignore_index)
