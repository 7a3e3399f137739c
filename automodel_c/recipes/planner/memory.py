"""Bytes that a rank holds when it holds most.

A step has a few moments at which most is there: the loss, backward through the experts of each layer, the reduction of
what a layer or the root has gathered, the optimizer. Each is added up from what lives then; `memory` takes the largest.
bf16 in compute, fp32 masters, moments and reductions. Per token figures follow what the operators keep and ask for as
workspace (`ops.moe`'s, csrc/cuda/moe/moe_job.cu).
"""

from dataclasses import dataclass

from automodel_c.models.qwen3_5.config import FULL

GIB = 2**30


@dataclass
class Memory:
    """parts: {what: bytes} at the fullest moment, `moment`; masters, moments, gradients: of the whole run, by part of
    the model, as of a dry run."""

    parts: dict
    moment: str
    masters: dict
    moments: dict
    gradients: dict
    moments_of_step: dict

    @property
    def allocated(self):
        """What torch's allocator has given out."""
        return sum(self.parts.values())

    def reserved(self, machine):
        """With what it holds beside that, and what others hold."""
        return self.allocated * (1 + machine.slack) + machine.context


def memory(job):
    """The Memory of a Job."""
    masters = {part: 4 * n / job.world for part, n in job.weights.items()}
    gradients = {part: 4 * job.trained(part) / job.world for part in job.weights}
    moments = {part: 2 * n for part, n in gradients.items()}
    always = {"parameters (fp32 masters)": sum(masters.values()), "moments": sum(moments.values())}
    found = {}
    for name, parts in _moments(job, sum(gradients.values())):
        parts = always | {"gradients": 0.0} | parts
        if name not in found or sum(parts.values()) > sum(found[name].values()):
            found[name] = parts
    sizes = {name: sum(parts.values()) for name, parts in found.items()}
    moment = max(sizes, key=sizes.get)
    parts = {name: n for name, n in found[moment].items() if n}
    return Memory(parts, moment, masters, moments, gradients, sizes)


def _moments(job, all_gradients):
    """(moment, {part: bytes}) of every moment that may be the fullest."""
    layers, h = job.layers, job.text.hidden_size
    rows = job.tokens * 2 * h
    shards = [4 * sum(job.numbers(kind).values()) / job.world for kind in layers]
    embedding, head = job.root
    root, waits = 2 * (embedding + head), job.deferred and job.microbatches > 1
    units = [job.unit(kind) for kind in layers]
    # what stays gathered: experts where they are told to, everything while gradients wait
    stays = [(dense if waits else 0, experts if waits or job.experts_stay else 0) for dense, experts in units]
    staying = sum(2 * sum(of) for of in stays)
    kept = [_kept(job, kind) for kind in layers]
    saved = [0 if job.recompute else sum(layer_bytes(job, kind)[:2]) for kind in layers]
    inputs = job.tokens * (24 + 8 + 8) + (job.tokens * 4 * h if job.projected else 0)
    head_gradient = 2 * head if job.head else 0
    before = all_gradients if job.microbatches > 1 else 0.0  # what earlier microbatches left
    waiting = sum(4 * sum(of) for of in units) if waits else 0
    if job.head:
        yield "the loss", {
            "gradients": before, "gathered weights": root + staying, "inputs": inputs,
            "kept for backward": sum(kept) + sum(saved) + 2 * rows, "loss": loss_bytes(job) + rows,
            "gradients on their way": head_gradient + waiting,
        }  # fmt: skip
    for i, kind in reversed(list(enumerate(layers))):
        dense, experts = units[i]
        passing = sum(2 * (sum(units[j]) - sum(stays[j])) for j in (i - 1, i) if j >= 0)  # one is gathered ahead
        after = units[i + 1] if i + 1 < len(layers) else (0, 0)
        reducing = 4 * (after[0] + (after[1] if job.ep == 1 else 0))
        mixer, mlp, workspace = layer_bytes(job, kind)
        common = {
            "gradients": max(before, sum(shards[i + 1 :])),
            "gathered weights": root + passing + staying,
            "kept for backward": sum(kept[: i + 1]) + sum(saved[:i]), "inputs": inputs,
        }  # fmt: skip
        yield "backward of a layer's experts" if job.text.num_experts else "backward of a layer's MLP", {
            **common, "a layer's activations": mixer + mlp, "workspace": workspace,
            "gradients on their way": head_gradient + reducing + 2 * experts + waiting,
        }  # fmt: skip
        if job.ep > 1:
            yield "reduction of a layer's experts", {
                **common, "a layer's activations": mixer + 2 * rows,
                "gradients on their way": head_gradient + (2 + 4) * experts + waiting,
            }  # fmt: skip
        reduced = dense + (experts if job.ep == 1 else 0)
        yield "reduction of a layer", {
            **common, "gradients on their way": head_gradient + (2 + 4) * reduced + waiting,
        }  # fmt: skip
    trained = job.trained("embedding, head")
    if not job.head:
        trained = min(trained, embedding)
    if trained:
        shard = 4 * trained / job.world
        yield "reduction of the root", {
            "gradients": all_gradients - (0 if before else shard), "inputs": inputs,
            "gradients on their way": 4 * trained + max(2 * trained, shard),
        }  # fmt: skip
    yield "the optimizer", {"gradients": all_gradients, "inputs": inputs}


