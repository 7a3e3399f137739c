"""Plain formulas of the operators that are still being built. Deleted when they exist."""

import torch
import torch.nn.functional as F

from automodel_c import ops


def causal_conv1d(x, weight, *, activation="silu", pack=None):
    y = torch.zeros_like(x)
    parts = []
    w = weight.float()
    for s, e in pack.docs.tolist():
        if s == e:
            continue
        d = F.pad(x[s:e].float().T, (w.shape[1] - 1, 0))
        parts.append((torch.arange(s, e), F.silu(F.conv1d(d[None], w[:, None], groups=len(w))[0].T).to(x.dtype)))
    if parts:
        y = y.index_copy(0, torch.cat([a for a, _ in parts]), torch.cat([b for _, b in parts]))
    return y, None


def gdn_gate(a, b, A_log, dt_bias):
    return -A_log.exp() * F.softplus(a.float() + dt_bias), b.sigmoid()


def gated_delta_rule(q, k, v, g, beta, *, pack):
    hv, hk = v.shape[1], q.shape[1]
    dtype = v.dtype

    def norm(t):
        t = t.float().repeat_interleave(hv // hk, 1)
        return t * torch.rsqrt((t * t).sum(-1, keepdim=True) + 1e-6)

    q, k, v, g, beta = norm(q) * q.shape[-1] ** -0.5, norm(k), v.float(), g.float(), beta.float()
    rows, at = [], []
    for s, e in pack.docs.tolist():
        S = torch.zeros(hv, q.shape[-1], v.shape[-1])
        for t in range(s, e):
            S = S * g[t].exp()[:, None, None]
            d = (v[t] - (S * k[t, :, :, None]).sum(1)) * beta[t, :, None]
            S = S + k[t, :, :, None] * d[:, None]
            rows.append((S * q[t, :, :, None]).sum(1))
            at.append(t)
    out = torch.zeros_like(v)
    if at:
        out = out.index_copy(0, torch.tensor(at), torch.stack(rows))
    return out.to(dtype), None


def moe(hidden, router_weight, gate_up, down, *, top_k, padding=None, return_router_stats=False):
    p = F.linear(hidden, router_weight).softmax(-1, dtype=torch.float32)
    w, e = p.topk(top_k, -1)
    w = (w / w.sum(-1, keepdim=True)).to(hidden.dtype)
    real = torch.ones(len(hidden), dtype=torch.bool) if padding is None else ~padding
    out = torch.zeros_like(hidden)
    for i in range(len(gate_up)):
        t, s = torch.where((e == i) & real[:, None])
        y = F.linear(ops.swiglu(F.linear(hidden[t], gate_up[i])), down[i]) * w[t, s, None]
        out = out.index_add(0, t, y)
    if not return_router_stats:
        return out
    counts = F.one_hot(e[real], len(gate_up)).sum((0, 1)).float()
    return out, counts, p[real].sum(0), real.sum()


def per_layer_aux_loss(load, prob_sum, real_rows, *, top_k):
    n = real_rows.clamp(min=1).float()
    return (load * (len(load) / top_k) / n * (prob_sum / n)).sum()


def load_balancing_loss(stats):
    loads, prob_sums, rows = zip(*stats, strict=True)
    n = torch.stack(rows).sum().clamp(min=1).float()
    return ((sum(loads) / n) * (sum(prob_sums) / n)).sum() * len(loads[0])


def add_shared_expert(out, shared, gate):
    return out + gate.sigmoid() * shared


for f in (causal_conv1d, gdn_gate, gated_delta_rule, moe, per_layer_aux_loss, load_balancing_loss, add_shared_expert):
    if not hasattr(ops, f.__name__):
        setattr(ops, f.__name__, f)
