"""FusedAdamW as a torch optimizer: parity, states, groups, loss scaling, errors."""

import copy

import pytest
import torch

from automodel_c.optim import FusedAdamW
from automodel_c.reference import adam as reference
from tests.numerics import assert_as_good_as

F32, BF16 = torch.float32, torch.bfloat16
MODES = pytest.mark.parametrize("master_weights", [True, False, "remainder"], ids=["master", "bare", "remainder"])
DTYPES = pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
SHAPES = [(3, 4), (0, 4), (1000,), (), (7, 1), (0,)]


def make(dtype=F32, shapes=SHAPES):
    params = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    for p in params:
        p.grad = torch.randn(p.shape).to(dtype)
    return params


def groups_of(params):
    return [{"params": params[:2]}, {"params": params[2:], "lr": 3e-2, "weight_decay": 0.0, "betas": (0.8, 0.95)}]


def snapshot(params, optimizer):
    tensors = [*params, *(t for p in params for t in optimizer.state[p].values())]
    return [t.detach().clone() for t in tensors]


def assert_same(a, b):
    for x, y in zip(a, b, strict=True):
        assert x.dtype == y.dtype and torch.equal(x, y)


@DTYPES
def test_twenty_steps_beside_torch(seed, dtype):
    """Same gradients in every step; torch's float32 AdamW is the plain formula, its float64 one the truth."""
    params = make(dtype)
    twins = {d: [p.detach().to(d).requires_grad_() for p in params] for d in (F32, torch.float64)}
    ours = FusedAdamW(groups_of(params), lr=1e-2)
    theirs = [torch.optim.AdamW(groups_of(twin), lr=1e-2, foreach=False) for twin in twins.values()]
    for _ in range(20):
        for i, p in enumerate(params):
            p.grad = torch.randn(p.shape).to(dtype)
            for twin in twins.values():
                twin[i].grad = p.grad.to(twin[i].dtype)
        for optimizer in (ours, *theirs):
            optimizer.step()
    for i, p in enumerate(params):
        master = ours.state[p].get("master_param", p)
        assert_as_good_as(master.detach(), twins[F32][i].detach(), twins[torch.float64][i].detach(), name=f"param {i}")
        assert torch.equal(p, master.to(dtype))
        assert ours.state[p]["step"] == 20


@MODES
@DTYPES
@pytest.mark.parametrize("state_dtype", [F32, BF16], ids=["m32", "m16"])
def test_state(seed, master_weights, dtype, state_dtype):
    params = make(dtype)
    optimizer = FusedAdamW(params, master_weights=master_weights, state_dtype=state_dtype)
    params[2].grad = None
    optimizer.step()
    for i, p in enumerate(params):
        state = optimizer.state[p]
        assert state["step"] == (0 if i == 2 else 1) and state["step"].dtype == F32
        for name in ("exp_avg", "exp_avg_sq"):
            assert state[name].shape == p.shape and state[name].dtype == state_dtype
        master = {True: F32, "remainder": torch.int16, False: None}[master_weights] if dtype == BF16 else None
        assert state["master_param"].dtype == master if master else "master_param" not in state


def test_remainder_steps_as_the_master_does(seed):
    a = make(BF16)
    b = copy.deepcopy(a)
    whole, split = FusedAdamW(a, lr=0.1), FusedAdamW(b, lr=0.1, master_weights="remainder")
    for _ in range(5):
        whole.step()
        split.step()
    for p, q in zip(a, b, strict=True):
        q_master = reference.master_of(q, split.state[q]["master_param"])
        assert torch.equal(q_master, whole.state[p]["master_param"])


def test_parameter_without_gradient_is_left_alone(seed):
    params = make()
    params[0].grad = params[1].grad = None
    before = params[0].detach().clone()
    optimizer = FusedAdamW(params)
    optimizer.step()
    assert torch.equal(before, params[0])
    assert [float(optimizer.state[p]["step"]) for p in params] == [0, 0, 1, 1, 1, 1]


def test_no_parameter_has_a_gradient_or_elements():
    params = [torch.ones(3, requires_grad=True), torch.empty(0, requires_grad=True)]
    optimizer = FusedAdamW(params)
    optimizer.step()
    params[1].grad = torch.empty(0)
    optimizer.step()
    assert [float(optimizer.state[p]["step"]) for p in params] == [0, 1]


def test_group_that_ends_with_an_empty_tensor_is_stepped():
    """TransformerEngine 3207: the launch was sized by the last tensor."""
    params = [torch.ones(8, requires_grad=True), torch.empty(0, requires_grad=True)]
    for p in params:
        p.grad = torch.ones_like(p)
    FusedAdamW(params, lr=0.5).step()
    assert (params[0] < 0.6).all()


