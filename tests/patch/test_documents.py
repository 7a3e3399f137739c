"""Where the patched model sees documents begin."""

import numpy as np
import pytest
import torch

from automodel_c.models.patch.documents import TextPlan, find_documents, three_axes
from automodel_c.partition import Pack


def docs(shape, **told):
    positions = told.pop("position_ids", None)
    deciding, _ = three_axes(positions, shape, "cpu")
    return find_documents(shape, position_ids=deciding, **told).docs.tolist()


def T(*rows):
    return torch.tensor(rows)


@pytest.mark.parametrize(
    ("shape", "told", "expected"),
    [
        ((1, 4), {}, [[0, 4]]),
        ((2, 3), {}, [[0, 3], [3, 6]]),
        ((1, 5), {"position_ids": torch.tensor([0, 1, 2, 0, 1])}, [[0, 3], [3, 5]]),
        ((1, 5), {"position_ids": T([0, 1, 2, 0, 1])}, [[0, 3], [3, 5]]),
        ((1, 3), {"position_ids": T([0, 0, 0])}, [[0, 1], [1, 2], [2, 3]]),
        ((1, 4), {"position_ids": T([[0, 1, 0, 1]], [[5, 5, 5, 5]], [[5, 5, 5, 5]], [[5, 5, 5, 5]])}, [[0, 2], [2, 4]]),
        ((1, 5), {"position_ids": T([[0, 0, 0, 0, 0]], [[0, 0, 1, 1, 0]], [[0, 1, 0, 1, 0]])}, [[0, 4], [4, 5]]),
        ((1, 2), {"position_ids": torch.zeros(3, 1, 2, dtype=torch.int64)}, [[0, 1], [1, 2]]),
        ((1, 6), {"attention_mask": T([1, 1, 2, 2, 2, 0])}, [[0, 2], [2, 5]]),
        ((2, 4), {"attention_mask": T([1, 1, 2, 0], [1, 2, 2, 3])}, [[0, 2], [2, 3], [4, 5], [5, 7], [7, 8]]),
        ((1, 5), {"attention_mask": T([2, 0, 2, 1, 1])}, [[0, 1], [2, 3], [3, 5]]),
        ((2, 3), {"attention_mask": T([1, 1, 0], [0, 1, 1])}, [[0, 2], [4, 6]]),
        ((2, 3), {"attention_mask": T([1, 1, 0], [0, 1, 1]).bool()}, [[0, 2], [4, 6]]),
        ((1, 4), {"attention_mask": T([1, 1, 1, 1]), "position_ids": T([0, 1, 0, 1])}, [[0, 2], [2, 4]]),
        ((1, 5), {"attention_mask": T([1, 1, 0, 1, 1]), "position_ids": T([0, 1, 9, 0, 1])}, [[0, 2], [3, 5]]),
        ((2, 3), {"attention_mask": T([0, 0, 0], [1, 1, 1])}, [[3, 6]]),
        ((1, 5), {"cu_seqlens": [0, 2, 2, 4]}, [[0, 2], [2, 2], [2, 4]]),
        ((2, 3), {"cu_seqlens": T(0, 1, 3, 6)}, [[0, 1], [1, 3], [3, 6]]),
        ((1, 3), {"cu_seqlens": [0, 1, 3], "attention_mask": T([1, 1, 1])}, [[0, 1], [1, 3]]),
        ((1, 0), {}, []),
    ],
)  # fmt: skip
def test_find_documents(shape, told, expected):
    assert docs(shape, **told) == expected


@pytest.mark.parametrize(
    ("shape", "told", "words"),
    [
        ((1, 4), {"attention_mask": torch.ones(1, 1, 4, 4)}, r"attention_mask has shape \[1, 1, 4, 4\]"),
        ((1, 4), {"attention_mask": T([1, 0, 1, 1])}, "padding inside the document that goes on at token 2 of row 0"),
        ((2, 3), {"cu_seqlens": [0, 4, 6]}, "across two of the 2 rows"),
        ((1, 3), {"cu_seqlens": [0, 4]}, "3 tokens, the pack ends at 4"),
        ((1, 3), {"cu_seqlens": [0, 3], "attention_mask": T([1, 1, 2])}, "both describe"),
        ((1, 3), {"position_ids": T([0, 1])}, r"position_ids has shape \[1, 1, 2\]"),
    ],
)
def test_find_documents_refuses(shape, told, words):
    with pytest.raises(ValueError, match=words):
        docs(shape, **told)


def test_plan_knows_padding_and_rows():
    def plan(ids, shape):
        return TextPlan(Pack(doc_ids=np.array(ids)), shape, torch.zeros(3, len(ids), dtype=torch.int64), None)

    whole = plan([1, 1, 2, 2], (2, 2))
    assert whole.padding is None and whole.row_mask is None and not whole.packed
    rows = plan([1, 1, 0, 0, 2, 2], (2, 3))
    assert rows.padding.tolist() == [False, False, True, True, False, False] and not rows.packed
    assert rows.row_mask.tolist() == [[True, True, False], [False, True, True]]
    several = plan([1, 2, 0], (1, 3))
    assert several.packed and several.row_mask is None and several.padding.tolist() == [False, False, True]
