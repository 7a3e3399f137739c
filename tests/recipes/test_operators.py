"""One step of the digits recipe runs every operator here, and none of torch's in their place."""

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
    "gated_rms_norm_backward", "layer_norm_forward", "layer_norm_backward", "mrope", "vision_rope", "swiglu_forward",
    "swiglu_backward", "sigmoid_gate_forward", "sigmoid_gate_backward", "gelu_forward", "gelu_backward",
    "linear_cross_entropy_rows", "linear_cross_entropy_grad", "adam_step", "grad_sumsq",
}  # fmt: skip
NEVER = (
    "scaled_dot_product",
    "cross_entropy_loss",
    "nll_loss",
    "log_softmax",
    "_fused_adamw",
    "native_layer_norm",
    "gelu",
)


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


def test_one_step_runs_here(tiny, tmp_path, counted, monkeypatch):
    for key, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("MASTER_PORT", "29533")
    recipe = load_recipe(DIGITS, [*tiny, f"output_dir={tmp_path}"])
    with start_ranks(recipe) as runtime:
        run = build(recipe, runtime)
        batches = [next(iter(_loader(run))) for _ in range(run.sampler.microbatches)]
        assert int(batches[0]["attention_mask"].max()) > 1, "a pack holds several documents"
        counted.clear()
        with Calls() as calls:
            _step(run, 1, batches)
    assert set(counted) >= RUN, sorted(RUN - set(counted))
    assert not [name for name in calls.names if any(word in name for word in NEVER) and "automodel_c" not in name]
