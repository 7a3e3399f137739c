"""_amcore.adam_step, grad_sumsq and scale_ against float64, and what must not change a bit."""

import ctypes
import itertools
import mmap
import os

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from automodel_c import _amcore
from automodel_c.reference import adam as reference
from tests.numerics import assert_as_good_as, draws_for, pool
from tests.strategies import shard_sizes, with_layout

F32, BF16 = torch.float32, torch.bfloat16
HYPER = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
SIZES = {
    "none": [],
    "empty": [0],
    "one": [1],
    "last-empty": [8, 0],
    "first-empty": [0, 0, 8],
    "block": [1023, 1024, 1025],
    "grain": [32767, 0, 32768, 32769],
    "many": [i % 7 for i in range(50)],
}
sizes = pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
masters = pytest.mark.parametrize("master", [None, "none", "full", "remainder"], ids=str)


class Lists:
    """The lists of one call: `master` None is float32 parameters, else bfloat16 ones."""

    def __init__(self, sizes, master=None, moment=F32, grad=F32, step=0):
        dtype = F32 if master is None else BF16
        self.params = [torch.randn(n).to(dtype) for n in sizes]
        self.exp_avgs = [torch.randn(n).to(moment) if step else torch.zeros(n, dtype=moment) for n in sizes]
        self.exp_avg_sqs = [torch.rand(n).to(moment) if step else torch.zeros(n, dtype=moment) for n in sizes]
        self.steps = [torch.tensor(float(step)) for _ in sizes]
        self.grads = [torch.randn(n).to(grad) for n in sizes]
        self.masters = None
        if master == "full":
            self.masters = [p.float() + 1e-3 * torch.randn(p.shape) * p.float() for p in self.params]
            self.params = [w.to(BF16) for w in self.masters]
        elif master == "remainder":
            self.masters = [torch.randint(-(2**15), 2**15, (n,), dtype=torch.int16) for n in sizes]

    def values(self):
        """What the parameters stand for, in float32."""
        if self.masters is None:
            return [p.float().clone() for p in self.params]
        if self.masters and self.masters[0].dtype == torch.int16:
            return [reference.master_of(p, r) for p, r in zip(self.params, self.masters, strict=True)]
        return [w.clone() for w in self.masters]

    def all(self):
        return [*self.params, *self.exp_avgs, *self.exp_avg_sqs, *self.steps, *(self.masters or [])]

    def step(self, **overrides):
        _amcore.adam_step(
            self.params,
            self.exp_avgs,
            self.exp_avg_sqs,
            self.steps,
            self.grads,
            **{"masters": self.masters, **HYPER, **overrides},
        )


def bits(tensors):
    return [t.clone().contiguous().view(torch.uint8 if t.ndim else t.dtype) for t in tensors]


def assert_same(a, b):
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("moment", [F32, BF16], ids=["m32", "m16"])
@pytest.mark.parametrize("grad", [F32, BF16], ids=["g32", "g16"])
@masters
def test_adam_step(isa, seed, master, grad, moment):
    assert_steps_are_right(
        [Lists([n for name, sizes in SIZES.items() if name != "grain" for n in sizes], master, moment, grad, 6)],
        6,
        master,
        moment,
    )


@masters
@sizes
def test_adam_step_sizes(seed, sizes, master):
    assert_steps_are_right([Lists(sizes, master) for _ in range(draws_for(sum(sizes)))], 0, master, F32)


def one_step(lists, step):
    """(param, exp_avg, exp_avg_sq) after a step of ours, of the plain formula, and of the oracle."""
    join = lambda tensors: torch.cat([*tensors, torch.empty(0)])  # noqa: E731
    start = [join(lists.values()), join(lists.exp_avgs), join(lists.exp_avg_sqs), join(lists.grads)]
    lists.step()
    assert all(t == step + 1 for t in lists.steps)
    after = (join(lists.values()), join(lists.exp_avgs), join(lists.exp_avg_sqs))
    return (
        after,
        reference.adamw(*start, step + 1, **HYPER, dtype=F32),
        reference.adamw(*start, step + 1, **HYPER),
    )


