"""linear_cross_entropy and cross_entropy against float64, and what their callers rely on."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import automodel_c as amc
from automodel_c import _amcore
from automodel_c.reference import loss as reference
from benchmarks.ops import bench_loss
from tests.numerics import assert_as_good_as, draws_for, pool

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
TINY = {"hidden": (6, 4), "weight": (9, 4), "labels": [0, 8, -100, 3, 3, -100]}


def problem(tokens, vocab, size, dtype, ignored=0.3, scale=1.0):
    hidden = torch.randn(tokens, size).to(dtype)
    weight = (scale * torch.randn(vocab, size)).to(dtype)
    labels = torch.randint(0, vocab, (tokens,)) if vocab else torch.full((tokens,), -100)
    labels[torch.rand(tokens) < ignored] = -100
    return hidden, weight, labels


def naive_linear(hidden, weight, labels, *, num_label_tokens=None, ignore_index=-100):
    return naive(F.linear(hidden, weight), labels, num_label_tokens=num_label_tokens, ignore_index=ignore_index)


def naive(logits, labels, *, num_label_tokens=None, ignore_index=-100):
    total = F.cross_entropy(logits.float(), labels.long(), ignore_index=ignore_index, reduction="sum")
    count = (labels != ignore_index).sum() if num_label_tokens is None else num_label_tokens
    return total / count if count else total * 0.0


def run(function, tensors, labels, upstream=1.0, **options):
    tensors = [x.detach().clone().requires_grad_() for x in tensors]
    loss = function(*tensors, labels, **options)
    return [loss.detach(), *torch.autograd.grad(loss, tensors, torch.full_like(loss, upstream))]


def compare(name, ours, plain, oracle, tensors, labels, **options):
    compare_draws(name, ours, plain, oracle, [(tensors, labels)], **options)


def compare_draws(name, ours, plain, oracle, draws, **options):
    """The error rule, asked of all draws together."""
    results = [pool([run(f, *draw, **options) for draw in draws]) for f in (ours, plain)]
    truth = pool([run(oracle, [x.double() for x in tensors], labels, **options) for tensors, labels in draws])
    for part, (a, b, c) in enumerate(zip(*results, truth, strict=True)):
        assert_as_good_as(a, b, c.double(), name=f"{name}[{part}]")


LINEAR = [
    pytest.param(1, 5, 3, id="one"),
    pytest.param(17, 511, 8, id="chunk-1"),
    pytest.param(17, 512, 8, id="chunk"),
    pytest.param(33, 513, 16, id="chunk+1"),
    pytest.param(20, 1101, 33, id="many"),
    pytest.param(9, 1, 7, id="vocab-1"),
]


@DTYPES
@pytest.mark.parametrize(("tokens", "vocab", "size"), LINEAR)
def test_linear_cross_entropy(isa, seed, tokens, vocab, size, dtype):
    draws = []
    for _ in range(draws_for(tokens, enough=32)):
        *tensors, labels = problem(tokens, vocab, size, dtype)
        labels[0] = vocab - 1
        draws.append((tensors, labels))
    ours = (amc.ops.linear_cross_entropy, naive_linear, reference.linear_cross_entropy)
    compare_draws("linear_cross_entropy", *ours, draws)
    compare_draws("global count", *ours, draws, upstream=0.7, num_label_tokens=1000)


@DTYPES
@pytest.mark.parametrize(("tokens", "vocab"), [(1, 1), (5, 63), (5, 64), (5, 65), (3, 1023), (3, 1024), (20, 2500)])
def test_cross_entropy(isa, seed, tokens, vocab, dtype):
    logits = (3.0 * torch.randn(tokens, vocab)).to(dtype)
    _, _, labels = problem(tokens, vocab, 1, dtype)
    labels[0] = vocab - 1
    ours = (amc.ops.cross_entropy, naive, reference.cross_entropy)
    compare("cross_entropy", *ours, [logits], labels)
    compare("global count", *ours, [logits], labels, upstream=-2.0, num_label_tokens=11)


@pytest.mark.parametrize("offset", [-1e4, 1e4])
def test_large_logits_lose_nothing(isa, seed, offset):
    logits = torch.randn(20, 300) * 5 + offset
    labels = torch.randint(0, 300, (20,))
    compare("offset", amc.ops.cross_entropy, naive, reference.cross_entropy, [logits], labels)


def test_infinite_logits(isa):
    logits = torch.full((3, 3000), -torch.inf)
    logits[0, 2999] = logits[1, 0] = 1.0
    logits[2] = 0.0
    labels = torch.tensor([2999, 0, 7])
    assert torch.allclose(run(amc.ops.cross_entropy, [logits], labels)[0], naive(logits, labels))
    gradient = run(amc.ops.cross_entropy, [logits], labels)[1]
    assert torch.equal(gradient[:2], torch.zeros(2, 3000)) and gradient.isfinite().all()


@DTYPES
@pytest.mark.parametrize("chunk_len", [1, 4, 32, 1000])
def test_parity_of_published_cases(seed, dtype, chunk_len):
    """Sum over chunks equals F.cross_entropy's sum; a given count divides; labels and mask meet in -100."""
    logits = torch.randn(14, 31).to(dtype)
    labels = torch.randint(0, 31, (14,))
    labels[2] = labels[12] = -100
    kept = [x.clone() for x in (logits, labels)]
    total, gradient = run(amc.ops.cross_entropy, [logits], labels, chunk_len=chunk_len, num_label_tokens=1)
    plain = F.cross_entropy(logits.float(), labels, reduction="sum")
    torch.testing.assert_close(total, plain, rtol=1e-6, atol=1e-7)
    assert gradient.dtype == dtype and (gradient[labels == -100] == 0).all()
    divided, _ = run(amc.ops.cross_entropy, [logits], labels, chunk_len=chunk_len, num_label_tokens=7)
    torch.testing.assert_close(divided, plain / 7, rtol=1e-6, atol=1e-7)
    assert torch.equal(logits, kept[0]) and torch.equal(labels, kept[1])
    assert gradient.untyped_storage().data_ptr() != logits.untyped_storage().data_ptr()


