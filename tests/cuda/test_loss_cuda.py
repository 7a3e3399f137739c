"""cross_entropy and linear_cross_entropy on CUDA against float64, by the error rule, and what must hold to the bit."""

import math

import pytest
import torch

import automodel_c as amc
from automodel_c import _amcore
from automodel_c.ops import _loss_rows
from automodel_c.reference import loss as reference
from tests.cuda import device
from tests.cuda.device import on_cuda, same_bits
from tests.numerics import assert_as_good_as, draws_for, pool
from tests.ops.test_loss import naive, naive_linear, problem, run
from tests.parallel import test_vocab, vocab_worker
from tests.ranks import RankPool

pytestmark = pytest.mark.cuda

F32, BF16 = torch.float32, torch.bfloat16
DTYPES = pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
BOTH = pytest.mark.parametrize("linear", [True, False], ids=["linear", "logits"])
linear_cross_entropy, cross_entropy = amc.ops.linear_cross_entropy, amc.ops.cross_entropy


def draw(tokens, vocab, size, dtype, **options):
    return on_cuda(problem(tokens, vocab, size, dtype, **options))


def logits_of(tokens, vocab, dtype, scale=3.0):
    labels = problem(tokens, vocab, 1, dtype)[2]
    labels[0] = vocab - 1
    return (scale * torch.randn(tokens, vocab, device="cuda")).to(dtype), labels.cuda()


def call(linear, hidden, weight, labels, **options):
    if linear:
        return linear_cross_entropy(hidden, weight, labels, **options)
    return cross_entropy(hidden @ weight.T, labels, **options)


def compare(name, ours, plain, oracle, draws, dtype, **options):
    """By the rule, all draws together; `draws` are (tensors, labels)."""
    found, twin, truth = [], [], []
    for tensors, labels in draws:
        found.append(run(ours, tensors, labels, **options))
        twin.append(run(plain, tensors, labels, **options))
        truth.append([x.double() for x in run(oracle, [x.double() for x in tensors], labels, **options)])
    for part, (a, b, c) in enumerate(zip(pool(found), pool(twin), pool(truth), strict=True)):
        assert_as_good_as(a, b, c, name=f"{name}[{part}]", dtype=None if part == 0 else dtype)


LINEAR = [
    (1, 5, 3), (17, 511, 8), (17, 512, 8), (33, 513, 16), (20, 1101, 33), (9, 1, 7), (130, 5000, 64), (129, 1111, 257),
    (1, 3000, 128), (257, 96, 128), (64, 2048, 1000),
]  # fmt: skip
LINEARS = pytest.mark.parametrize(("tokens", "vocab", "size"), LINEAR, ids=str)


@DTYPES
@LINEARS
def test_linear_error_rule(seed, tokens, vocab, size, dtype):
    draws = []
    for _ in range(draws_for(tokens, 8)):
        *tensors, labels = draw(tokens, vocab, size, dtype, scale=2 * size**-0.5)
        labels[0] = vocab - 1
        draws.append((tensors, labels))
    functions = (linear_cross_entropy, naive_linear, reference.linear_cross_entropy)
    compare("linear", *functions, draws, dtype)
    compare("given count", *functions, draws, dtype, upstream=0.7, num_label_tokens=1000)


@DTYPES
@pytest.mark.parametrize("extra", [0, 300_000, 1 << 24], ids=["least", "some", "all"])
def test_rows_kept_or_made_again(seed, monkeypatch, extra, dtype):
    """Several chunks, rows in every place: by the rule, and the same bits again."""
    for name, value in {"WIDEST": 256, "LEAST_SCRATCH": 1}.items():
        monkeypatch.setattr(_loss_rows, name, value)
    hidden, weight, labels = draw(150, 1999, 32, dtype, scale=0.3)
    extra_bytes = _loss_rows.WORKSPACE + 150 * (4 * 32 + dtype.itemsize * 256) + extra
    beside = _loss_rows.layout_of(hidden, weight, dtype, True, (True, True), extra_bytes).beside
    assert beside == 0 if extra == 0 else 0 < beside < 8 if extra == 300_000 else beside == 8
    ours = lambda h, w, y: linear_cross_entropy(h, w, y, extra_bytes=extra_bytes)  # noqa: E731
    compare("parts", ours, naive_linear, reference.linear_cross_entropy, [([hidden, weight], labels)], dtype)
    hidden.requires_grad_(), weight.requires_grad_()
    value = ours(hidden, weight, labels)
    alone = torch.autograd.grad(value, hidden, retain_graph=True)
    first = torch.autograd.grad(value, [hidden, weight], retain_graph=True)
    assert torch.equal(alone[0], first[0]) and same_bits(first, torch.autograd.grad(value, [hidden, weight]))
    value = ours(hidden, weight, labels)
    assert same_bits(first, torch.autograd.grad(value, [hidden, weight], retain_graph=True))