def assert_steps_are_right(draws, step, master, moment):
    stored = (BF16 if master == "none" else F32, moment, moment)
    pooled = (pool(part) for part in zip(*(one_step(lists, step) for lists in draws), strict=True))
    for name, dtype, *results in zip(("param", "exp_avg", "exp_avg_sq"), stored, *pooled, strict=True):
        ours, naive, ref = results
        assert_as_good_as(ours.to(dtype), naive.to(dtype), ref, name=name)


@masters
def test_first_step_is_the_sign(seed, master):
    """Without decay and eps the first step moves every weight by lr."""
    lists = Lists([1000], master)
    before = lists.values()[0]
    lists.step(weight_decay=0.0, eps=0.0)
    exact = before.double() - HYPER["lr"] * lists.grads[0].double().sign()
    stored = lists.values()[0].to(F32 if master in (None, "full", "remainder") else BF16)
    naive = (before - HYPER["lr"] * lists.grads[0].sign()).to(stored.dtype)
    assert_as_good_as(stored, naive, exact, name="param")


@masters
def test_instruction_sets_and_threads_agree_to_the_bit(seed, master):
    start = Lists(SIZES["grain"], master, BF16, BF16, step=3)
    results = []
    info = _amcore.build_info()
    for name, count in itertools.product(("scalar", "avx2", "avx512", info["best_isa"]), (1, 2, 5)):
        lists = Lists([], master)
        for key, value in vars(start).items():
            setattr(lists, key, [t.clone() for t in value] if isinstance(value, list) else value)
        try:
            _amcore.set_isa(name)
        except NotImplementedError:
            continue
        _amcore.set_num_threads(count)
        lists.step()
        results.append(bits(lists.all()))
    _amcore.set_isa(info["isa"])
    _amcore.set_num_threads(info["num_threads"])
    for other in results[1:]:
        assert_same(results[0], other)


@given(shard_sizes(4, 3000), st.sampled_from([None, "none", "full", "remainder"]), st.integers(0, 2**31))
def test_cutting_a_shard_anywhere_changes_no_bit(cuts, master, number):
    torch.manual_seed(number)
    whole = Lists([sum(cuts)], master, grad=BF16, step=2)
    parts = Lists([0] * 4, master, step=2)
    for key in ("params", "exp_avgs", "exp_avg_sqs", "grads", "masters"):
        if getattr(whole, key) is not None:
            setattr(parts, key, [t.clone() for t in getattr(whole, key)[0].split(cuts)])
    whole.step()
    parts.step()
    for key in ("params", "exp_avgs", "exp_avg_sqs", "masters"):
        if getattr(whole, key) is not None:
            assert torch.equal(torch.cat(getattr(parts, key)), getattr(whole, key)[0])


def test_remainder_is_the_master_to_the_bit(isa, seed):
    full = Lists([5000], "full")
    half = Lists([5000], "remainder")
    half.params = [torch.randn(5000).to(BF16)]
    half.masters = [torch.zeros(5000, dtype=torch.int16)]
    full.params, full.masters = [half.params[0].clone()], [half.params[0].float()]
    for _ in range(20):
        full.grads = half.grads = [torch.randn(5000)]
        full.step()
        half.step()
        assert torch.equal(half.values()[0], full.masters[0])
        error = (half.params[0].double() - full.masters[0].double()).abs()
        assert (error <= (full.params[0].double() - full.masters[0].double()).abs()).all()


@pytest.mark.parametrize("master", ["full", "remainder"])
def test_a_nan_gradient_shows_in_the_parameter(isa, master):
    lists = Lists([40], master)
    lists.grads[0][7] = float("nan")
    lists.step()
    assert lists.params[0].isnan().nonzero().tolist() == [[7]]
    assert lists.values()[0].isnan().nonzero().tolist() == [[7]]


@masters
@pytest.mark.parametrize("value", [1.0, 2.0, float("inf"), float("nan")])
def test_found_inf_changes_no_bit(seed, master, value):
    lists = Lists([100, 0, 3], master)
    before = bits(lists.all())
    lists.step(found_inf=torch.tensor(value))
    assert_same(before, bits(lists.all()))
    lists.step(found_inf=torch.tensor(0.0))
    assert lists.steps[1] == 1


