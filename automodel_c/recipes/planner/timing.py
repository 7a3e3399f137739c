"""Seconds of a step on the rank that computes most, part by part.

Device time of every operator of a layer (forward, recomputation, backward) from a machine's constants; then wires:
gathers and reductions of weights pass beside a neighbouring layer's work and show where they take longer, rows of
experts and of shared packs are waited for, as this package does not overlap them.
"""

from dataclasses import dataclass

import numpy as np

from automodel_c.models.qwen3_5.config import FULL

from .job import HOST


@dataclass
class Timing:
    """parts: {what: seconds of a step}; hidden: {wire: seconds that pass beside work}."""

    parts: dict
    hidden: dict

    @property
    def step(self):
        return sum(self.parts.values())

    def rate(self, job):
        """Tokens a second and GPU."""
        return job.step_tokens / job.world / self.step


class _Tally(dict):
    def add(self, part, seconds):
        self[part] = self.get(part, 0.0) + seconds

    def all(self):
        return sum(self.values())


def timing(job, machine):
    """The Timing of a Job on a Machine."""
    layers = [_Layer(job, machine, kind) for kind in job.layers]
    total, hidden = _Tally(), _Tally()
    for layer in layers:
        for passed in (layer.forward, layer.again, layer.backward, layer.waits):
            for part, seconds in passed.items():
                total.add(part, seconds)
    _shards(job, machine, layers, total, hidden)
    _ends(job, machine, total)
    for part in list(total):
        total[part] *= job.microbatches
    for part in list(hidden):
        hidden[part] *= job.microbatches
    trained = sum(job.trained(part) for part in job.weights) / job.world
    total.add("optimizer and clipping", trained * (machine.adam + machine.clip * job.clip))
    return Timing(
        {part: seconds for part, seconds in sorted(total.items(), key=lambda of: -of[1]) if seconds}, dict(hidden)
    )