@DTYPES
@pytest.mark.parametrize(
    ("tokens", "vocab"),
    [(1, 1), (5, 7), (5, 63), (5, 64), (5, 65), (3, 1023), (3, 1024), (20, 2500), (300, 8200), (2, 248_320),
     (37, 70_001), (600, 4100)],
    ids=str,
)  # fmt: skip
def test_logits_error_rule(seed, tokens, vocab, dtype):
    draws = [([x], y) for x, y in (logits_of(tokens, vocab, dtype) for _ in range(draws_for(tokens, 16)))]
    functions = (cross_entropy, naive, reference.cross_entropy)
    compare("logits", *functions, draws, dtype)
    compare("given count", *functions, draws, dtype, upstream=-2.0, num_label_tokens=11)


@DTYPES
@pytest.mark.parametrize("start", [0, 1, 3, 8])
def test_rows_that_start_anywhere(seed, start, dtype):
    """Rows on whole words, rows that start and end between them, and a gradient that starts elsewhere."""
    for vocab in (5, 200, 4104, 4097):
        logits, labels = logits_of(11, vocab, dtype)
        wide = torch.full((11, vocab + 9), math.nan, dtype=dtype, device="cuda")
        view = wide[:, start : start + vocab].copy_(logits).detach().requires_grad_()
        value = cross_entropy(view, labels)
        made = [value.detach(), *torch.autograd.grad(value, view)]
        twin, truth = run(naive, [logits], labels), run(reference.cross_entropy, [logits.double()], labels)
        for a, b, c in zip(made, twin, truth, strict=True):
            assert_as_good_as(a, b, c.double(), name=f"from {start}", dtype=None if a.ndim == 0 else dtype)


@pytest.mark.parametrize("offset", [-1e4, 1e4])
def test_large_logits_lose_nothing(seed, offset):
    logits, labels = logits_of(20, 300, F32, scale=5.0)
    draws = [([logits + offset], labels)]
    compare("offset", cross_entropy, naive, reference.cross_entropy, draws, F32)


def test_infinite_logits():
    logits = torch.full((3, 3000), -torch.inf, device="cuda")
    logits[0, 2999] = logits[1, 0] = 1.0
    logits[2] = 0.0
    labels = torch.tensor([2999, 0, 7], device="cuda")
    value, gradient = run(cross_entropy, [logits], labels)
    assert torch.allclose(value, naive(logits, labels))
    assert torch.equal(gradient[:2], torch.zeros_like(gradient[:2])) and gradient.isfinite().all()
    logits[1, 5] = math.nan
    assert run(cross_entropy, [logits], labels)[0].isnan()


@BOTH
@DTYPES
@pytest.mark.parametrize("count", [None, 0, 9], ids=str)
def test_no_label_gives_zero(linear, dtype, count):
    tensors = draw(7, 600, 8, dtype, ignored=2.0)
    for given in (count, None if count is None else torch.tensor([count], dtype=torch.int32, device="cuda")):
        function = lambda h, w, y, n=given: call(linear, h, w, y, num_label_tokens=n)  # noqa: E731
        assert all((x == 0).all() for x in run(function, tensors[:2], tensors[2]))


@BOTH
def test_count_of_zero_with_labels_gives_zero(linear):
    *tensors, labels = draw(7, 30, 8, F32, ignored=0.0)
    results = run(lambda h, w, y: call(linear, h, w, y, num_label_tokens=0), tensors, labels)
    assert all((x == 0).all() for x in results)