def test_grad_scale_divides(isa, seed):
    a, b = Lists([3000], step=1), Lists([0])
    for key in ("params", "exp_avgs", "exp_avg_sqs", "steps"):
        setattr(b, key, [t.clone() for t in getattr(a, key)])
    b.grads = [a.grads[0] * 1024]
    a.step()
    b.step(grad_scale=torch.tensor(1024.0))
    assert_same(a.all(), b.all())
    start = (b.params[0], b.exp_avgs[0], b.exp_avg_sqs[0])
    truth = reference.adamw(*start, b.grads[0], 3, **HYPER, grad_scale=3.0)
    naive = reference.adamw(*start, b.grads[0], 3, **HYPER, grad_scale=3.0, dtype=F32)
    b.step(grad_scale=torch.tensor([3.0]))
    assert_as_good_as(b.params[0], naive[0], truth[0], name="param")


def test_groups_have_their_own_numbers_and_tensors_their_own_steps(seed):
    lists, alone = Lists([10, 0, 20, 30]), []
    lists.steps = [torch.tensor(float(t)) for t in (0, 5, 9, 9)]
    lists.steps[3] = torch.tensor([2**40])
    for group, i in ((0, 0), (0, 1), (2, 2), (2, 3)):
        one = Lists([0])
        for key in ("params", "exp_avgs", "exp_avg_sqs", "steps", "grads"):
            setattr(one, key, [getattr(lists, key)[i].clone()])
        one.step(lr=[0.1, 0.2, 0.3][group], beta1=[0.5, 0.6, 0.7][group], weight_decay=[0, 1, 0.5][group])
        alone.append(one)
    lists.step(
        group_sizes=[2, 0, 2],
        lr=[0.1, 7.0, 0.3],
        lr_tensors=[torch.empty(0), torch.tensor(0.2), torch.empty(0)],
        beta1=[0.5, 0.6, 0.7],
        beta2=[HYPER["beta2"]] * 3,
        eps=[HYPER["eps"]] * 3,
        weight_decay=[0, 1, 0.5],
    )
    for i, one in enumerate(alone):
        for key in ("params", "exp_avgs", "exp_avg_sqs", "steps"):
            assert torch.equal(getattr(one, key)[0], getattr(lists, key)[i])
    assert lists.steps[3] == 2**40 + 1


