"""What parallelize_qwen3_5 does with its options: which activations are made again, which weights stay gathered."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from automodel_c.models import qwen3_5
from tests.models import fill_worker as worker
from tests.models import packs
from tests.models.test_fill import mapping
from tests.patch import models


class Products(TorchDispatchMode):
    """Counts products of matrices and gated delta rules."""

    def __init__(self):
        super().__init__()
        self.products = self.rules = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.products += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        self.rules += func is torch.ops.automodel_c.gated_delta_rule_forward.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_selective_checkpointing_makes_half_the_products_again(family):
    found = {}
    for value in (False, "selective", "full"):
        torch.manual_seed(2)
        model = qwen3_5.load(models.config(family), activation_checkpointing=value)
        loss, _ = model(packs.pack(packs.PACKS["mixed"]))
        with Products() as counted:
            loss.backward()
        found[value] = counted.products, counted.rules
    again = {value: products - found[False][0] for value, (products, _) in found.items()}
    assert again["full"] >= 20 and abs(2 * again["selective"] - again["full"]) <= 6  # one odd product a layer or block
    assert [rules for _, rules in found.values()] == [0, 0, 2]


@pytest.mark.parametrize(
    ("value", "scope", "frozen", "expected"),
    [
        (False, "all", False, [False, False, False]),
        (True, "all", False, ["full", "full", "full"]),
        ("full", "language", False, ["full", "full", False]),
        ("selective", "vision", False, [False, False, "selective"]),
        ("selective", "all", True, ["selective", "selective", False]),
        ("full", "vision", True, [False, False, False]),
        ("some", "all", False, "ValueError: activation_checkpointing is 'some'"),
        (True, "audio", False, "ValueError: activation_checkpointing_scope is 'audio', one of all, language, vision"),
    ],
)
def test_scopes(ranks, value, scope, frozen, expected):
    options = {"activation_checkpointing": value, "activation_checkpointing_scope": scope}
    for found in ranks.run(worker.parts_made_again, mapping(), frozen, **options):
        assert found == expected if isinstance(expected, list) else found.startswith(expected)


def test_compilation_is_refused_with_the_reason(ranks):
    (message, _) = ranks.run(worker.parts_made_again, mapping(), False, compile=True)
    assert message.startswith("NotImplementedError: distributed.enable_compile=True") and "another" not in message
    assert "compiled again for every step's" in message


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [True, True, False]),  # FSDP2's own way
        ({"reshard_after_forward": True}, [True, True, True]),
        ({"reshard_after_forward": False}, [False, False, False]),
        ({"experts_reshard_after_forward": False}, [False, True, False]),
    ],
)
def test_weights_that_stay_gathered(rank_pools, options, expected):
    assert rank_pools(4).run(worker.resharded, mapping(), 2, **options) == [expected] * 4