@BOTH
def test_no_rows_and_no_words(linear):
    labels = torch.zeros(0, dtype=torch.int64, device="cuda")
    tensors = [torch.zeros(0, 4, device="cuda"), torch.ones(9, 4, device="cuda")]
    results = run(lambda h, w, y: call(linear, h, w, y), tensors, labels)
    assert [x.abs().sum().item() for x in results] == [0, 0, 0]
    labels = torch.full((3,), -100, device="cuda")
    tensors = [torch.ones(3, 4, device="cuda"), torch.zeros(0, 4, device="cuda")]
    results = run(lambda h, w, y: call(linear, h, w, y), tensors, labels)
    assert [x.abs().sum().item() for x in results] == [0, 0, 0]


@DTYPES
def test_ignored_rows_may_hold_nan(seed, dtype):
    hidden, weight, labels = draw(30, 700, 16, dtype)
    labels[:3] = torch.tensor([-100, 5, -100])
    clean = run(linear_cross_entropy, [hidden, weight], labels)
    hidden[labels == -100] = math.nan
    dirty = run(linear_cross_entropy, [hidden, weight], labels)
    assert all(map(torch.equal, clean, dirty)) and (dirty[1][labels == -100] == 0).all()
    assert torch.equal(run(lambda w, y: linear_cross_entropy(hidden, w, y), [weight], labels)[1], clean[2])
    logits = torch.randn(30, 700, device="cuda").to(dtype)
    clean = run(cross_entropy, [logits], labels)
    logits[labels == -100] = math.nan
    assert all(map(torch.equal, clean, run(cross_entropy, [logits], labels)))


@BOTH
@pytest.mark.parametrize("label", [40, -1, 1 << 40])
def test_a_label_out_of_range_is_nan(linear, seed, label):
    """Nobody waits to raise for it: the loss and that row's gradient say it, and no memory outside is read."""
    hidden, weight, labels = draw(20, 40, 8, F32, ignored=0.2)
    expected = run(cross_entropy, [hidden @ weight.T], labels, num_label_tokens=20)
    labels[3] = label
    results = run(lambda h, w, y: call(linear, h, w, y, num_label_tokens=20), [hidden, weight], labels)
    assert results[0].isnan() and results[1][3].isnan().all() and not results[1][4:].isnan().any()
    value, gradient = run(cross_entropy, [hidden @ weight.T], labels, num_label_tokens=20)
    assert value.isnan() and gradient[3].isnan().all()
    assert torch.equal(gradient[4:], expected[1][4:]) and torch.equal(gradient[:3], expected[1][:3])


@BOTH
def test_a_negative_count(linear):
    *tensors, labels = draw(7, 30, 8, F32, ignored=0.0)
    with pytest.raises(ValueError, match="num_label_tokens is -3, it must not be negative"):
        call(linear, *tensors, labels, num_label_tokens=-3)
    assert call(linear, *tensors, labels, num_label_tokens=torch.tensor(-3, device="cuda")).isnan()


@BOTH
def test_ignore_index_and_label_dtypes(linear, seed):
    hidden, weight, labels = draw(20, 40, 8, F32)
    other = torch.where(labels == -100, 7, torch.where(labels == 7, 8, labels))
    masked = torch.where(other == 7, -100, other)
    function = lambda h, w, y, **o: call(linear, h, w, y, **o)  # noqa: E731
    expected = run(function, [hidden, weight], masked)
    for found in (
        run(function, [hidden, weight], other, ignore_index=7),
        run(function, [hidden, weight], masked.int()),
        run(function, [hidden, weight], masked.repeat_interleave(2)[::2]),
        run(function, [hidden, weight], masked, num_label_tokens=(masked != -100).sum()),
    ):
        assert all(map(torch.equal, expected, found))


