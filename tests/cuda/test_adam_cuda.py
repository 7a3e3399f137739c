"""The CUDA kernels of adam beside the CPU's: the same operations in the same order, so the same bits."""

import copy

import pytest
import torch

from automodel_c import _amcore
from automodel_c.optim import FusedAdamW, clip_grad_norm_
from automodel_c.reference import adam as reference
from tests.numerics import assert_as_good_as
from tests.ops.test_adam import BF16, F32, HYPER, SIZES, Lists

pytestmark = pytest.mark.cuda

masters = pytest.mark.parametrize("master", [None, "none", "full", "remainder"], ids=str)


def on_cuda(lists):
    twin = copy.copy(lists)
    for key, value in vars(lists).items():
        setattr(twin, key, [t.cuda() for t in value] if isinstance(value, list) else value)
    return twin


def assert_same(cpu, cuda):
    for x, y in zip(cpu.all(), cuda.all(), strict=True):
        assert torch.equal(x, y.cpu())


@pytest.mark.parametrize("moment", [F32, BF16], ids=["m32", "m16"])
@pytest.mark.parametrize("grad", [F32, BF16], ids=["g32", "g16"])
@masters
def test_adam_step(seed, master, grad, moment):
    cpu = Lists([n for sizes in SIZES.values() for n in sizes], master, moment, grad, 6)
    cuda = on_cuda(cpu)
    for _ in range(3):
        cpu.step()
        cuda.step()
    assert_same(cpu, cuda)


def askew(tensors):
    """The same values one element behind where 16-byte words start."""
    return [torch.cat([t.new_zeros(1), t.flatten()])[1:] for t in tensors]


@masters
def test_tensors_that_start_anywhere(seed, master):
    cpu = Lists([1, 3, 4097, 40_001], master)
    cuda = on_cuda(cpu)
    cuda.params, cuda.exp_avgs = askew(cuda.params), askew(cuda.exp_avgs)
    assert cuda.params[0].data_ptr() % 16 and not cuda.grads[0].data_ptr() % 16
    for lists in (cpu, cuda):
        lists.step()
    assert_same(cpu, cuda)


def test_more_tensors_than_a_launch_takes(seed):
    cpu = Lists([i % 5 for i in range(2000)])
    cuda = on_cuda(cpu)
    numbers = {key: [value] * 3 for key, value in HYPER.items()}
    for lists in (cpu, cuda):
        lists.step(group_sizes=[900, 0, 1100], **numbers)
    assert_same(cpu, cuda)


@masters
def test_found_inf_lr_and_scale_are_read_on_the_device(seed, master):
    cpu = Lists([5, 0, 3000], master)
    cuda = on_cuda(cpu)
    before = [t.clone() for t in cuda.all()]
    cuda.step(found_inf=torch.ones((), device="cuda"))
    assert all(torch.equal(a, b) for a, b in zip(before, cuda.all(), strict=True))
    cpu.step(lr_tensors=[torch.tensor(0.3)], grad_scale=torch.tensor(8.0))
    cuda.step(
        found_inf=torch.zeros((), device="cuda"),
        lr_tensors=[torch.tensor(0.3, device="cuda")],
        grad_scale=torch.tensor(8.0, device="cuda"),
    )
    assert_same(cpu, cuda)


def test_captured_graph_counts_steps_of_a_loaded_state(seed):
    """pytorch 80809: states loaded from a host optimizer, then captured."""
    host = [torch.randn(100, requires_grad=True), torch.empty(0, requires_grad=True)]
    for p in host:
        p.grad = torch.randn(p.shape)
    first = FusedAdamW(host)
    first.step()
    params = [p.detach().cuda().requires_grad_() for p in host]
    for p, q in zip(params, host, strict=True):
        p.grad = q.grad.cuda()
    optimizer = FusedAdamW(params, lr=torch.tensor(1e-3, device="cuda"))
    optimizer.load_state_dict(first.state_dict())
    twin = [p.detach().clone().requires_grad_() for p in params]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(params, twin, strict=True))
    for _ in range(4):
        graph.replay()
        first.step()
    for p, q in zip(params, host, strict=True):
        assert optimizer.state[p]["step"] == 5
        assert torch.equal(p.cpu(), q)


def test_work_goes_to_the_current_stream(seed):
    lists = on_cuda(Lists([1 << 20]))
    expected = on_cuda(lists)
    lists.params, expected.params = [lists.params[0].clone()], [lists.params[0].clone()]
    lists.exp_avgs = [t.clone() for t in lists.exp_avgs]
    lists.exp_avg_sqs = [t.clone() for t in lists.exp_avg_sqs]
    lists.steps = [t.clone() for t in lists.steps]
    expected.step()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        lists.step()
        torch.testing.assert_close(lists.params[0], expected.params[0], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
def test_clip(seed, dtype):
    grads = [torch.randn(n).to(dtype) for n in (5, 0, 1000, 300_001, *range(2000))]
    sides = []
    for device in ("cpu", "cuda"):
        params = [torch.zeros_like(g, device=device).requires_grad_() for g in grads]
        for p, g in zip(params, grads, strict=True):
            p.grad = g.to(device, copy=True)
        sides.append((clip_grad_norm_(params, 3.0), params))
    (norm, params), (cuda_norm, cuda_params) = sides
    assert cuda_norm.is_cuda and abs(float(cuda_norm) / float(norm) - 1) < 1e-6
    truth, _ = reference.clip(grads, 3.0)
    for p, q, ref in zip(params, cuda_params, truth, strict=True):
        assert_as_good_as(q.grad.cpu(), p.grad, ref, name="grad")
    again = clip_grad_norm_(cuda_params, 3.01)
    assert abs(float(again) - 3.0) < (1e-5 if dtype == F32 else 1e-2)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("offset", [0, 1, 3, 7])
def test_clip_of_tensors_that_start_anywhere(seed, dtype, offset):
    whole = [torch.randn(n + offset, device="cuda").to(dtype) for n in (1, 2, 7, 9, 100_003)]
    params = [torch.zeros(len(g) - offset, device="cuda", dtype=dtype).requires_grad_() for g in whole]
    for p, g in zip(params, whole, strict=True):
        p.grad = g[offset:]
    before = [g.clone() for g in whole]
    norm = clip_grad_norm_(params, 0.5)
    truth = torch.cat([g[offset:].double() for g in before]).norm()
    assert abs(float(norm) / float(truth) - 1) < 1e-6
    for g, first in zip(whole, before, strict=True):
        assert torch.equal(g[:offset], first[:offset])
        expected = (first[offset:].double() * (0.5 / truth)).to(torch.float32).to(dtype)
        torch.testing.assert_close(g[offset:], expected, rtol=2**-7 if dtype == BF16 else 1e-6, atol=0)


def test_scale_by_one_writes_nothing():
    x = torch.tensor([1.0, float("nan")], device="cuda")
    _amcore.scale_([x], torch.ones(1, dtype=torch.float64, device="cuda"))
    assert x[0] == 1.0


def test_mixed_devices_are_refused():
    lists = Lists([3])
    lists.grads = [t.cuda() for t in lists.grads]
    with pytest.raises(ValueError, match="is on cuda"):
        lists.step()
