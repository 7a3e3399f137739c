"""Routed experts in float64, token by token, and the auxiliary losses."""

import torch


def route(hidden, router_weight, top_k):
    """Probabilities [T, E], the chosen experts [T, k] (of equal ones the first), their weights [T, k]; float64."""
    p = torch.softmax(hidden.double() @ router_weight.double().T, -1)
    chosen = torch.sort(p, dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = torch.gather(p, 1, chosen)
    return p, chosen, weights / weights.sum(-1, keepdim=True)


def moe(hidden, router_weight, gate_up, down, *, top_k, padding=None):
    """out [T, H], load [E], prob_sum [E], count of real rows; float64, rows of padding 0.

    hidden [T, H], router_weight [E, H], gate_up [E, 2I, H] (gate first), down [E, H, I], padding bool [T].
    """
    real = [t for t in range(len(hidden)) if padding is None or not padding[t]]
    p, chosen, weights = route(hidden[real], router_weight, top_k)
    rows = [hidden.new_zeros(hidden.shape[1], dtype=torch.float64)] * len(hidden)
    wide, gate_ups, downs = hidden.double(), gate_up.double().unbind(), down.double().unbind()
    for i, t in enumerate(real):
        for e, w in zip(chosen[i].tolist(), weights[i].unbind(), strict=True):
            gate, up = (gate_ups[e] @ wide[t]).chunk(2)
            rows[t] = rows[t] + w * (downs[e] @ (gate * torch.sigmoid(gate) * up))
    out = torch.stack(rows) if rows else hidden.double()
    load = torch.bincount(chosen.reshape(-1), minlength=len(router_weight)).double()
    return out, load, p.sum(0), len(real)


def weight_grads(hidden, router_weight, gate_up, down, dout, *, top_k, held=None):
    """(dgate_up, ddown) of `moe` for the gradient dout [T, H] of its output, added to those that are held; float64."""
    weights = [x.detach().double().requires_grad_() for x in (gate_up, down)]
    out = moe(hidden.double(), router_weight.double(), *weights, top_k=top_k)[0]
    grads = torch.autograd.grad(out, weights, dout.double())
    return tuple(grad if held is None else held[i].double() + grad for i, grad in enumerate(grads))


def aux_loss(load, prob_sum, n, top_k):
    """Sum over e of (load_e E / (k N)) (prob_sum_e / N), N = max(n, 1), float64."""
    n = max(n, 1)
    return (load.double() * len(load) / (top_k * n) * (prob_sum.double() / n)).sum()


def load_balancing_loss(stats):
    """E times the sum over e of (count_e / N) (prob_sum_e / N) over all layers' (load, prob_sum, n), float64."""
    n = max(sum(int(rows) for _, _, rows in stats), 1)
    load = sum(x.double() for x, _, _ in stats)
    prob_sum = sum(x.double() for _, x, _ in stats)
    return len(load) * (load / n * (prob_sum / n)).sum()


def add_shared_expert(out, shared, gate):
    """out + sigmoid(gate) * shared, float64; gate [T, 1] or [T]."""
    return out.double() + torch.sigmoid(gate.double().reshape(-1, 1)) * shared.double()
