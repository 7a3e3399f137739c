"""What a call costs before any work: python -m benchmarks.ops.bench_binding."""

import torch

from automodel_c import _amcore
from benchmarks.harness import Case, main
from benchmarks.peers import Peer

BAR_S = 2e-6  # four tensors


def scale_case():
    """scale_ of three one-element tensors by a fourth."""
    tensors, factor = [torch.ones(1) for _ in range(3)], torch.full((1,), 0.5, dtype=torch.float64)
    others = [torch.ones(1) for _ in range(3)]

    def ours():
        _amcore.scale_(tensors, factor)
        return tensors

    def foreach(inputs):
        half = torch.tensor(0.5)

        def run():
            torch._foreach_mul_(others, half)
            return others

        return run

    def gate(outcomes):
        for name, values in outcomes.items():
            assert all(value.item() == 0.5 for value in values), f"{name}: {values}"

    yield Case(
        "binding", "scale_", "4 tensors", "float32", ours, gate, [Peer("foreach_mul_", torch.__version__, foreach)],
        bar_s=BAR_S,
    )  # fmt: skip


def reduce_case():
    """comm_reduce_parts of two tensors, beside torch.sum and torch.add into an output."""
    out, parts = torch.empty(1), torch.ones(2, 1)
    first, second = torch.ones(1), torch.ones(1)

    def ours():
        _amcore.comm_reduce_parts(out, parts, scale=1.0)
        return out

    peers = [
        Peer("sum(out=)", torch.__version__, lambda _: lambda: torch.sum(parts, 0, out=out)),
        Peer("add(out=)", torch.__version__, lambda _: lambda: torch.add(first, second, out=out)),
    ]

    def gate(outcomes):
        assert all(float(value) == 2.0 for value in outcomes.values()), outcomes

    yield Case("binding", "reduce_parts", "2 tensors", "float32", ours, gate, peers, bar_s=BAR_S)


def adam_case():
    """A step over one parameter of one element: five tensors in lists, five numbers."""
    parameter, step = torch.ones(1), torch.zeros(1)
    lists = [[parameter], [torch.zeros(1)], [torch.zeros(1)], [step], [torch.ones(1)]]

    def ours():
        _amcore.adam_step(*lists, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0)
        return parameter

    def gate(outcomes):
        assert abs(outcomes["ours"].item() - 0.999) < 1e-6 and step.item() == 1

    yield Case("binding", "adam_step", "5 tensors", "float32", ours, gate)


def index_case():
    """docs_from_ids of a tensor: one tensor in, one array out."""
    ids = torch.tensor([1, 1, 0, 2])

    def gate(outcomes):
        assert outcomes["ours"].tolist() == [[0, 2], [3, 4]]

    yield Case("binding", "docs_from_ids", "1 tensor", "int64", lambda: _amcore.docs_from_ids(ids), gate, bar_s=BAR_S)


SHAPES = {"scale": scale_case, "reduce": reduce_case, "adam": adam_case, "docs": index_case}

if __name__ == "__main__":
    main("binding", SHAPES)
