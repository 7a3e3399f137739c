"""The operators: one file each, differentiable, registered with torch as custom ops."""

from automodel_c.ops.attention import attention
from automodel_c.ops.conv import causal_conv1d
from automodel_c.ops.gate import gdn_gate
from automodel_c.ops.gdn import gated_delta_rule
from automodel_c.ops.loss import cross_entropy, linear_cross_entropy
from automodel_c.ops.mlp import gelu, sigmoid_gate, swiglu
from automodel_c.ops.moe import add_shared_expert, load_balancing_loss, moe, per_layer_aux_loss
from automodel_c.ops.norm import gated_rms_norm, layer_norm, rms_norm
from automodel_c.ops.rope import mrope, qk_norm_mrope, vision_rope

__all__ = [
    "add_shared_expert",
    "attention",
    "causal_conv1d",
    "cross_entropy",
    "gated_delta_rule",
    "gated_rms_norm",
    "gdn_gate",
    "gelu",
    "layer_norm",
    "linear_cross_entropy",
    "load_balancing_loss",
    "moe",
    "mrope",
    "per_layer_aux_loss",
    "qk_norm_mrope",
    "rms_norm",
    "sigmoid_gate",
    "swiglu",
    "vision_rope",
]