def test_cross_entropy_saves_only_the_logits(seed):
    logits = torch.randn(6, 50, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, 50, (6,))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        amc.ops.cross_entropy(logits, labels, num_label_tokens=5)
    floating = [x for x in saved if x.is_floating_point()]
    assert [x.data_ptr() for x in floating] == [logits.data_ptr()] and floating[0].dtype == torch.bfloat16


BOTH = pytest.mark.parametrize("linear", [True, False], ids=["linear", "logits"])


def call(linear, hidden, weight, labels, **options):
    if linear:
        return amc.ops.linear_cross_entropy(hidden, weight, labels, **options)
    return amc.ops.cross_entropy(hidden @ weight.T, labels, **options)


@BOTH
@DTYPES
@pytest.mark.parametrize("count", [None, 0, 9, torch.tensor(0), torch.tensor([4], dtype=torch.int32)], ids=str)
def test_no_label_gives_zero(linear, dtype, count):
    hidden, weight, labels = problem(7, 600, 8, dtype, ignored=2.0)
    function = (lambda h, w, y, **o: call(linear, h, w, y, **o), [hidden, weight], labels)
    assert all((x == 0).all() and x.isfinite().all() for x in run(*function, num_label_tokens=count))


@BOTH
def test_count_of_zero_with_labels_gives_zero(linear):
    hidden, weight, labels = problem(7, 30, 8, torch.float32, ignored=0.0)
    results = run(lambda h, w, y, **o: call(linear, h, w, y, **o), [hidden, weight], labels, num_label_tokens=0)
    assert all((x == 0).all() for x in results)


@BOTH
def test_no_rows(linear):
    labels = torch.zeros(0, dtype=torch.int64)
    results = run(lambda h, w, y: call(linear, h, w, y), [torch.zeros(0, 4), torch.ones(9, 4)], labels)
    assert [x.abs().sum().item() for x in results] == [0, 0, 0]


@DTYPES
def test_ignored_rows_may_hold_nan(isa, seed, dtype):
    hidden, weight, labels = problem(30, 700, 16, dtype)
    labels[:3] = torch.tensor([-100, 5, -100])
    clean = run(amc.ops.linear_cross_entropy, [hidden, weight], labels)
    hidden[labels == -100] = torch.nan
    dirty = run(amc.ops.linear_cross_entropy, [hidden, weight], labels)
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))
    assert (dirty[1][labels == -100] == 0).all()
    logits = torch.randn(30, 700).to(dtype)
    clean = run(amc.ops.cross_entropy, [logits], labels)
    logits[labels == -100] = torch.nan
    assert all(map(torch.equal, clean, run(amc.ops.cross_entropy, [logits], labels)))


