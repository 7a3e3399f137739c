"""Which collectives Inductor fuses with products of split weights: in a process of its own, on a CPU, with a group that
sends nothing. Prints {"mlp": {operator: how often}, "attention": ...}, forward and backward together."""

import collections
import json
from unittest import mock

import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass
from torch.distributed import _symmetric_memory as symmetric
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend "fake"

from automodel_c.models.qwen3_5.layers import MLP
from automodel_c.parallel import TensorParallel, tensor


def counted(found):
    """A backend that runs what Inductor's pass is shown, and counts what the pass makes of it."""

    def compile(gm, _):
        graph = torch.fx.Graph()
        graph.output(graph.graph_copy(gm.graph, {}))
        for new, old in zip(graph.nodes, gm.graph.nodes, strict=True):
            new.meta = old.meta
        with mock.patch("torch.distributed.is_nccl_available", lambda: True):
            micro_pipeline_tp_pass(graph)
        found.append(collections.Counter(str(n.target) for n in graph.nodes if n.op == "call_function"))
        return make_boxed_func(gm.forward)

    return aot_autograd(fw_compiler=compile, bw_compiler=compile)


def main():
    dist.init_process_group("fake", rank=0, world_size=2, store=dist.HashStore())
    tp = TensorParallel(init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))["tp"])
    told = {}
    with mock.patch.object(symmetric, "is_symm_mem_enabled_for_group", lambda _: True):  # the wheels for CPUs have none
        for name in ("mlp", "attention"):
            found = []
            with mock.patch.object(tensor, "compiled", lambda f, found=found: torch.compile(f, backend=counted(found))):
                run(name, tp)
            names = ("all_gather_matmul", "matmul_reduce_scatter", "all_gather_into_tensor", "reduce_scatter_tensor")
            told[name] = {n: sum(c for of in found for key, c in of.items() if n in key) for n in names}
    print(json.dumps(told))


def run(name, tp):
    x = torch.randn(8, 32, requires_grad=True)
    if name == "mlp":
        mlp = MLP(32, 24)
        mlp.tp, mlp.asynchronous = tp, True
        mlp(x).sum().backward()
    else:
        weights = [torch.randn(n, 32, requires_grad=True) for n in (64, 16, 16)]
        q, k, v = tp.products(x, weights, True)
        out = tp.product(torch.cat([q[:, :32], k, v], -1), torch.randn(32, 64, requires_grad=True), True)
        out.sum().backward()


if __name__ == "__main__":
    main()
