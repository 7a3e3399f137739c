"""The gates of a gated delta net layer in float64."""

import torch


def gdn_gate(a, b, A_log, dt_bias):
    """g = -exp(A_log) log(1 + e^(a + dt_bias)) and beta = sigmoid(b), float64."""
    s = a.double() + dt_bias.double()
    return -A_log.double().exp() * torch.logaddexp(s, torch.zeros_like(s)), torch.sigmoid(b.double())