@BOTH
def test_ignore_index_and_label_dtypes(linear, seed):
    hidden, weight, labels = problem(20, 40, 8, torch.float32)
    other = torch.where(labels == -100, 7, torch.where(labels == 7, 8, labels))
    masked = torch.where(other == 7, -100, other)
    function = lambda h, w, y, **o: call(linear, h, w, y, **o)  # noqa: E731
    expected = run(function, [hidden, weight], masked)
    for found in (
        run(function, [hidden, weight], other, ignore_index=7),
        run(function, [hidden, weight], masked.int()),
        run(function, [hidden, weight], masked.repeat_interleave(2)[::2]),
        run(function, [hidden, weight], masked, num_label_tokens=torch.tensor(int((masked != -100).sum()))),
    ):
        assert all(map(torch.equal, expected, found))


@DTYPES
def test_threads_change_no_bit(seed, dtype):
    hidden, weight, labels = problem(50, 900, 16, dtype)
    before, results = _amcore.build_info()["num_threads"], []
    for threads in (1, 2, 5):
        _amcore.set_num_threads(threads)
        results.append(run(amc.ops.linear_cross_entropy, [hidden, weight], labels))
        results[-1] += run(amc.ops.cross_entropy, [hidden @ weight.T], labels, chunk_len=threads)
    _amcore.set_num_threads(before)
    assert all(all(map(torch.equal, results[0], other)) for other in results[1:])


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**31),
    tokens=st.integers(0, 5),
    vocab=st.integers(1, 1500),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_rows_are_independent(seed, tokens, vocab, dtype):
    """Loss times count is the sum over rows, and a row's gradient does not see the other rows, in any order."""
    torch.manual_seed(seed)
    logits = torch.randn(tokens, vocab).to(dtype)
    _, _, labels = problem(tokens, vocab, 1, dtype)
    whole, gradient = run(amc.ops.cross_entropy, [logits], labels, num_label_tokens=1)
    parts = [
        run(amc.ops.cross_entropy, [logits[t : t + 1]], labels[t : t + 1], num_label_tokens=1) for t in range(tokens)
    ]
    torch.testing.assert_close(whole.double(), sum((p[0].double() for p in parts), torch.zeros((), dtype=torch.double)))
    assert all(torch.equal(gradient[t : t + 1], part[1]) for t, part in enumerate(parts))
    order = torch.randperm(tokens)
    assert torch.equal(
        run(amc.ops.cross_entropy, [logits[order]], labels[order], num_label_tokens=1)[1], gradient[order]
    )


@BOTH
def test_strided_inputs(linear, seed):
    hidden, weight, labels = problem(12, 30, 8, torch.float32)
    expected = run(lambda h, w, y: call(linear, h, w, y), [hidden, weight], labels)
    wide = torch.zeros(12, 11)
    wide[:, 2:10] = hidden
    if linear:
        strided = [wide[:, 2:10], weight.T.contiguous().T]
        found = [amc.ops.linear_cross_entropy(*strided, labels)]
    else:
        logits = torch.zeros(12, 33)
        logits[:, 1:31] = hidden @ weight.T
        found = [amc.ops.cross_entropy(logits[:, 1:31], labels)]
    torch.testing.assert_close(found[0], expected[0])


@BOTH
def test_backward_again(linear, seed):
    hidden, weight, labels = problem(9, 700, 8, torch.float32)
    hidden.requires_grad_(), weight.requires_grad_()
    loss = call(linear, hidden, weight, labels)
    first = torch.autograd.grad(loss, [hidden, weight], retain_graph=True)
    again = torch.autograd.grad(loss, [hidden, weight], retain_graph=True)
    assert all(map(torch.equal, first, again))
    graph = torch.autograd.grad(loss, hidden, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="second derivative"):
        graph.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward(), loss.backward()


@DTYPES
@pytest.mark.parametrize(("tokens", "size"), [(9, 32), (40, 32), (70, 8), (600, 8)], ids=["all", "some", "few", "none"])
def test_kept_logits_change_no_bit(seed, tokens, size, dtype):
    """Gradients from logits kept in weight's gradient, and from logits made again, after a gradient of hidden alone."""
    hidden, weight, labels = problem(tokens, 3000, size, dtype, ignored=0.0)
    hidden.requires_grad_(), weight.requires_grad_()
    first = torch.autograd.grad(amc.ops.linear_cross_entropy(hidden, weight, labels), [hidden, weight])
    loss = amc.ops.linear_cross_entropy(hidden, weight, labels)
    alone = torch.autograd.grad(loss, hidden, retain_graph=True)[0]
    again = torch.autograd.grad(loss, [hidden, weight], retain_graph=True)
    again[1].fill_(torch.nan)
    loss.backward()
    assert torch.equal(alone, first[0]) and torch.equal(again[0], first[0])
    assert torch.equal(hidden.grad, first[0]) and torch.equal(weight.grad, first[1])
    with torch.no_grad():
        assert torch.equal(amc.ops.linear_cross_entropy(hidden, weight, labels), loss)