@pytest.fixture
def repeated():
    """repeated(n, tail): a bfloat16 vector of n elements, zeros but for the last of them: 64 MiB of memory, over and
    over, and one block behind."""
    libc, made = ctypes.CDLL(None, use_errno=True), []
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    block, read_write, fixed, no_reserve = 1 << 26, mmap.PROT_READ | mmap.PROT_WRITE, 0x10, 0x4000

    def make(n, tail):
        whole = -(-2 * n // block) * block
        base = libc.mmap(None, whole, read_write, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve, -1, 0)
        file = os.memfd_create("repeated")
        os.truncate(file, block)
        for at in range(0, whole - block, block):
            assert libc.mmap(base + at, block, read_write, mmap.MAP_SHARED | fixed, file, 0) == base + at
        os.close(file)
        made.append((base, whole))
        x = torch.from_numpy(np.ctypeslib.as_array((ctypes.c_int16 * n).from_address(base))).view(BF16)
        x[whole // 2 - block // 2 :] = tail
        return x

    yield make
    for base, whole in made:
        libc.munmap(base, whole)


def test_one_tensor_beyond_two_to_the_31_elements(repeated):
    param, exp_avg, exp_avg_sq, grad = (repeated(2**31 + 4099, tail) for tail in (1.0, 0.0, 0.0, 2.0))
    step = torch.zeros(1)
    _amcore.adam_step([param], [exp_avg], [exp_avg_sq], [step], [grad], **{**HYPER, "weight_decay": 0.0, "lr": 0.5})
    assert step == 1 and not param[:4099].any() and not exp_avg[:4099].any()
    moments = [(1 - HYPER["beta1"]) * 2, (1 - HYPER["beta2"]) * 4]
    for x, value in zip((param, exp_avg, exp_avg_sq), (0.5, *moments), strict=True):
        assert torch.equal(x[-4099:], torch.full((4099,), value).to(BF16))


@pytest.mark.parametrize("layout", ["transposed", "offset", "size1", "empty"])
def test_dense_layouts(isa, seed, layout):
    x = [torch.randn(6, 5, 4) for _ in range(4)]
    x[2].abs_()
    plain, laid = Lists([0]), Lists([0])
    for lists, make in ((plain, torch.clone), (laid, lambda t: with_layout(t, layout))):
        lists.params, lists.exp_avgs, lists.exp_avg_sqs, lists.grads = ([make(t)] for t in x)
        lists.step()
    if layout != "empty":
        assert torch.equal(laid.params[0].reshape(6, 5, 4), plain.params[0])


def broken_calls():
    """(what is wrong, exception, what the message says, how to break the lists, overrides)."""

    def put(key, value):
        return lambda lists: getattr(lists, key).__setitem__(2, value() if callable(value) else value)

    gap = lambda: torch.zeros(8)[::2]  # noqa: E731
    yield "lr", ValueError, "lr of group 0 is -1", None, {"lr": -1.0}
    yield "lr-nan", ValueError, "lr of group 0 is nan", None, {"lr": float("nan")}
    yield "lr-tensor", ValueError, "lr of group 0 is -1", None, {"lr_tensors": [torch.tensor(-1.0)]}
    yield "eps", ValueError, "eps of group 0 is -1", None, {"eps": -1.0}
    yield "decay", ValueError, "weight_decay of group 0 is -1", None, {"weight_decay": -1.0}
    yield "beta1", ValueError, r"beta1 of group 0 is 1, it lies in \[0, 1\)", None, {"beta1": 1.0}
    yield "beta2", ValueError, r"beta2 of group 0 is -0.5", None, {"beta2": -0.5}
    yield "groups", ValueError, "sum to 2, params has 3", None, {"group_sizes": [2]}
    yield "groups-many", ValueError, r"group_sizes\[0\] is 4, 3 tensors are left", None, {"group_sizes": [4]}
    yield "numbers", ValueError, "lr has 2 numbers for 1 groups", None, {"lr": [0.1, 0.2]}
    yield "found-inf", ValueError, "found_inf has 2 elements", None, {"found_inf": torch.zeros(2)}
    yield "grad-scale", TypeError, "grad_scale is int64", None, {"grad_scale": torch.tensor(1)}
    yield "param-dtype", TypeError, r"params\[2\] is float64", put("params", torch.zeros(4).double()), {}
    yield "grad-dtype", TypeError, r"grads\[2\] is float16", put("grads", torch.zeros(4).half()), {}
    yield "moments", TypeError, r"exp_avg_sqs\[2\] is bfloat16", put("exp_avg_sqs", torch.zeros(4).to(BF16)), {}
    yield "step-dtype", TypeError, r"steps\[2\] is float64", put("steps", torch.zeros(()).double()), {}
    yield "step-nan", ValueError, r"steps\[2\] holds nan", put("steps", torch.tensor(float("nan"))), {}
    yield "step-size", ValueError, r"steps\[2\] has 2 elements", put("steps", torch.zeros(2)), {}
    yield "numel", ValueError, r"grads\[2\] has 5 elements, params\[2\] has 4", put("grads", torch.zeros(5)), {}
    yield "axes", ValueError, r"grads\[2\] has 2 axes, params\[2\] has 1", put("grads", torch.zeros(2, 2)), {}
    yield "grad-strides", ValueError, r"grads\[2\] has stride 2 on axis 0, params\[2\] has 1", put("grads", gap), {}
    yield "param-gaps", ValueError, r"params\[2\] of 4 elements has gaps", put("params", gap), {}
    yield "missing", ValueError, "grads has 2 tensors, params has 3", lambda lists: lists.grads.pop(), {}
    yield (
        "masters",
        TypeError,
        r"masters\[0\] is given, but params\[0\] is float32",
        None,
        {"masters": [torch.zeros(4)] * 3},
    )
    yield "kind", TypeError, "argument 'grads' must be a list or tuple", lambda lists: vars(lists).update(grads=1), {}
    yield "same", ValueError, "shares memory", lambda lists: lists.params.__setitem__(2, lists.params[0]), {}
    yield "grad-is-param", ValueError, "shares memory", lambda lists: lists.grads.__setitem__(2, lists.params[0]), {}
    yield "read-only", TypeError, "must be a tensor", put("grads", object()), {}


@pytest.mark.parametrize(
    ("error", "message", "breaks", "overrides"), [c[1:] for c in broken_calls()], ids=[c[0] for c in broken_calls()]
)
def test_errors_leave_everything_as_it_was(seed, error, message, breaks, overrides):
    lists = Lists([4, 4, 4])
    tensors = lists.all()
    before = bits(tensors)
    if breaks:
        breaks(lists)
    with pytest.raises(error, match=message):
        lists.step(**overrides)
    assert_same(before, bits(tensors))


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 6)), max_size=60), st.booleans())
def test_shared_memory_is_found_as_brute_force_finds_it(spans, many):
    block, hold = torch.zeros(64), [torch.zeros(3) for _ in range(40 if many else 0)]
    params = [block[a : a + n] for a, n in spans] + hold
    touches = any(max(a, b) < min(a + n, b + m) for (a, n), (b, m) in itertools.combinations(spans, 2) if n and m)
    zeros = [[torch.zeros_like(p) for p in params] for _ in range(3)]
    steps = [torch.zeros(()) for _ in params]
    call = lambda: _amcore.adam_step(params, zeros[0], zeros[1], steps, zeros[2], **HYPER)  # noqa: E731
    if touches:
        with pytest.raises(ValueError, match="shares memory"):
            call()
    else:
        call()


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
@sizes
def test_grad_sumsq(isa, seed, guarded, sizes, dtype):
    grads = [torch.randn(n).to(dtype) for n in sizes]
    out = guarded(1, torch.float64)
    _amcore.grad_sumsq(out, guarded(1024, torch.float64), grads)
    truth = sum((g.double() ** 2).sum() for g in grads)
    assert abs(out.item() - float(truth)) <= 1e-12 * float(truth)


