"""One training step of a model on a mesh, in numbers. Letters: H hidden size, E experts, I an expert's inner size."""

import functools
import itertools
import math
from dataclasses import dataclass

import torch

from automodel_c.models.qwen3_5.config import FULL
from automodel_c.parallel import ContextPlan
from automodel_c.parallel.plan import make_pack, measured_prices

HOST = 8  # GPUs of one


@functools.cache
def _attention_plan(lengths, cp, *shape):
    pack, tokens = make_pack([0, *itertools.accumulate(lengths)], None, None)
    plan = ContextPlan(pack, tokens, ranks=cp, prices=measured_prices("h200_nccl"))
    return plan.attention(*shape, torch.bfloat16)


@dataclass(frozen=True)
class Job:
    """text, vision: configurations of the model, vision None where the tower is left out. world ranks are dp x cp, ep
    of them share experts. lengths: documents of one rank group's pack. frames: patches of each frame in it.
    recompute: False, True or "selective". experts_stay: gathered experts are not freed after forward. head: whether
    the loss is cross-entropy over the vocabulary; projected: a random projection of the hidden states, as of the
    slice's benchmark. loss_bytes: what the loss may hold beyond its gradients, None: a fp32 gradient of the head.
    deferred: gradients wait unsharded for the last microbatch. clip: their norm is taken.
    reduce_bytes: of a gradient on the wire. frozen_tower,
    frozen_embeddings: as of freeze_config.
    """

    text: object
    vision: object
    world: int
    cp: int
    ep: int
    lengths: tuple
    frames: tuple = ()
    microbatches: int = 1
    recompute: object = True
    experts_stay: bool = False
    head: bool = True
    projected: bool = False
    loss_bytes: int | None = None
    deferred: bool = False
    clip: bool = True
    reduce_bytes: int = 4
    frozen_tower: bool = False
    frozen_embeddings: bool = False

    @property
    def dp(self):
        return self.world // self.cp

    @property
    def tokens(self):
        """Of a rank, in a microbatch."""
        return -(-sum(self.lengths) // (2 * self.cp)) * 2

    @property
    def step_tokens(self):
        """Of all ranks, in a step."""
        return sum(self.lengths) * self.dp * self.microbatches

    @property
    def layers(self):
        """The kinds of the decoder's layers, and those of multi-token prediction after them."""
        return (*self.text.layer_types, *(FULL,) * (self.text.mtp_num_hidden_layers or 0))

    def numbers(self, kind):
        """{part: weights} of a decoder layer: products of matrices, what no product uses, and all its experts."""
        t = self.text
        h = t.hidden_size
        if kind == FULL:
            q, k = t.num_attention_heads * t.head_dim, t.num_key_value_heads * t.head_dim
            products, rest = h * (3 * q + 2 * k), 2 * t.head_dim
        else:
            keys, values = t.linear_num_key_heads * t.linear_key_head_dim, self.values
            heads = t.linear_num_value_heads
            products = h * (2 * keys + 3 * values + 2 * heads)
            rest = (2 * keys + values) * t.linear_conv_kernel_dim + 2 * heads + t.linear_value_head_dim
        rest += 2 * h
        if not t.num_experts:
            return {"products": products + 3 * h * t.intermediate_size, "rest": rest, "experts": 0}
        products += 3 * h * t.shared_expert_intermediate_size + h
        return {"products": products, "rest": rest + h * t.num_experts, "experts": self.expert * t.num_experts}

    @property
    def values(self):
        return self.text.linear_num_value_heads * self.text.linear_value_head_dim

    @property
    def expert(self):
        return 3 * self.text.hidden_size * self.text.moe_intermediate_size if self.text.num_experts else 0

    def unit(self, kind):
        """(weights of a layer beside its experts, weights of its experts that a rank holds when gathered)."""
        found = self.numbers(kind)
        return found["products"] + found["rest"], found["experts"] // self.ep

    @property
    def mtp(self):
        """Weights of multi-token prediction beside its layer: the join of hidden states and embeddings, norms."""
        h = self.text.hidden_size
        return (2 * h * h + 3 * h) * (self.text.mtp_num_hidden_layers or 0)

    @property
    def root(self):
        """(embeddings and final norm, head)."""
        t = self.text
        return t.vocab_size * t.hidden_size + t.hidden_size, t.vocab_size * t.hidden_size

    @property
    def tower(self):
        """(weights of a block, of the rest)."""
        v = self.vision
        if v is None:
            return 0, 0
        h, joined = v.hidden_size, v.hidden_size * v.spatial_merge_size**2
        block = 4 * h * h + 4 * h + 2 * h * v.intermediate_size + v.intermediate_size + h + 4 * h
        out = v.out_hidden_size or self.text.hidden_size
        rest = (
            v.patch_width * h + h + v.num_position_embeddings * h + 2 * h + joined * (joined + 1) + (joined + 1) * out
        )
        return block, rest

    @functools.cached_property
    def weights(self):
        """{part: weights of the whole model}, by the parts of a dry run."""
        block, rest = self.tower
        text = [self.numbers(kind) for kind in self.text.layer_types]
        mtp = [self.numbers(kind) for kind in self.layers[len(self.text.layer_types) :]]
        found = {
            "vision tower": block * (self.vision.depth if self.vision else 0) + rest,
            "decoder": sum(n["products"] + n["rest"] for n in text) + self.text.hidden_size,
            "experts": sum(n["experts"] for n in text),
            "embedding, head": self.root[0] + self.root[1] - self.text.hidden_size,
            "MTP head": sum(sum(n.values()) for n in mtp) + self.mtp,
        }
        return {part: n for part, n in found.items() if n}

    def trained(self, part):
        """Of `weights`, those that get gradients."""
        if part == "vision tower" and self.frozen_tower:
            return 0
        if part == "embedding, head" and self.frozen_embeddings:
            return self.root[1]
        return self.weights[part]

    # what travels

    @functools.cached_property
    def arriving(self):
        """Rows that a rank gets from all of `ep`, itself included, for each token of its own, when experts are chosen
        evenly: of k of E experts a token misses all E / ep of a rank with probability C(E - E / ep, k) / C(E, k)."""
        experts, k = self.text.num_experts or 0, self.text.num_experts_per_tok or 0
        if self.ep == 1:
            return 1.0
        return self.ep * (1 - math.comb(experts - experts // self.ep, k) / math.comb(experts, k))

    @property
    def attention(self):
        """The AttentionPlan of the pack over cp, None on one rank."""
        t = self.text
        shape = t.num_attention_heads, t.num_key_value_heads, t.head_dim
        return None if self.cp == 1 else _attention_plan(self.lengths, self.cp, *shape)

    @functools.cached_property
    def straddling(self):
        """The most documents that cross one edge of a rank: 1 or 0."""
        edges = {r * self.tokens for r in range(1, self.cp)}
        starts = {0, *itertools.accumulate(self.lengths)}
        return int(bool(edges - starts))

    @functools.cached_property
    def most_ranks(self):
        """Ranks that the longest document lies on."""
        ends = list(itertools.accumulate(self.lengths))
        return max(
            (end - 1) // self.tokens - (end - n) // self.tokens + 1 for end, n in zip(ends, self.lengths, strict=True)
        )

    @property
    def scores(self):
        """Of one head, of the rank that computes most."""
        whole = sum(n * (n + 1) / 2 for n in self.lengths)
        return whole if self.attention is None else float(self.attention.costs.max())