def loss_bytes(job):
    """What the loss holds beyond its gradients: as many logits as it may keep."""
    t = job.text
    extra = 4 * t.vocab_size * t.hidden_size if job.loss_bytes is None else job.loss_bytes
    return min(extra, 2 * job.tokens * t.vocab_size) + 8 * job.tokens


def _kept(job, kind):
    """Of one layer, from its forward to its backward: its input, and rows that came from other ranks."""
    t, h = job.text, job.text.hidden_size
    kept = job.tokens * 2 * h
    if job.ep > 1:  # rows that arrived, their choice and weights; the choice, the logits; sums that came back
        kept += job.tokens * (
            job.arriving * (2 * h + 8 * t.num_experts_per_tok) + 8 * t.num_experts_per_tok + 2 * t.num_experts
        )
        kept += job.tokens * 2 * h
    if job.cp > 1:
        kept += _kept_over_cp(job, kind)
    if job.recompute == "selective":
        kept += job.tokens * _selective(job, kind)
    return kept


def _kept_over_cp(job, kind):
    t = job.text
    if kind == FULL:
        plan, width = job.attention, t.num_attention_heads * t.head_dim
        arriving = float(plan.traffic()["received"].max())
        key_rows = job.tokens * 4 * t.num_key_value_heads * t.head_dim
        computed = job.tokens * width * 2 * float(plan.costs.max() / plan.costs.mean())
        return arriving + key_rows + computed + 4 * job.tokens * t.num_attention_heads
    state = 4 * t.linear_num_value_heads * t.linear_key_head_dim * t.linear_value_head_dim
    return job.straddling * 2 * state * (job.most_ranks - 1)


def _selective(job, kind):
    """Bytes a token: outputs of attention or the gated delta rule, and of every second product."""
    t = job.text
    if kind == FULL:
        width = t.num_attention_heads * t.head_dim
        return 2 * width + 4 * t.num_attention_heads + (4 * width + 2 * t.num_key_value_heads * t.head_dim)
    keys = t.linear_num_key_heads * t.linear_key_head_dim
    return 2 * job.values + (2 * keys + job.values) * 2 + job.values


def layer_bytes(job, kind):
    """(mixer, MLP or experts, workspace) of one layer in backward, when the MLP's own is about to run."""
    t, h, n = job.text, job.text.hidden_size, job.tokens
    if kind == FULL:
        q, k = t.num_attention_heads * t.head_dim, t.num_key_value_heads * t.head_dim
        mixer = (
            4 * q + 4 * k + 2 * q + 2 * k + 2 * q + 4 * t.num_attention_heads + 2 * q
        )  # q and gate, q k v, out, gated
    else:
        keys, heads = t.linear_num_key_heads * t.linear_key_head_dim, t.linear_num_value_heads
        channels, values = 2 * keys + job.values, job.values
        states = 4 * values * t.linear_key_head_dim / 1024
        mixer = (
            2 * 2 * channels + 3 * 2 * values + 10 * heads + states
        )  # before and after the convolution; o, z, normed
    mixer += 3 * 2 * h  # normed, the stream after the mixer, normed again
    if not t.num_experts:
        return n * mixer, n * 3 * 2 * t.intermediate_size, n * (3 * 2 * t.intermediate_size + 2 * 2 * h)
    k, inner, rows = t.num_experts_per_tok, t.moe_intermediate_size, job.arriving
    products = rows * k * 4 * inner + 2 * t.num_experts + 8 * k
    workspace = rows * k * (2 * 2 * h + 2 * inner + 4 * inner + 12)  # x, gradients of sums, activations, products
    beside = 2 * h * (4 if job.ep == 1 else 1 + 3 * rows)  # gradients: of the layer, of its input twice; a clean copy
    return n * mixer, n * products, n * (workspace + beside)
