"""The packed causal convolution written from its formula, in float64."""

import torch


def causal_conv1d(x, weight, docs, *, bias=None, silu=True, initial_state=None):
    """y [T, C] and final_state [N, C, W - 1] by autograd-friendly torch operations, float64.

    z[t] = bias + sum_j weight[:, j] u[t + j], u being a document's state (0 without one) and its rows. x [T, C], weight
    [C, W], docs [N, 2] starts and ends, initial_state [N, C, W - 1]. Rows outside documents give 0.
    """
    x, weight = x.double(), weight.double()
    width = weight.shape[1]
    y, rows, pieces, states = torch.zeros_like(x), [], [], []
    for n, (start, end) in enumerate((int(a), int(b)) for a, b in docs):
        state = x.new_zeros(x.shape[1], width - 1) if initial_state is None else initial_state[n].double()
        u = torch.cat([state.T, x[start:end]])
        states.append(u[end - start :].T)
        if end == start:
            continue
        z = sum(u[j : j + end - start] * weight[:, j] for j in range(width))
        z = z if bias is None else z + bias.double()
        rows.append(torch.arange(start, end, device=x.device))
        pieces.append(z * torch.sigmoid(z) if silu else z)
    if pieces:
        y = y.index_copy(0, torch.cat(rows), torch.cat(pieces))
    return y, torch.stack(states) if states else x.new_zeros(0, x.shape[1], width - 1)