class _Layer:
    """forward, again (recomputation), backward: {part: seconds} on the device; waits: of wires and host."""

    def __init__(self, job, machine, kind):
        self.job, self.machine, self.kind = job, machine, kind
        self.forward, self.again, self.backward, self.waits = _Tally(), _Tally(), _Tally(), _Tally()
        self.memory_fwd = lambda name, nbytes: nbytes * job.tokens / (getattr(machine, f"{name}_fwd") * machine.copy)
        self.memory_bwd = lambda name, nbytes: nbytes * job.tokens / (getattr(machine, f"{name}_bwd") * machine.copy)
        self._products()
        (self._attention if kind == FULL else self._delta_rule)()
        self._stream()
        if job.text.num_experts:
            self._experts()
        else:
            self._both(
                "norms, gates, rotary", "swiglu", 6 * job.text.intermediate_size, 10 * job.text.intermediate_size
            )
        if not job.recompute:
            self.again.clear()

    def _passes(self, part, forward, backward, again=None):
        self.forward.add(part, forward)
        self.again.add(part, forward if again is None else again)
        self.backward.add(part, backward)

    def _both(self, part, name, forward, backward):
        """Of an operator bound by memory, from the bytes a token that it moves."""
        self._passes(part, self.memory_fwd(name, forward), self.memory_bwd(name, backward))

    def _moved(self, part, forward, backward):
        """As `_both`, of torch's own sums and copies, at a copy's rate."""
        rate = self.job.tokens / self.machine.copy
        self._passes(part, forward * rate, backward * rate)

    def _products(self):
        flops = 2 * self.job.numbers(self.kind)["products"] * self.job.tokens / self.machine.products
        self._passes("products", flops, 2 * flops, flops / 2 if self.job.recompute == "selective" else flops)

    def _attention(self):
        job, t, m = self.job, self.job.text, self.machine
        width, q, k = (
            t.num_attention_heads * t.head_dim,
            t.num_attention_heads * t.head_dim,
            t.num_key_value_heads * t.head_dim,
        )
        seconds = {
            which: width
            * (
                job.scores * getattr(m, f"attention_{which}_score")
                + job.tokens * getattr(m, f"attention_{which}_token")
            )
            for which in ("fwd", "bwd")
        }
        kept = job.cp > 1 or job.recompute == "selective"
        self._passes("attention", seconds["fwd"], seconds["bwd"], 0.0 if kept else None)
        self._both("norms, gates, rotary", "q_norm", 4 * q, 6 * q)
        self._both("norms, gates, rotary", "k_norm", 4 * k, 6 * k)
        self._both("norms, gates, rotary", "mrope", 4 * (q + k), 4 * (q + k))
        self._both("norms, gates, rotary", "sigmoid_gate", 6 * q, 10 * q)
        self._moved("sums and copies", 0, 8 * q + 2 * 6 * t.hidden_size)
        if job.cp > 1:
            seconds = _attention_wire(job, m)
            self.waits.add("CP wire", 2 * seconds)

    def _delta_rule(self):
        job, t, m = self.job, self.job.text, self.machine
        heads, keys = t.linear_num_value_heads, t.linear_num_key_heads * t.linear_key_head_dim
        channels = 2 * keys + job.values
        passes = (
            3 if job.cp > 1 and job.most_ranks > 2 else 1
        )  # a rank that a document goes through: state, transition, rows
        fwd, bwd = (passes * job.tokens * heads * getattr(m, f"gdn_{which}") for which in ("fwd", "bwd"))
        self._passes("gated delta rule", fwd, bwd, 0.0 if job.recompute == "selective" else None)
        self._both("convolution", "conv", 4 * channels, 6 * channels)
        self._both("norms, gates, rotary", "gdn_gate", 10 * heads, 14 * heads)
        self._both("norms, gates, rotary", "gated_rms_norm", 6 * job.values, 10 * job.values)
        self._moved("sums and copies", 0, 4 * channels + 3 * 6 * t.hidden_size)
        if job.cp > 1 and job.straddling:
            state = 4 * heads * t.linear_key_head_dim * t.linear_value_head_dim
            sent = state * (1 if job.most_ranks <= 2 else 2 * (job.most_ranks - 1))
            self.waits.add("CP wire", 2 * (m.message + sent / m.link(job.cp > HOST)))
        if job.cp > 1:
            self.waits.add("CP wire", 2 * m.message)  # the convolution's rows

    def _stream(self):
        h = self.job.text.hidden_size
        self._both("norms, gates, rotary", "rms_norm", 4 * h, 6 * h)
        self._both("norms, gates, rotary", "rms_norm_residual", 8 * h, 8 * h)
        self._moved("sums and copies", 6 * h, 6 * h)

    def _experts(self):
        job, t, m = self.job, self.job.text, self.machine
        h, inner, k = t.hidden_size, t.moe_intermediate_size, t.num_experts_per_tok
        pairs = job.tokens * k
        gate_up, down = 4 * pairs * h * inner, 2 * pairs * h * inner
        rows = 2 * job.tokens * (k + job.arriving) * h / m.copy
        permute, unpermute = rows / m.experts_permute, rows / m.experts_unpermute
        forward = permute + gate_up / m.experts_gate_up
        whole = forward + down / m.experts_down + unpermute
        backward = 2 * permute + unpermute + gate_up * (1 / m.experts_dx + 1 / m.experts_dgate_up)
        backward += down * (1 / m.experts_dact + 1 / m.experts_ddown) + pairs * inner * m.experts_swiglu_grad
        self._passes("experts", whole, backward, forward if job.ep == 1 else whole)
        router = max(job.tokens * t.num_experts * m.router, 2 * job.tokens * h / m.copy)
        self._passes("experts", router, 3 * router, 0.0 if job.ep > 1 else None)
        shared = t.shared_expert_intermediate_size
        self._both("norms, gates, rotary", "swiglu", 6 * shared, 10 * shared)
        self._moved("sums and copies", 6 * h, 6 * h + 3 * 6 * h)
        if job.ep > 1:
            self._rows_of_experts()

    def _rows_of_experts(self):
        job, t, m = self.job, self.job.text, self.machine
        own = job.tokens * job.arriving / job.ep
        sent = job.tokens * job.arriving - own
        hosts = max(0.0, 1 - HOST / job.ep)  # of the rows, those that leave the host
        byte = (1 - hosts) / m.link(False) + hosts / m.link(True)
        for nbytes, times in (
            (2 * t.hidden_size, 4),
            (8 * t.num_experts_per_tok, 2),
        ):  # rows, sums, back; choice, weights
            copies = (4 * sent + 2 * own) * nbytes / m.copy
            self.waits.add("EP wire", times * (m.message + sent * nbytes * byte + copies))
        self.waits.add("EP wire", m.message)  # counts
        self.waits.add("host, rows of experts", job.tokens * job.arriving * m.rows_idle)