@DTYPES
def test_strided_hidden_and_weight(seed, dtype):
    """Rows with room between them are the same to the bit; columns end to end, and repeated rows, by the rule."""
    hidden, weight, labels = draw(24, 320, 64, dtype)
    expected = run(linear_cross_entropy, [hidden, weight], labels)
    wide = torch.full((24, 80), math.nan, dtype=dtype, device="cuda")
    wide[:, 8:72] = hidden
    value = linear_cross_entropy(wide[:, 8:72], weight, labels)
    assert torch.equal(value, expected[0])
    twin = naive_linear(hidden, weight, labels)
    truth = reference.linear_cross_entropy(hidden.double(), weight.double(), labels)
    for h, w in ((hidden, weight.T.contiguous().T), (hidden.T.contiguous().T, weight), (wide[:, 8:72], weight)):
        made = linear_cross_entropy(h.detach().requires_grad_(), w.detach().requires_grad_(), labels)
        assert_as_good_as(made.detach(), twin, truth, name="strided", dtype=dtype)
        made.backward()
    row = hidden[:1].expand(24, 64)
    made = linear_cross_entropy(row, weight, labels)
    truth = reference.linear_cross_entropy(row.double(), weight.double(), labels)
    assert_as_good_as(made, naive_linear(row, weight, labels), truth, name="expanded", dtype=dtype)


def test_float32_gradient_of_a_bfloat16_weight(seed):
    hidden, weight, labels = draw(70, 704, 64, BF16, scale=0.2)
    truth = run(reference.linear_cross_entropy, [hidden.double(), weight.double()], labels)
    twin = run(naive_linear, [hidden, weight], labels)
    weight.requires_grad_().grad_dtype = F32
    linear_cross_entropy(hidden, weight, labels).backward()
    assert weight.grad.dtype == F32
    assert_as_good_as(weight.grad, twin[2].float(), truth[2], name="wide", dtype=BF16)
    assert not torch.equal(weight.grad, weight.grad.bfloat16().float())


@DTYPES
def test_repeats_to_the_bit(seed, dtype):
    hidden, weight, labels = draw(700, 9000, 256, dtype)
    first = run(linear_cross_entropy, [hidden, weight], labels)
    assert all(same_bits(first, run(linear_cross_entropy, [hidden, weight], labels)) for _ in range(3))
    logits, labels = logits_of(500, 30_000, dtype)
    first = run(cross_entropy, [logits], labels)
    assert all(same_bits(first, run(cross_entropy, [logits], labels)) for _ in range(3))


@BOTH
def test_backward_again(linear, seed):
    hidden, weight, labels = draw(9, 700, 8, F32)
    hidden.requires_grad_(), weight.requires_grad_()
    loss = call(linear, hidden, weight, labels)
    first = torch.autograd.grad(loss, [hidden, weight], retain_graph=True)
    assert same_bits(first, torch.autograd.grad(loss, [hidden, weight], retain_graph=True))
    graph = torch.autograd.grad(loss, hidden, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="second derivative"):
        graph.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward(), loss.backward()


def test_frozen_weight_or_hidden(seed):
    hidden, weight, labels = draw(300, 700, 64, BF16)
    both = run(linear_cross_entropy, [hidden, weight], labels)
    alone = run(lambda h, y: linear_cross_entropy(h, weight, y), [hidden], labels)
    assert torch.equal(alone[0], both[0]) and torch.equal(alone[1], both[1])
    assert torch.equal(run(lambda w, y: linear_cross_entropy(hidden, w, y), [weight], labels)[1], both[2])


@BOTH
def test_compile(linear, seed):
    hidden, weight, labels = draw(9, 700, 8, F32)
    function = lambda h, w, y: call(linear, h, w, y)  # noqa: E731
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert same_bits(run(function, [hidden, weight], labels), run(compiled, [hidden, weight], labels))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@DTYPES
@BOTH
def test_stream_waiting_and_capture(linear, seed, dtype, plain_memory):
    hidden, weight, labels = draw(300, 3000, 64, dtype)
    others = draw(300, 3000, 64, dtype)
    if linear:
        function, inputs, others = linear_cross_entropy, [hidden, weight, labels], others
    else:
        function, inputs, others = cross_entropy, [hidden @ weight.T, labels], [others[0] @ others[1].T, others[2]]
    run_one = lambda *x: run(function, x[:-1], x[-1])  # noqa: E731
    device.assert_goes_to_the_current_stream(run_one, inputs)
    device.assert_does_not_wait(run_one, inputs)
    device.assert_can_be_captured(run_one, inputs, others)


