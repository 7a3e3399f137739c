"""One step of the digits recipe runs every operator here, and of torch dense layers, lookups and sums alone."""

from collections import Counter

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from automodel_c import _amcore
from automodel_c.recipes.config import load_recipe
from automodel_c.recipes.finetune_vlm import _loader, _step, build
from automodel_c.recipes.runtime import start_ranks
from tests.recipes.conftest import DIGITS

RUN = {
    "attention_forward", "attention_backward", "rms_norm_forward", "rms_norm_backward", "gated_rms_norm_forward",
    "gated_rms_norm_backward", "layer_norm_forward", "layer_norm_backward", "qk_norm_mrope_forward",
    "qk_norm_mrope_backward", "vision_rope", "swiglu_forward", "swiglu_backward", "sigmoid_gate_forward",
    "sigmoid_gate_backward", "gelu_forward", "gelu_backward", "gated_delta_rule_forward",
    "gated_delta_rule_backward", "causal_conv1d_forward", "causal_conv1d_backward", "gdn_gate_forward",
    "gdn_gate_backward", "moe_forward", "moe_backward", "shared_expert_forward", "shared_expert_backward",
    "linear_cross_entropy_rows", "linear_cross_entropy_grad", "adam_step", "grad_sumsq",
}  # fmt: skip
# what torch may do in a step: dense layers, rows of tables by index, sums and scales, and memory
TORCH = {
    "mm", "addmm", "embedding", "embedding_dense_backward", "_embedding_bag", "_embedding_bag_backward",
    "index_copy", "index_select", "index_fill", "index_add", "add", "add_", "sum", "mul", "mul_", "div", "div_",
    "copy_", "_to_copy", "clone", "cat", "stack", "view", "_unsafe_view", "t", "transpose", "as_strided", "detach",
    "alias", "expand", "select", "slice", "slice_backward", "split", "split_with_sizes", "squeeze", "unsqueeze",
    "unbind", "permute", "empty", "empty_strided", "zeros", "zeros_like", "new_zeros", "new_empty", "ones_like",
    "full", "fill_", "arange", "scalar_tensor", "lift_fresh", "_local_scalar_dense",
    "any", "abs", "eq", "ne", "gt", "where", "masked_fill", "bitwise_and", "bitwise_not", "isfinite",  # checks
    "clamp", "sqrt", "reciprocal",  # of the gradient norm
}  # fmt: skip


class Calls(TorchDispatchMode):
    """Counts the operators of torch that run."""

    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def counted(monkeypatch):
    """Counter of the functions of _amcore that were called."""
    calls = Counter()

    def wrap(name, function):
        def counting(*args, **kwargs):
            calls[name] += 1
            return function(*args, **kwargs)

        return counting

    for name in dir(_amcore):
        function = getattr(_amcore, name)
        if callable(function) and not isinstance(function, type) and not name.startswith("_"):
            monkeypatch.setattr(_amcore, name, wrap(name, function))
    return calls


PARTS = ("model.config.text_config.output_router_logits=true", "model.config.text_config.mtp_num_hidden_layers=1")


@pytest.mark.parametrize("parts", [(), PARTS], ids=["plain", "auxiliary-and-mtp"])
def test_one_step_runs_here(tiny, tmp_path, counted, monkeypatch, parts):
    for key, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("MASTER_PORT", "29533")
    recipe = load_recipe(DIGITS, [*tiny, *parts, f"output_dir={tmp_path}"])
    with start_ranks(recipe) as runtime:
        run = build(recipe, runtime)
        batches = [next(iter(_loader(run))) for _ in range(run.sampler.microbatches)]
        documents = len(batches[0]["cu_seqlens"]) - 1
        assert documents > recipe.step_scheduler.local_batch_size, "a pack holds several documents"
        counted.clear()
        with Calls() as calls:
            _step(run, 1, batches)
    assert set(counted) >= RUN, sorted(RUN - set(counted))
    namespaces = {"automodel_c", "c10d", "fsdp", "profiler"}
    names = {tuple(name.split(".")[:2]) for name in calls.names}
    assert {name for space, name in names if space not in namespaces} <= TORCH
