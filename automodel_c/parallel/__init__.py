"""What several ranks do together: FSDP2's reductions, vision frames, and what happens when a rank fails."""

from automodel_c.parallel import faults
from automodel_c.parallel.faults import RankFailure
from automodel_c.parallel.frame_shard import shard_vision
from automodel_c.parallel.fsdp_hooks import install_comm_hooks
from automodel_c.parallel.grad_reduction import grad_reduction_from_config, set_grad_reduction, sum_gradients

__all__ = [
    "RankFailure",
    "faults",
    "grad_reduction_from_config",
    "install_comm_hooks",
    "set_grad_reduction",
    "shard_vision",
    "sum_gradients",
]
