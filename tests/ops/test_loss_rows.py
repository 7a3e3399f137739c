"""linear_cross_entropy as CUDA runs it, all rows through and logits kept by row, on the CPU's kernels."""

import itertools

import pytest
import torch

import automodel_c as amc
from automodel_c import _amcore
from automodel_c.ops import _loss_rows, loss
from automodel_c.reference import loss as reference
from tests.ops import test_loss
from tests.ops.test_loss import compare, naive_linear, problem, run

DTYPES = test_loss.DTYPES
# what the CPU's own way is asked
test_all_shapes = test_loss.test_linear_cross_entropy
test_ignored_rows_may_hold_nan = test_loss.test_ignored_rows_may_hold_nan
test_backward_again = test_loss.test_backward_again
test_frozen_weight_or_hidden = test_loss.test_frozen_weight_or_hidden
test_checkpoint_compile_and_meta = test_loss.test_checkpoint_compile_and_meta
test_no_label_gives_zero = test_loss.test_no_label_gives_zero
test_count_of_zero_with_labels_gives_zero = test_loss.test_count_of_zero_with_labels_gives_zero
test_no_rows = test_loss.test_no_rows
test_ignore_index_and_label_dtypes = test_loss.test_ignore_index_and_label_dtypes
test_strided_inputs = test_loss.test_strided_inputs
test_errors = test_loss.test_errors
test_linear_shape_errors = test_loss.test_linear_shape_errors
NEAR = _loss_rows.WORKSPACE


@pytest.fixture(autouse=True)
def _rows_with_small_chunks(monkeypatch):
    monkeypatch.setattr(loss, "_by_rows", lambda hidden: True)
    for name, value in {"WIDEST": 256, "LEAST_SCRATCH": 1}.items():
        monkeypatch.setattr(_loss_rows, name, value)


def layout_of(hidden, weight, extra_bytes, grad_dtype=None, needs=(True, True)):
    return _loss_rows.layout_of(hidden, weight, grad_dtype or weight.dtype, True, needs, extra_bytes)


@DTYPES
@pytest.mark.parametrize("extra", [0, 110_000, 1 << 20], ids=["least", "some", "all"])
@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)], ids=["both", "hidden", "weight"])
def test_rows_kept_or_made_again_change_no_bit(seed, needs, extra, dtype):
    hidden, weight, labels = problem(41, 901, 8, dtype)
    inputs = [x.requires_grad_(need) for x, need in zip((hidden, weight), needs, strict=True)]
    wanted = [x for x, need in zip(inputs, needs, strict=True) if need]
    extra_bytes = NEAR + extra * dtype.itemsize // 4
    width, in_grad, beside = layout_of(hidden, weight, extra_bytes, needs=needs)
    assert width == 256 and (in_grad == 7) is needs[1] and (beside == 4) is (extra == 1 << 20)
    assert (beside == 0) is (extra == 0)
    value = amc.ops.linear_cross_entropy(hidden, weight, labels, extra_bytes=extra_bytes)
    first = torch.autograd.grad(value, wanted, retain_graph=True)
    again = torch.autograd.grad(value, wanted)
    assert all(map(torch.equal, first, again))
    with torch.no_grad():
        assert torch.equal(value, amc.ops.linear_cross_entropy(hidden, weight, labels, extra_bytes=extra_bytes))


@DTYPES
@pytest.mark.parametrize("extra", [0, 30_000], ids=["least", "some"])
def test_parts_by_the_error_rule(seed, extra, dtype):
    *tensors, labels = problem(57, 1333, 12, dtype)
    ours = lambda h, w, y, **o: amc.ops.linear_cross_entropy(h, w, y, extra_bytes=NEAR + extra, **o)  # noqa: E731
    compare("parts", ours, naive_linear, reference.linear_cross_entropy, tensors, labels, upstream=0.3)


