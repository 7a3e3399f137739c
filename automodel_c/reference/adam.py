"""AdamW (Loshchilov and Hutter, 2019, algorithm 2, with the schedule multiplier inside lr) and clipping by norm."""

import torch


def adamw(
    param, exp_avg, exp_avg_sq, grad, step, *, lr, beta1, beta2, eps, weight_decay, grad_scale=1.0, dtype=torch.float64
):
    """(param, exp_avg, exp_avg_sq) after step number `step`, counted from 1, in `dtype`; shapes as given.

    In float32 it is the plain formula that the error rule compares with.
    """
    p, m, v, g = (x.detach().to(dtype) for x in (param, exp_avg, exp_avg_sq, grad))
    g = g / grad_scale
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    m_hat = m / (1 - beta1**step)
    v_hat = v / (1 - beta2**step)
    return p - lr * (m_hat / (v_hat.sqrt() + eps) + weight_decay * p), m, v


def master_of(param, remainder):
    """The float32 master behind a bfloat16 parameter and its int16 remainder: bits = (param << 16) + remainder."""
    high = param.detach().contiguous().view(torch.int16).to(torch.int64) << 16
    bits = (high + remainder.to(torch.int64)) & 0xFFFFFFFF
    signed = torch.where(bits >= 1 << 31, bits - (1 << 32), bits)
    return signed.to(torch.int32).view(torch.float32).view(param.shape)


def clip(grads, max_norm, dtype=torch.float64):
    """(clipped gradients, norm): scaled by max_norm / norm where the norm of all is above `max_norm` and finite."""
    grads = [g.detach().to(dtype) for g in grads]
    largest = max((g.abs().max() for g in grads if g.numel()), default=torch.zeros((), dtype=dtype))
    if largest == 0 or not largest.isfinite():
        return grads, largest
    norm = largest * sum(((g / largest) ** 2).sum() for g in grads).sqrt()
    return ([g * (max_norm / norm) for g in grads] if norm > max_norm else grads), norm
