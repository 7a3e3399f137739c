"""What several ranks do together: one pack's tokens, vision frames, FSDP2's reductions, and what happens on failure."""

from automodel_c.parallel import faults
from automodel_c.parallel.attention import attention
from automodel_c.parallel.context import ContextParallel
from automodel_c.parallel.conv import causal_conv1d
from automodel_c.parallel.exchange import wire
from automodel_c.parallel.faults import RankFailure
from automodel_c.parallel.frame_shard import shard_vision
from automodel_c.parallel.fsdp_hooks import install_comm_hooks
from automodel_c.parallel.gdn import gated_delta_rule
from automodel_c.parallel.grad_reduction import grad_reduction_from_config, set_grad_reduction, sum_gradients
from automodel_c.parallel.pipeline import PipelineParallel
from automodel_c.parallel.plan import ContextPlan, Prices
from automodel_c.parallel.recompute import checkpoint_context_fn
from automodel_c.parallel.tensor import TensorParallel

__all__ = [
    "ContextParallel",
    "ContextPlan",
    "PipelineParallel",
    "Prices",
    "RankFailure",
    "TensorParallel",
    "attention",
    "causal_conv1d",
    "checkpoint_context_fn",
    "faults",
    "gated_delta_rule",
    "grad_reduction_from_config",
    "install_comm_hooks",
    "set_grad_reduction",
    "shard_vision",
    "sum_gradients",
    "wire",
]
