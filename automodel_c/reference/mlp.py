"""Elementwise gates in float64."""

import math

import torch


def swiglu(gate_up, up=None):
    """gate * sigmoid(gate) * up; without `up`, gate and up are the halves of the last axis. float64."""
    gate, up = gate_up.double().chunk(2, dim=-1) if up is None else (gate_up.double(), up.double())
    return gate * torch.sigmoid(gate) * up


def sigmoid_gate(x, gate):
    """x * sigmoid(gate), float64."""
    return x.double() * torch.sigmoid(gate.double())


def gelu(x, approximate="none"):
    """x times the normal distribution function at x, or its tanh approximation, float64."""
    x = x.double()
    if approximate == "tanh":
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))
