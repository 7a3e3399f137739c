"""The gated delta rule written from its recurrence, in float64 (or the dtype of its inputs)."""

import torch
from torch.utils.checkpoint import checkpoint


def gated_delta_rule(q, k, v, g, beta, docs, *, scale=None, qk_l2norm=True, initial_state=None):
    """The recurrence of each document, token by token, by autograd-friendly torch operations.

    q, k [T, Hk, Dk], v [T, Hv, Dv], g and beta [T, Hv] in any floating dtype; docs [N, 2] starts and ends;
    initial_state [N, Hv, Dk, Dv] or None for 0. Returns o [T, Hv, Dv], 0 outside the documents, and the final states.
    """
    scale = q.shape[2] ** -0.5 if scale is None else scale
    group = v.shape[1] // k.shape[1]
    rows, finals = [torch.zeros_like(v[:0])], []
    places = [torch.arange(0, device=v.device)]
    for n, (start, end) in enumerate(docs):
        shape = (v.shape[1], k.shape[2], v.shape[2])
        state = v.new_zeros(shape) if initial_state is None else initial_state[n]
        for t in range(int(start), int(end)):
            query, key = (_unit(x[t]) if qk_l2norm else x[t] for x in (q, k))
            query, key = (x.repeat_interleave(group, 0) for x in (scale * query, key))
            state = g[t].exp()[:, None, None] * state
            known = torch.einsum("hkv,hk->hv", state, key)
            state = state + torch.einsum("hk,hv->hkv", key, beta[t][:, None] * (v[t] - known))
            rows.append(torch.einsum("hkv,hk->hv", state, query)[None])
        places.append(torch.arange(int(start), int(end), device=v.device))
        finals.append(state)
    o = torch.zeros_like(v).index_copy(0, torch.cat(places), torch.cat(rows))
    return o, torch.stack(finals) if finals else v.new_zeros(0, v.shape[1], k.shape[2], v.shape[2])


def closed_form(q, k, v, g, beta, docs, *, scale=None):
    """o of `gated_delta_rule` with l2 norms and states from 0, without a state or a chunk: what the recurrence takes
    thousands of steps for, in time and memory that grow with the square of a document.

    With c the running sum of g and D[i, j] = exp(c_i - c_j) for j <= i, the rows that the state ever receives solve
    (I + A) u = beta v, A the strictly lower part of beta_i (k_i . k_j) D[i, j]; o = lower(q_i . k_j D[i, j]) u.
    """
    scale = q.shape[2] ** -0.5 if scale is None else scale
    group = v.shape[1] // k.shape[1]
    o = torch.zeros_like(v)
    for start, end in docs:
        rows = slice(int(start), int(end))
        heads = [
            checkpoint(
                _closed_head,
                q[rows, h // group],
                k[rows, h // group],
                *(x[rows, h] for x in (v, g, beta)),
                scale,
                use_reentrant=False,
            )
            for h in range(v.shape[1])
        ]
        o = torch.cat([o[: rows.start], torch.stack(heads, 1), o[rows.stop :]])
    return o


def _closed_head(q, k, v, g, beta, scale):
    q, k = scale * _unit(q), _unit(k)
    total = g.cumsum(0)
    seen = torch.ones(len(g), len(g), dtype=torch.bool).tril()
    decay = (total[:, None] - total).masked_fill(~seen, -torch.inf).exp()
    u = torch.linalg.solve_triangular(
        (beta[:, None] * (k @ k.T) * decay).tril(-1), beta[:, None] * v, upper=False, unitriangular=True
    )
    return (q @ k.T * decay) @ u


def _unit(x):
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