def test_wholly_empty_group_keeps_its_place_and_step():
    """Automodel 2997: a tail rank holds nothing of a group."""
    empty, full = torch.empty(0, 4, requires_grad=True), torch.ones(2, requires_grad=True)
    empty.grad, full.grad = torch.empty(0, 4), torch.ones(2)
    optimizer = FusedAdamW([{"params": [empty], "lr": 0.25}, {"params": [full]}])
    for _ in range(3):
        optimizer.step()
    saved = optimizer.state_dict()
    assert [group["lr"] for group in saved["param_groups"]] == [0.25, 1e-3]
    assert saved["state"][0]["step"] == saved["state"][1]["step"] == 3


@MODES
@DTYPES
@pytest.mark.parametrize("state_dtype", [F32, BF16], ids=["m32", "m16"])
def test_state_dict_round_trip_continues_to_the_bit(seed, tmp_path, master_weights, dtype, state_dtype):
    params = make(dtype)
    options = {"master_weights": master_weights, "state_dtype": state_dtype}
    first = FusedAdamW(groups_of(params), **options)
    first.step()
    twins = copy.deepcopy(params)
    second = FusedAdamW(groups_of(twins), **options)
    torch.save(first.state_dict(), tmp_path / "optimizer.pt")
    second.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    assert_same(snapshot(params, first), snapshot(twins, second))
    first.step()
    second.step()
    assert_same(snapshot(params, first), snapshot(twins, second))


def test_loading_keeps_dtypes_through_hooks_and_from_torch(seed):
    params = make(BF16)
    theirs = torch.optim.AdamW(params)
    theirs.step()
    saved = theirs.state_dict()
    for entry in saved["state"].values():
        entry["exp_avg"] = entry["exp_avg"].float()
        entry["exp_avg_sq"] = entry["exp_avg_sq"].float()
        entry["step"] = int(entry["step"])
    optimizer = FusedAdamW(params)
    optimizer.register_load_state_dict_pre_hook(lambda _, state: {**state, "param_groups": state["param_groups"]})
    optimizer.load_state_dict(saved)
    assert all(optimizer.state[p]["exp_avg"].dtype == F32 for p in params)
    optimizer.step()
    assert all(optimizer.state[p]["step"] == 2 and optimizer.state[p]["master_param"].dtype == F32 for p in params)
    assert not saved["state"][0].get("master_param")


def test_copy_keeps_the_settings(seed):
    params = make(BF16)
    optimizer = FusedAdamW(params, master_weights="remainder", state_dtype=BF16)
    optimizer.step()
    twin = copy.deepcopy(optimizer)
    assert (twin.master_weights, twin.state_dtype) == ("remainder", BF16)
    twin.step()


def test_tensor_lr_and_scheduler(seed):
    a = make()
    b = copy.deepcopy(a)
    numbers, tensors = FusedAdamW(a, lr=0.1), FusedAdamW(b, lr=torch.tensor(0.1))
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (numbers, tensors)]
    for _ in range(3):
        for optimizer, schedule in zip((numbers, tensors), schedules, strict=True):
            optimizer.step()
            schedule.step()
    for p, q in zip(a, b, strict=True):
        assert_as_good_as(q.detach(), p.detach(), p.detach().double(), name="param")


def test_closure_runs_with_gradients():
    p = torch.ones(3, requires_grad=True)
    optimizer = FusedAdamW([p])

    def closure():
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 3.0
    assert optimizer.state[p]["step"] == 1


@MODES
def test_found_inf_is_as_if_not_called(seed, master_weights):
    """pytorch 140514: skipping went wrong with found_inf present."""
    params = make(BF16)
    optimizer = FusedAdamW(params, master_weights=master_weights)
    optimizer.step(found_inf=torch.ones(()))
    assert not optimizer.state
    optimizer.step(found_inf=torch.zeros(()))
    before, versions = snapshot(params, optimizer), [p._version for p in params]
    optimizer.step(found_inf=torch.ones(1))
    optimizer.step(found_inf=torch.tensor(float("inf")))
    assert_same(before, snapshot(params, optimizer))
    assert versions == [p._version for p in params]


def test_grad_scaler_drives_the_step(seed):
    a = make(shapes=[(5,), (0,), (40, 3)])
    b = copy.deepcopy(a)
    plain, scaled = FusedAdamW(a), FusedAdamW(b)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(3):
        for p, q in zip(a, b, strict=True):
            p.grad = torch.randn(p.shape)
            q.grad = p.grad * scaler.get_scale()
        if step == 1:
            b[2].grad[7] = float("inf")
        else:
            plain.step()
        scaler.scale(torch.zeros(()))
        scaler.step(scaled)
        scaler.update()
    assert scaler.get_scale() == 512.0
    assert_same(snapshot(a, plain), snapshot(b, scaled))


