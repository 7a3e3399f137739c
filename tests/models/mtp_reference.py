"""The head of multi-token prediction from its formula, a document at a time, in the dtype of its inputs."""

import torch
import torch.nn.functional as F


def rms_norm(x, weight, eps=1e-6):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (1 + weight)


def rotate(x, positions, config):
    """x [T, heads, D], positions [3, T]: pair (i, i + R / 2) of the first R elements turns by the position of the axis
    that i stands for times theta^(-2 i / R)."""
    half = config.rotary_dim // 2
    angles = torch.empty(x.shape[0], half, dtype=torch.float64)
    for i in range(half):
        axis = i % 3 if i < 3 * config.mrope_section[i % 3] else 0
        angles[:, i] = positions[axis] * config.rope_theta ** (-2 * i / config.rotary_dim)
    cos, sin = (f(angles).to(x.dtype)[:, None] for f in (torch.cos, torch.sin))
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


def attention(x, positions, p, config):
    tokens, dim = x.shape[0], config.head_dim
    q, gate = F.linear(x, p["q_proj.weight"]).view(tokens, -1, 2 * dim).chunk(2, -1)
    k, v = (F.linear(x, p[f"{name}_proj.weight"]).view(tokens, -1, dim) for name in "kv")
    q = rotate(rms_norm(q, p["q_norm.weight"]), positions, config)
    k = rotate(rms_norm(k, p["k_norm.weight"]), positions, config)
    k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], 1) for part in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * dim**-0.5
    scores = scores.masked_fill(torch.ones(tokens, tokens).triu(1).bool(), -torch.inf)
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v) * gate.sigmoid()
    return F.linear(out.reshape(tokens, -1), p["o_proj.weight"])


def swiglu(x, gate, up, down):
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def experts(x, p, config):
    weights, chosen = F.linear(x, p["gate.weight"]).softmax(-1).topk(config.num_experts_per_tok, -1)
    weights = weights / weights.sum(-1, keepdim=True)
    rows = []
    for t in range(x.shape[0]):
        row = 0
        for w, e in zip(weights[t], chosen[t].tolist(), strict=True):
            gate, up = p["experts.gate_up_proj"][e].chunk(2)
            row = row + w * swiglu(x[t], gate, up, p["experts.down_proj"][e])
        rows.append(row)
    shared = swiglu(x, *(p[f"shared_expert.{name}_proj.weight"] for name in ("gate", "up", "down")))
    return torch.stack(rows) + F.linear(x, p["shared_expert_gate.weight"]).sigmoid() * shared


def below(parameters, prefix):
    return {key.removeprefix(prefix): value for key, value in parameters.items() if key.startswith(prefix)}


def block(x, positions, p, config):
    x = x + attention(rms_norm(x, p["input_layernorm.weight"]), positions, below(p, "self_attn."), config)
    normed, mlp = rms_norm(x, p["post_attention_layernorm.weight"]), below(p, "mlp.")
    if config.num_experts:
        return x + experts(normed, mlp, config)
    return x + swiglu(normed, *(mlp[f"{name}_proj.weight"] for name in ("gate", "up", "down")))


def loss_sum(hidden, embeddings, labels, positions, p, head, config):
    """Sum over depths k of the cross-entropies of one document, divided by the number of depths.

    h_0 = hidden [T, H]; h_k = norm(block(fc [enorm(E(t + k)); hnorm(h_{k-1})])) predicts labels[t + k]. What lies
    beyond the document is zeros, and predicts nothing. p: parameters below "mtp.".
    """
    total, depths = 0, config.mtp_num_hidden_layers
    for k in range(1, depths + 1):
        ahead = F.pad(embeddings[k:], (0, 0, 0, min(k, len(embeddings))))
        at = F.pad(positions[:, k:], (0, min(k, len(embeddings))))
        joined = torch.cat([
            rms_norm(ahead, p["pre_fc_norm_embedding.weight"]), rms_norm(hidden, p["pre_fc_norm_hidden.weight"]),
        ], -1)  # fmt: skip
        layer = below(p, f"layers.{k - 1}.")
        hidden = rms_norm(block(F.linear(joined, p["fc.weight"]), at, layer, config), p["norm.weight"])
        targets = F.pad(labels[k:], (0, min(k, len(labels))), value=-100)
        total = total + F.cross_entropy(F.linear(hidden, head), targets, reduction="sum", ignore_index=-100)
    return total / depths