def test_grad_sumsq_beyond_two_to_the_31_elements():
    """Pages that hold zeros alone cost no memory."""
    grad = torch.from_numpy(np.zeros(2**31 + 9, np.int16)).view(BF16)
    grad[5], grad[-1] = 3, 2
    out = torch.empty(1, dtype=torch.float64)
    _amcore.grad_sumsq(out, torch.empty(1024, dtype=torch.float64), [grad])
    assert out == 13


def test_grad_sumsq_threads_and_sets_agree_to_the_bit(seed):
    grads = [torch.randn(n) for n in (100_000, 0, 33, 1_000_003)]
    info, answers = _amcore.build_info(), set()
    for name, count in itertools.product(("scalar", info["best_isa"]), (1, 2, 5)):
        _amcore.set_isa(name)
        _amcore.set_num_threads(count)
        out = torch.empty(1, dtype=torch.float64)
        _amcore.grad_sumsq(out, torch.empty(1024, dtype=torch.float64), grads)
        answers.add(out.item())
    _amcore.set_isa(info["isa"])
    _amcore.set_num_threads(info["num_threads"])
    assert len(answers) == 1


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
def test_scale(isa, seed, dtype):
    tensors = [torch.randn(n).to(dtype) for n in (0, 1, 1000, 40_000)]
    want = [(t.double() * 0.3).float().to(dtype) for t in tensors]
    _amcore.scale_(tensors, torch.tensor(0.3, dtype=torch.float64))
    assert_same(tensors, want)
    tensors[1][0] = float("nan")
    before = bits(tensors)
    _amcore.scale_(tensors, torch.ones(1, dtype=torch.float64))
    assert_same(before, bits(tensors))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda f: _amcore.scale_([f(3).half()], f(1)), TypeError, r"tensors\[0\] is float16"),
        (lambda f: _amcore.scale_([f(3).float()], f(2)), ValueError, "factor has 2 elements"),
        (lambda f: _amcore.scale_([f(3).float()], f(1).float()), TypeError, "factor is float32"),
        (lambda f: _amcore.scale_([f(6).float()[::2]], f(1)), ValueError, "has gaps"),
        (lambda f: _amcore.grad_sumsq(f(1), f(3), []), ValueError, "parts has 3 elements, 1024"),
        (lambda f: _amcore.grad_sumsq(f(1).float(), f(1024), []), TypeError, "sumsq is float32"),
        (lambda f: _amcore.grad_sumsq(f(1024)[:1], f(1024), [f(2).int()]), TypeError, r"grads\[0\] is int32"),
    ],
)
def test_clip_parts_errors(call, error, message):
    with pytest.raises(error, match=message):
        call(lambda n: torch.zeros(n, dtype=torch.float64))