def test_beyond_two_to_the_31_logits(seed, plain_memory):
    logits = torch.randn(9000, 248_320, dtype=BF16, device="cuda").requires_grad_()
    labels = torch.randint(0, 248_320, (9000,), device="cuda")
    gradient = torch.autograd.grad(cross_entropy(logits, labels, num_label_tokens=1), logits)[0]
    for start in (0, 4_500, 8_650, 8_995):
        rows = slice(start, start + 5)
        alone = run(lambda x, y: cross_entropy(x, y, num_label_tokens=1), [logits[rows]], labels[rows])
        assert torch.equal(gradient[rows], alone[1])


def extra_memory(function, inputs, outputs_bytes):
    """Most bytes of torch's allocator during forward and backward beyond what was there and what stays."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    gradients = torch.autograd.grad(function(*inputs), inputs)
    peak = torch.cuda.max_memory_allocated() - before
    assert all(x.isfinite().all() for x in gradients)
    return peak - outputs_bytes


@pytest.mark.parametrize("mebibytes", [200, 400])
def test_memory_is_within_its_bound_and_comes_back(seed, mebibytes, plain_memory):
    hidden, weight, labels = draw(4096, 60_000, 512, BF16)
    inputs = [hidden.requires_grad_(), weight.requires_grad_()]
    function = lambda h, w: linear_cross_entropy(h, w, labels, extra_bytes=mebibytes << 20)  # noqa: E731
    wanted = hidden.nbytes + weight.nbytes
    used = [extra_memory(function, inputs, wanted) for _ in range(3)]
    assert max(used) <= (mebibytes << 20) + (1 << 20), f"{max(used) >> 20} MiB"
    assert max(used) >= (mebibytes << 20) // 2
    before = torch.cuda.memory_allocated()
    for _ in range(20):
        extra_memory(function, inputs, wanted)
    assert torch.cuda.memory_allocated() == before


def test_other_devices_and_dtypes_are_refused():
    x, labels = torch.zeros(2, 4, device="cuda"), torch.zeros(2, dtype=torch.int64, device="cuda")
    with pytest.raises(ValueError, match="weight is on cpu"):
        linear_cross_entropy(x, x.cpu(), labels)
    with pytest.raises(ValueError, match="labels is on cpu"):
        cross_entropy(x, labels.cpu())
    for dtype in (torch.float16, torch.float64):
        with pytest.raises(TypeError, match="float32 or bfloat16 is needed"):
            cross_entropy(x.to(dtype), labels)
        with pytest.raises(TypeError, match="float32 or bfloat16 is needed"):
            linear_cross_entropy(x.to(dtype), x.to(dtype), labels)
    with pytest.raises(TypeError, match="labels is float32"):
        cross_entropy(x, x[:, 0])
    with pytest.raises(ValueError, match="labels has 1 elements for 2 rows"):
        linear_cross_entropy(x, x, labels[:1])


def test_join_has_the_cpus_numbers(seed):
    parts = torch.randn(5, 3, 1000)
    parts[:, 1] = parts[:, 1].exp()
    parts[2] = torch.tensor([[-torch.inf], [0.0], [0.0]])
    parts[:, 0, 7], parts[:, 1, 8] = -torch.inf, torch.nan
    here, there = torch.empty(3, 1000), torch.empty(3, 1010, device="cuda")[:, 5:1005]
    _amcore.linear_cross_entropy_join(here, parts)
    _amcore.linear_cross_entropy_join(there, parts.cuda())
    torch.testing.assert_close(there.cpu(), here, rtol=1e-6, atol=1e-6, equal_nan=True)
    assert here[1, 8].isnan() and here[0, 7] == -torch.inf


@DTYPES
@pytest.mark.parametrize("way", ["nccl", "gloo"])
@pytest.mark.parametrize(("rows", "vocab", "size"), [(96, 5001, 64), (8, 3, 16)], ids=["uneven", "few-words"])
def test_ranks_that_share_the_words(seed, way, rows, vocab, size, dtype, plain_memory):
    """By NCCL with a GPU each, where there are two; by gloo, through the host, both on one."""
    if way == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs: NCCL takes no two ranks on one")
    draws = [vocab_worker.problem(seed + i, rows, vocab, size, dtype) for i in range(4)]
    pool = RankPool(2, way, "cuda")
    try:
        results = pool.run(vocab_worker.step, draws)
    finally:
        pool.close()
    test_vocab.judge("cuda", test_vocab.joined(results), draws)