def test_float32_gradient_of_a_bfloat16_weight(seed):
    hidden, weight, labels = problem(60, 704, 16, torch.bfloat16)
    expected = run(amc.ops.linear_cross_entropy, [hidden, weight], labels)
    weight.requires_grad_().grad_dtype = torch.float32
    amc.ops.linear_cross_entropy(hidden, weight, labels).backward()
    assert weight.grad.dtype == torch.float32 and torch.equal(weight.grad.bfloat16(), expected[2])
    assert not torch.equal(weight.grad, expected[2].float())
    assert layout_of(hidden, weight, 0, torch.float32).in_grad == 32 and layout_of(hidden, weight, 0).in_grad == 16


def test_memory_is_within_its_bound(monkeypatch):
    """At the published vocabulary: what is allocated beyond the gradients, counted, not measured."""
    for name, value in {"WIDEST": 8192, "LEAST_SCRATCH": 1 << 26}.items():
        monkeypatch.setattr(_loss_rows, name, value)
    weight = torch.empty(248_320, 3072, dtype=torch.bfloat16, device="meta")
    for tokens, wide, extra in itertools.product((256, 8192, 16384), (False, True), (300 << 20, 1 << 30)):
        hidden = torch.empty(tokens, 3072, dtype=torch.bfloat16, device="meta")
        layout = layout_of(hidden, weight, extra, torch.float32 if wide else torch.bfloat16)
        _, beside = _loss_rows.sizes_of(layout, hidden, weight, True)
        used = 2 * (beside + tokens * layout.width) + 4 * hidden.numel() + _loss_rows.WORKSPACE
        assert used <= extra, f"{tokens} rows, {layout}: {used >> 20} MiB of {extra >> 20}"
        assert layout.width >= 1024 and layout.in_grad == min(tokens, 6144 if wide else 3072)
        assert extra - used < 2 * (tokens - layout.in_grad) * layout.width or tokens == layout.in_grad


def test_join_of_ranks(seed):
    """Statistics of four ranks, one of which has no words and one only infinities, are those of all words."""
    logits = 5.0 * torch.randn(7, 90)
    logits[:, 60:] = -torch.inf
    logits[6] = -torch.inf
    targets = torch.randint(0, 60, (7,))
    whole, parts = torch.empty(3, 7), torch.empty(4, 3, 7)
    for out, first, end in (
        (whole, 0, 90),
        (parts[0], 0, 30),
        (parts[1], 30, 30),
        (parts[2], 30, 60),
        (parts[3], 60, 90),
    ):
        out.copy_(torch.tensor([[-torch.inf], [0.0], [0.0]]).expand(3, 7))
        _amcore.linear_cross_entropy_chunk(out, logits[:, first:end].contiguous(), targets, first=first)
    found = torch.full((3, 9), torch.nan)[:, 1:8]
    _amcore.linear_cross_entropy_join(found, parts)
    assert torch.equal(found[0], whole[0]) and torch.equal(found[2], whole[2])
    torch.testing.assert_close(found[1], whole[1], rtol=1e-6, atol=0, equal_nan=True)
    with pytest.raises(ValueError, match=r"stats must be float32 \[3, 7\]"):
        _amcore.linear_cross_entropy_join(found[:, :6], parts)
    with pytest.raises(ValueError, match="parts must be contiguous float32"):
        _amcore.linear_cross_entropy_join(found, parts[:, :2])


def test_mask_and_targets():
    labels = torch.tensor([3, -100, 0], dtype=torch.int32)
    targets, count = torch.empty(3, dtype=torch.int64), torch.empty((), dtype=torch.int64)
    hidden, weight = torch.ones(3, 2), torch.zeros(4, 2)
    _amcore.linear_cross_entropy_targets(targets, count, hidden, weight, labels, vocab=4, ignore_index=-100)
    assert targets.tolist() == [3, -1, 0] and count == 2
    out = torch.empty(3, 2, dtype=torch.bfloat16)
    _amcore.linear_cross_entropy_mask(out, hidden, targets)
    assert out.tolist() == [[1, 1], [0, 0], [1, 1]]
    with pytest.raises(TypeError, match="rows is bfloat16"):
        _amcore.linear_cross_entropy_mask(hidden, out, targets)
    with pytest.raises(ValueError, match="targets must be contiguous int64 of at least 3"):
        _amcore.linear_cross_entropy_mask(out, hidden, targets[:2])