def test_frozen_weight_or_hidden(seed):
    hidden, weight, labels = problem(9, 700, 8, torch.float32)
    both = run(amc.ops.linear_cross_entropy, [hidden, weight], labels)
    assert torch.equal(run(lambda h, y: amc.ops.linear_cross_entropy(h, weight, y), [hidden], labels)[1], both[1])
    assert torch.equal(run(lambda w, y: amc.ops.linear_cross_entropy(hidden, w, y), [weight], labels)[1], both[2])


def test_checkpoint_compile_and_meta(seed):
    hidden, weight, labels = problem(9, 700, 8, torch.float32)
    function = lambda h, w, y: amc.ops.linear_cross_entropy(h, w, y) + amc.ops.cross_entropy(h @ w.T, y)  # noqa: E731
    expected = run(function, [hidden, weight], labels)
    again = run(lambda *a: checkpoint(function, *a, use_reentrant=False), [hidden, weight], labels)
    compiled = run(torch.compile(function, fullgraph=True, backend="aot_eager"), [hidden, weight], labels)
    assert all(map(torch.equal, expected, again)) and all(map(torch.equal, expected, compiled))
    meta = function(*(x.to("meta") for x in (hidden, weight, labels)))
    assert meta.shape == () and meta.dtype == torch.float32


ERRORS = [
    ({"labels": [0, 9, 1, 1, 1, 1]}, ValueError, r"labels\[1\] is 9, neither in \[0, 9\) nor ignore_index -100"),
    ({"labels": [0, -1, 1, 1, 1, 1]}, ValueError, r"labels\[1\] is -1"),
    ({"labels": [0, 1]}, ValueError, "labels has 2 elements for 6 rows"),
    ({"labels": torch.zeros(6)}, TypeError, "labels is float32"),
    ({"labels": 3}, TypeError, "'labels' must be a torch tensor, not int"),
    ({"num_label_tokens": -3}, ValueError, "num_label_tokens is -3, it must not be negative"),
    ({"num_label_tokens": torch.tensor(-3)}, ValueError, "num_label_tokens is -3, it must not be negative"),
    ({"num_label_tokens": torch.tensor([1, 2])}, ValueError, "num_label_tokens has 2 elements"),
    ({"num_label_tokens": 2.5}, TypeError, "num_label_tokens is float"),
    ({"num_label_tokens": True}, TypeError, "num_label_tokens is bool"),
    ({"num_label_tokens": torch.tensor(2.5)}, TypeError, "num_label_tokens is float32"),
    ({"hidden": torch.zeros(6, 4, dtype=torch.float64)}, TypeError, "float64"),
]


@BOTH
@pytest.mark.parametrize(("changes", "error", "words"), ERRORS, ids=[words[:24] for _, _, words in ERRORS])
def test_errors(linear, changes, error, words):
    given_as = {"hidden": torch.zeros(6, 4), "weight": torch.zeros(9, 4), "labels": TINY["labels"], **changes}
    if isinstance(given_as["labels"], list):
        given_as["labels"] = torch.tensor(given_as["labels"])
    given_as["weight"] = given_as["weight"].to(given_as["hidden"].dtype)
    name = "linear_cross_entropy" if linear else "cross_entropy"
    with pytest.raises(error, match=f"^{name}: .*{words}"):
        call(linear, **given_as)


@pytest.mark.parametrize("chunk_len", [0, -3])
def test_chunk_len_errors(chunk_len):
    with pytest.raises(ValueError, match="chunk_len must be greater than zero"):
        amc.ops.cross_entropy(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), chunk_len=chunk_len)


@pytest.mark.parametrize(
    ("hidden", "weight", "error", "words"),
    [
        ((6, 4), (9, 5), ValueError, "weight has 5 columns, hidden has 4"),
        ((6, 4, 1), (9, 4), ValueError, "hidden has 3 axes"),
        ((6, 4), (9,), ValueError, "weight has 1 axes"),
    ],
    ids=str,
)
def test_linear_shape_errors(hidden, weight, error, words):
    with pytest.raises(error, match=f"linear_cross_entropy: {words}"):
        amc.ops.linear_cross_entropy(torch.zeros(hidden), torch.zeros(weight), torch.zeros(6, dtype=torch.int64))


