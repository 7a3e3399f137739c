"""Forward of the gated delta net layers; `self` is transformers' module."""

from torch import nn

from automodel_c import ops

from .documents import PLAN

_WIDEST = 8  # taps of the convolution


def misfit(self):
    """Why the operators do not run this layer, None where they do."""
    if self.activation not in ("silu", "swish"):
        return f"hidden_act is {self.activation!r}, not silu"
    for name, dim in (("key", self.head_k_dim), ("value", self.head_v_dim)):
        if dim % 8 or not 0 < dim <= 256:
            return f"{name} head dim {dim} has no kernel, multiples of 8 up to 256 have"
    if self.num_v_heads % self.num_k_heads:
        return f"{self.num_v_heads} value heads are no multiple of {self.num_k_heads} key heads"
    if self.conv_kernel_size > _WIDEST:
        return f"the convolution has {self.conv_kernel_size} taps, at most {_WIDEST} have a kernel"
    if not isinstance(self.conv1d, nn.Conv1d):
        return f"conv1d is a {type(self.conv1d).__name__}"
    return None


def gated_delta_net(self, hidden_states, *args, **kwargs):
    """hidden_states [B, L, H] -> [B, L, H], padding's rows 0; transformers' own code where a cache is filled or no
    TextPlan comes along."""
    plan = kwargs.pop(PLAN, None)
    if plan is None or args or _cache(kwargs) is not None:
        return on_transformers(self, hidden_states, *args, plan=plan, **kwargs)
    x = hidden_states.flatten(0, 1)
    weight = self.conv1d.weight.squeeze(1)
    qkv = plan.causal_conv1d(self.in_proj_qkv(x), weight, self.conv1d.bias)
    q, k, v = qkv.split([self.key_dim, self.key_dim, self.value_dim], dim=-1)
    q, k = (part.unflatten(-1, (-1, self.head_k_dim)) for part in (q, k))
    v = v.unflatten(-1, (-1, self.head_v_dim))
    g, beta = ops.gdn_gate(self.in_proj_a(x), self.in_proj_b(x), self.A_log.float(), self.dt_bias.float())
    out = plan.gated_delta_rule(q, k, v, g, beta)
    z = self.in_proj_z(x).view(-1, self.head_v_dim)
    out = self.norm(out.reshape(-1, self.head_v_dim), z)
    return self.out_proj(out.view(*hidden_states.shape[:2], self.value_dim))


def left(self, hidden_states, *args, **kwargs):
    """As transformers' forward, which knows no TextPlan."""
    return on_transformers(self, hidden_states, *args, plan=kwargs.pop(PLAN, None), **kwargs)


def on_transformers(self, hidden_states, *args, plan, **kwargs):
    if plan is not None and not args:
        kwargs["attention_mask"] = plan.row_mask
    return type(self).forward(self, hidden_states, *args, **kwargs)


def _cache(kwargs):
    return kwargs.get("cache", kwargs.get("cache_params"))