def test_version_counters_move():
    p = torch.ones(3, requires_grad=True)
    kept = p.exp().sum() + (p * p).sum()
    p.grad = torch.ones(3)
    before = p._version
    FusedAdamW([p]).step()
    assert p._version > before
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.backward()


def test_transposed_parameter_and_gradient(seed):
    x, g = torch.randn(6, 5), torch.randn(6, 5)
    plain, laid = x.clone().requires_grad_(), x.t().contiguous().t().requires_grad_()
    plain.grad, laid.grad = g.clone(), g.t().contiguous().t()
    for p in (plain, laid):
        FusedAdamW([p], lr=0.1).step()
    assert laid.stride() == (1, 6) and torch.equal(plain, laid)


def test_unlike_strides_are_refused_before_anything_is_written(seed):
    """pytorch 106121: a gradient laid out otherwise was misread."""
    params = make(shapes=[(6, 5), (6, 5)])
    optimizer = FusedAdamW([{"params": params[:1]}, {"params": params[1:]}])
    optimizer.step()
    before = snapshot(params, optimizer)
    params[1].grad = params[1].grad.t().contiguous().t()
    with pytest.raises(ValueError, match=r"grads\[1\] has stride 1 on axis 0, params\[1\] has 5"):
        optimizer.step()
    assert_same(before, snapshot(params, optimizer))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"lr": -1.0}, ValueError, "lr is -1.0, a finite number of at least 0"),
        ({"lr": torch.tensor(-1.0)}, ValueError, "lr is -1.0"),
        ({"lr": torch.ones(2)}, ValueError, "lr is a tensor of 2 elements"),
        ({"lr": float("nan")}, ValueError, "lr is nan"),
        ({"eps": -1e-8}, ValueError, "eps is -1e-08"),
        ({"weight_decay": -0.1}, ValueError, "weight_decay is -0.1"),
        ({"betas": (1.0, 0.9)}, ValueError, r"betas are \(1.0, 0.9\)"),
        ({"betas": (0.9, -0.1)}, ValueError, r"betas are \(0.9, -0.1\)"),
        ({"betas": (0.9,)}, ValueError, r"betas are \(0.9,\), two numbers in \[0, 1\)"),
        ({"betas": (0.9, 0.9, 0.9)}, ValueError, r"betas are \(0.9, 0.9, 0.9\), two numbers"),
        ({"lr": float("inf")}, ValueError, "lr is inf, a finite number of at least 0"),
        ({"master_weights": "full"}, ValueError, "master_weights is 'full'"),
        ({"state_dtype": torch.float16}, TypeError, "state_dtype is torch.float16"),
    ],
)
def test_bad_settings(options, error, message):
    with pytest.raises(error, match=message):
        FusedAdamW([torch.ones(1, requires_grad=True)], **options)
    if "master_weights" not in options and "state_dtype" not in options:
        with pytest.raises(error, match=message):
            FusedAdamW([{"params": [torch.ones(1, requires_grad=True)], **options}])


def test_gradient_that_is_a_negated_view_keeps_its_sign():
    """A conjugate hands a one-element parameter a gradient whose memory holds the opposite sign."""
    p = torch.zeros(1, requires_grad=True)
    (torch.complex(torch.ones(1), p).conj() * torch.tensor([1j])).real.sum().backward()
    assert p.grad.is_neg() and p.grad == 1
    FusedAdamW([p], lr=0.1).step()
    assert p.item() == pytest.approx(-0.1)


def test_a_device_that_is_refused_leaves_the_others_as_they_were(seed):
    p, elsewhere = torch.randn(3, requires_grad=True), torch.ones(3, device="meta", requires_grad=True)
    p.grad, elsewhere.grad = torch.ones(3), torch.ones(3, device="meta")
    optimizer = FusedAdamW([p, elsewhere])
    before, version = p.detach().clone(), p._version
    with pytest.raises(ValueError, match="no memory that can be read here"):
        optimizer.step()
    assert torch.equal(p, before) and p._version == version
    assert optimizer.state[p]["step"] == 0 and not optimizer.state[p]["exp_avg"].any()


def test_half_precision_is_refused():
    p = torch.ones(3, dtype=torch.float16, requires_grad=True)
    p.grad = torch.ones_like(p)
    with pytest.raises(TypeError, match=r"params\[0\] is float16, float32 or bfloat16"):
        FusedAdamW([p]).step()