def _attention_wire(job, machine):
    """Seconds of the rows of one attention layer in one pass, on the rank that they take longest."""
    plan = job.attention
    heads, kv_heads, *_ = plan.shape
    seconds = np.zeros(job.cp)
    for moves, head_bytes, back in (
        (plan.key_moves, plan.key_bytes // kv_heads, False),
        (plan.query_moves, plan.query_bytes // heads, False),
        (plan.query_moves, plan.query_bytes // heads, True),
    ):
        moves = moves[moves[:, 0] != moves[:, 1]]
        if not len(moves):
            continue
        src, dst = moves[:, [1, 0] if back else [0, 1]].T
        nbytes = (moves[:, 4] * moves[:, 6] * head_bytes).astype(np.float64)
        crosses = src // HOST != dst // HOST
        each = nbytes * np.where(crosses, 1 / machine.link(True), 1 / machine.link(False)) + 4 * nbytes / machine.copy
        both = [np.bincount(end, each, minlength=job.cp) for end in (src, dst)]
        seconds += np.maximum(*both) + machine.message
    return float(seconds.max())


def _shards(job, machine, layers, total, hidden):
    """Gathers and reductions of weights, and the copies that they take on the device."""
    sides = []
    for layer in layers:
        dense, experts = job.unit(layer.kind)
        if job.ep == 1:
            dense, experts = dense + experts, 0
        sides.append([(dense, job.world, False), (experts, job.world // job.ep, job.ep > 1)])
    part, ends = "FSDP gather and scatter", []
    for layer, units in zip(layers, sides, strict=True):
        gather = again = reduce = copies = 0.0
        for n, ranks, apart in units:
            stays, share = apart and job.experts_stay, (ranks - 1) / ranks
            gathers, reductions = machine.shards(ranks, _in_host(job, apart))
            copies += (2 - stays) * _gather_copies(n, ranks, apart, machine) + _reduce_copies(n, ranks, apart, machine)
            gather += 2 * n * share / gathers
            again += 0.0 if stays else 2 * n * share / gathers
            reduce += job.reduce_bytes * n * share / reductions / (job.microbatches if job.deferred else 1)
        total.add("FSDP copies", copies)
        _beside(part, gather, layer.forward.all(), machine, total, hidden)
        _beside(part, again + reduce, layer.again.all() + layer.backward.all(), machine, total, hidden)
        ends.append((gather, again, reduce))
    total.add(part, ends[0][0] + ends[-1][1] + ends[0][2])  # the first gathers of both passes, the last reduction
    root, share = sum(job.root) + job.mtp, (job.world - 1) / job.world
    gathers, reductions = machine.shards(job.world, _in_host(job, False))
    trained = job.trained("embedding, head") if job.head else job.root[0]
    total.add("FSDP copies", _gather_copies(root, job.world, False, machine))
    total.add("FSDP copies", _reduce_copies(trained, job.world, False, machine))
    total.add(part, (2 * root / gathers + job.reduce_bytes * trained / reductions) * share)  # nothing runs beside it


def _in_host(job, apart):
    """How many ranks of the group that shares a weight are on one host; experts' are `ep` ranks apart."""
    return max(1, HOST // job.ep) if apart else min(HOST, job.world)


def _gather_copies(n, ranks, apart, machine):
    """The cast of the shards to bf16, and what puts gathered weights in place, once more where dim 1 is sharded."""
    return (6 * n / ranks + 4 * n * (2 if apart and ranks > 1 else 1)) / machine.copy


def _reduce_copies(n, ranks, apart, machine):
    alone = 8 * n if ranks == 1 else 0  # NCCL copies
    return (6 * n / machine.fsdp_chunk_cat + alone + (4 * n if apart and ranks > 1 else 0)) / machine.copy


def _beside(part, wire, work, machine, total, hidden):
    """What of a wire's time shows; beside it, kernels that share the multiprocessors take longer."""
    shown = max(0.0, wire - work)
    total.add(part, shown + machine.crowded * (wire - shown))
    hidden[part] = hidden.get(part, 0.0) + wire - shown


def _ends(job, machine, total):
    """Embedding, loss, the tower, and documents that ranks run one after another."""
    t, h = job.text, job.text.hidden_size
    rate = job.tokens / machine.copy
    total.add("sums and copies", (8 * h + 6 * h) * rate)
    total.add("norms, gates, rotary", 4 * h * rate / machine.rms_norm_fwd + 6 * h * rate / machine.rms_norm_bwd)
    if job.projected:  # cast, product, float, mean; the same back
        total.add("loss", (6 + 6 + 6 + 4 + 4 + 6 + 6) * h * rate)
    if job.head:
        extra = 4 * t.vocab_size * h if job.loss_bytes is None else job.loss_bytes
        again = max(0.0, 1 - extra / (2 * job.tokens * t.vocab_size))
        heads = 1 + (t.mtp_num_hidden_layers or 0)
        total.add("loss", heads * (6 + 2 * again) * job.tokens * h * t.vocab_size / machine.loss)
    if job.mtp:
        total.add("products", 4 * 4 * h * h * job.tokens / machine.products)
    if job.cp > 1 and job.straddling and job.most_ranks == 2:
        _lag(job, machine, total)
    _tower(job, machine, total)


def _lag(job, machine, total):
    """Two ranks run the two parts of a document one after the other: a rank stays behind by one part, once a pass."""
    starts = np.concatenate([[0], np.cumsum(job.lengths)])
    edges = np.arange(1, job.cp) * job.tokens
    rows = (edges - starts[np.searchsorted(starts, edges, side="right") - 1]).max()
    seconds = machine.gdn_fwd + machine.gdn_bwd
    total.add("CP wait for states", float(rows) * job.text.linear_num_value_heads * seconds)


def _tower(job, machine, total):
    v = job.vision
    if v is None or not job.frames:
        return
    block, rest = job.tower
    patches = sum(job.frames) / job.cp  # frame sharding evens them out
    passes = (2 if job.frozen_tower else 6) + (2 if job.recompute and not job.frozen_tower else 0)
    flops = passes * patches * (v.depth * block + rest)
    scores = sum(n * n for n in job.frames) / job.cp * v.hidden_size * v.depth
    seconds = flops / machine.products
    again = 1 if job.frozen_tower else 2
    seconds += scores * (again * machine.frames_fwd_score + (not job.frozen_tower) * machine.frames_bwd_score)
    moved = (
        patches
        * v.depth
        * (2 * 4 * v.hidden_size / machine.layer_norm_fwd + 4 * v.intermediate_size / machine.gelu_tanh_fwd)
    )
    total.add("vision tower", seconds + again * moved / machine.copy * (1 if job.frozen_tower else 2))
