"""A step of four microbatches under FSDP2 on two GPUs, gradients reduced after each or once at the end:
python -m benchmarks.parallel.bench_fsdp_cuda

24 layers of 2,048 (16 heads of 128, products of 6,400), 1.35 B parameters in float32, products in bfloat16, sums in
float32; microbatches of 4,096 tokens. With our reduce-scatter and with torch's.

Predicted before the first run (two H200s): 8 FLOPs a parameter and token with causal attention beside it, 46 TFLOP a
microbatch and 190 a step at 650 TFLOP/s: 290 ms. A reduction of 5.4 GB of float32 gradients sends 2.7 GB, 12 ms at 230
GB/s, three times more where every microbatch has one; all but the last layer's runs under the backward of the layer
before, 9 ms long, so that the two ways take the same time but for what the sums take from the products: ratio 1.01.
Peak: parameters and gradients 2.7 GB each a rank; whole gradients in bfloat16 are 2.7 GB more (deferred), in float32
5.4.
"""

import statistics

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional

from automodel_c.parallel import install_comm_hooks
from benchmarks.parallel.pairs import main, together

LAYERS, SIZE, HEADS, INNER, TOKENS, MICROBATCHES = 24, 2048, 16, 6400, 4096, 4


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(SIZE, 3 * SIZE, bias=False), nn.Linear(SIZE, SIZE, bias=False)
        self.gate_up, self.down = nn.Linear(SIZE, 2 * INNER, bias=False), nn.Linear(INNER, SIZE, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(functional.rms_norm(x, (SIZE,))).view(1, TOKENS, 3, HEADS, -1).transpose(1, 3).unbind(2)
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        gate, up = self.gate_up(functional.rms_norm(x, (SIZE,))).chunk(2, -1)
        return x + self.down(functional.silu(gate) * up)


def build(hooks):
    torch.manual_seed(0)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with torch.device("cuda"):
        model = nn.Sequential(*(Layer() for _ in range(LAYERS)))
    for layer in model:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if hooks:
        install_comm_hooks(model)
    return model


def step(model, data, each):
    for i, x in enumerate(data):
        model.set_requires_gradient_sync(each or i == len(data) - 1)
        model(x).float().square().mean().backward()
        if each and i == 0:
            assert all(2 * p.grad.to_local().numel() <= p.numel() + SIZE for p in model.parameters()), "shards alone"


def measured(model, data, rounds=6):
    """{way: (median ms, the slower rank's; peak GiB)} of both ways in turn, and their gradients' norms."""
    times, peaks, norms = {True: [], False: []}, {}, {}
    for n in range(rounds + 2):
        for each in times:
            model.zero_grad(set_to_none=True)
            together()
            torch.cuda.reset_peak_memory_stats()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            step(model, data, each)
            end.record()
            end.synchronize()
            peaks[each] = torch.cuda.max_memory_allocated() / 2**30
            norms[each] = [p.grad.full_tensor().norm() for p in (model[0].out.weight, model[-1].down.weight)]
            if n > 1:
                times[each].append(begin.elapsed_time(end))
    for a, b in zip(norms[True], norms[False], strict=True):
        assert abs(float(a / b) - 1) < 1e-2, "both ways have the same gradients"
    medians = torch.tensor([statistics.median(times[each]) for each in (True, False)], device="cuda")
    dist.all_reduce(medians, dist.ReduceOp.MAX)
    return dict(zip((True, False), zip(medians.tolist(), (peaks[True], peaks[False]), strict=True), strict=True))


def rows():
    torch.manual_seed(1 + dist.get_rank())
    data = [torch.randn(1, TOKENS, SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(MICROBATCHES)]
    for hooks in (True, False):
        model = build(hooks)
        found = measured(model, data)
        (ms, peak), (deferred_ms, deferred_peak) = found[True], found[False]
        yield {"what": "four microbatches, 1.35 B parameters", "reduction": "ours" if hooks else "torch",
               "each_ms": ms, "deferred_ms": deferred_ms, "each_GiB": peak, "deferred_GiB": deferred_peak,
               "ratio": ms / deferred_ms, "memory_ratio": peak / deferred_peak}  # fmt: skip
        del model
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main("fsdp_cuda", rows)