def test_dtype_and_layout_errors():
    labels = torch.zeros(6, dtype=torch.int64)
    with pytest.raises(TypeError, match="weight is bfloat16, hidden is float32"):
        amc.ops.linear_cross_entropy(torch.zeros(6, 4), torch.zeros(9, 4, dtype=torch.bfloat16), labels)
    with pytest.raises(ValueError, match="logits has stride 6 on its last axis, 1 is needed"):
        amc.ops.cross_entropy(torch.zeros(9, 6).T, labels)
    with pytest.raises(ValueError, match="logits has 3 axes, 2 are needed"):
        amc.ops.cross_entropy(torch.zeros(6, 1, 9), labels)


@pytest.mark.parametrize("rows", [1, 7, 64, 100])
def test_oracle_of_the_benchmark(seed, rows):
    """It makes a vocabulary in blocks, and the last of them may be short."""
    hidden, weight, labels = problem(9, 64, 5, torch.float32, ignored=0)
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    truth = reference.linear_cross_entropy(*wide, labels)
    dhidden, dweight = torch.autograd.grad(truth, wide)
    loss, found, blocks = bench_loss.linear_oracle(hidden, weight, labels, rows)
    torch.testing.assert_close(loss, truth.detach())
    torch.testing.assert_close(found, dhidden)
    torch.testing.assert_close(torch.cat([block for _, block in blocks]), dweight)


def test_reference_gradient():
    hidden, weight, labels = problem(4, 5, 3, torch.float64)
    hidden.requires_grad_(), weight.requires_grad_()
    assert torch.autograd.gradcheck(lambda h, w: reference.linear_cross_entropy(h, w, labels), (hidden, weight))


PRODUCTS = [
    pytest.param(1, 1, 1, id="one"),
    pytest.param(3, 5, 0, id="no-depth"),
    pytest.param(0, 4, 4, id="no-rows"),
    pytest.param(11, 31, 63, id="tile-1"),
    pytest.param(12, 32, 64, id="tile"),
    pytest.param(13, 33, 65, id="tile+1"),
    pytest.param(129, 257, 515, id="block+1"),
    pytest.param(600, 40, 1030, id="many"),
]


@DTYPES
@pytest.mark.parametrize(("rows", "columns", "depth"), PRODUCTS)
@pytest.mark.parametrize("transposed", [(False, False), (False, True), (True, False)], ids=["nn", "nt", "tn"])
def test_product(isa, seed, rows, columns, depth, transposed, dtype):
    def operand(shape, flip):
        wide = torch.randn(shape[::-1] if flip else shape).to(dtype)
        padded = torch.full((wide.shape[0], wide.shape[1] + 3), torch.nan, dtype=dtype)
        padded[:, : wide.shape[1]] = wide
        view = padded[:, : wide.shape[1]]
        return view.t() if flip else view

    left, right = operand((rows, depth), transposed[0]), operand((depth, columns), transposed[1])
    scratch = torch.empty(_amcore.linear_cross_entropy_product_workspace(left), dtype=torch.uint8)
    truth = left.double() @ right.double()
    found = torch.full((rows, columns + 2), torch.nan, dtype=dtype)
    _amcore.linear_cross_entropy_product(found[:, :columns], scratch, left, right, add=False)
    assert found[:, columns:].isnan().all()
    assert_as_good_as(found[:, :columns], left @ right, truth, name="product")
    start = torch.randn(rows, columns)
    total = start.clone()
    _amcore.linear_cross_entropy_product(total, scratch, left, right, add=True)
    assert_as_good_as(total, start + left.float() @ right.float(), start.double() + truth, name="sum")


def test_product_errors():
    left, right, out = torch.randn(4, 6), torch.randn(6, 5), torch.empty(4, 5)
    scratch = torch.empty(_amcore.linear_cross_entropy_product_workspace(left), dtype=torch.uint8)

    def fails(error, words, *arguments, add=False):
        with pytest.raises(error, match=words):
            _amcore.linear_cross_entropy_product(*arguments, add=add)

    fails(ValueError, "right has 5 rows, left has 6 columns", out, scratch, left, right[:5])
    fails(ValueError, r"out is \[4, 4\]", out[:, :4], scratch, left, right)
    fails(ValueError, "strides 12 and 2", out, scratch, left, torch.randn(6, 12)[:, 1:11:2])
    fails(ValueError, "workspace has 9 bytes", out, scratch[:9], left, right)
    fails(TypeError, "right is bfloat16", out, scratch, left, right.bfloat16())
    narrow = [x.bfloat16() for x in (out, left, right)]
    fails(TypeError, "out is bfloat16", narrow[0], scratch, *narrow[1:], add=True)
