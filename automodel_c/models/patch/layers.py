"""Forwards of the small modules; `self` is transformers' or torch's module."""

from automodel_c import ops


def rms_norm(self, x):
    return ops.rms_norm(x, self.weight, eps=self.eps)


def gated_rms_norm(self, hidden_states, gate):
    return ops.gated_rms_norm(hidden_states, gate, self.weight, eps=self.variance_epsilon)


def layer_norm(self, x):
    return ops.layer_norm(x, self.weight, self.bias, eps=self.eps)


def mlp(self, x):
    return self.down_proj(ops.swiglu(self.gate_proj(x), self.up_proj(x)))


def gelu(self, x):
    return ops.gelu(x)


def gelu_tanh(self, x):
    return ops.gelu(x, approximate="tanh")
