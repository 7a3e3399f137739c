"""Forwards of the text model and its attention; `self` is transformers' module.

Letters: B rows of the batch, L their length, T tokens (B * L, or a rank's shard of them), H hidden size.
"""

import sys

import torch

from automodel_c import ops

from . import gated_delta_net
from .documents import PLAN, TextPlan, find_documents, three_axes
from .request import on_every_rank, shared_by, take_request


@on_every_rank
def text_model(self, *args, input_ids=None, inputs_embeds=None, position_ids=None, attention_mask=None, **kwargs):
    """Hands the layers a TextPlan in place of masks; transformers' own code where a cache already holds tokens. Over
    ranks the layers get this rank's rows [1, T], and what comes back is whole where no loss is made of it."""
    request, kwargs = take_request(kwargs)
    if args:
        input_ids, *args = args
        named = ("attention_mask", "position_ids")
        given = dict(zip(named, args, strict=False))
        attention_mask, position_ids = (
            given.get(n, v) for n, v in zip(named, (attention_mask, position_ids), strict=True)
        )
        if len(args) > len(named):
            raise TypeError("the patched text model takes its arguments after position_ids by name")
    mask = attention_mask if request.attention_mask is None else request.attention_mask
    cache = kwargs.get("cache", kwargs.get("past_key_values"))
    inputs = {"input_ids": input_ids, "inputs_embeds": inputs_embeds}
    if cache is not None and cache.get_seq_length() > 0:
        if request.cu_seqlens is not None:
            raise ValueError("cu_seqlens goes with no cache that holds tokens")
        if shared_by(self) is not None:
            raise ValueError("use_cache: ranks that share a batch have no cache")
        return type(self).forward(self, **inputs, position_ids=position_ids, attention_mask=attention_mask, **kwargs)
    _refuse_outputs(self, kwargs)
    tokens = input_ids if inputs_embeds is None else inputs_embeds
    if tokens is None:
        raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
    router_logits = kwargs.get("output_router_logits", getattr(self.config, "output_router_logits", False))
    plan, positions = _plan(self, tokens, position_ids, mask, request.cu_seqlens, bool(router_logits))
    kwargs = _without_cache(self, kwargs, plan, cache)
    kwargs[PLAN] = plan
    if attends_here(self):
        attention_mask = None
    if plan.cp is not None:
        inputs, positions = _own_rows(plan, inputs)
    outputs = type(self).forward(self, **inputs, position_ids=positions, attention_mask=attention_mask, **kwargs)
    if request.keep is not None:
        request.keep.append((outputs[0], plan))
    return outputs if plan.cp is None or request.makes_loss else _whole(plan, outputs)


def _own_rows(plan, inputs):
    """(input_ids or inputs_embeds of this rank's rows [1, T, ..], positions [3, 1, T])."""
    own = {name: None if x is None else plan.take(x.flatten(0, 1))[None] for name, x in inputs.items()}
    return own, plan.positions[:, None]


def _whole(plan, outputs):
    hidden = plan.whole(outputs[0][0]).unflatten(0, plan.shape)
    if isinstance(outputs, tuple):
        return hidden, *outputs[1:]
    outputs.last_hidden_state = hidden
    return outputs


def attends_here(self):
    """Whether the full attention of every layer is swapped."""
    return all("_amcore_report" in vars(m.self_attn) for m in self.layers if hasattr(m, "self_attn"))


@torch.compiler.disable(recursive=True)  # NumPy on the host
def _plan(self, tokens, position_ids, mask, cu_seqlens, router_logits):
    shape, cp = tuple(tokens.shape[:2]), shared_by(self)
    deciding, positions = three_axes(position_ids, shape, tokens.device)
    pack = find_documents(shape, position_ids=deciding, attention_mask=mask, cu_seqlens=cu_seqlens).to(tokens.device)
    plan = TextPlan(pack, shape, positions.reshape(3, -1), rope_settings(self.config)[0], router_logits, cp)
    if plan.packed:
        _refuse_packs(self)
    return plan, positions


def _refuse_packs(self):
    if not attends_here(self):
        raise NotImplementedError("this model's attention is not swapped (see the report): it takes no packs")
    mixers = [m.linear_attn for m in self.layers if hasattr(m, "linear_attn")]
    if not all("_amcore_report" in vars(m) and gated_delta_net.misfit(m) is None for m in mixers):
        raise NotImplementedError("this model's gated delta nets are not swapped (see the report): it takes no packs")


def _refuse_outputs(self, kwargs):
    def wanted(name):
        asked = kwargs.get(name)
        return getattr(self.config, name, False) if asked is None else asked

    if wanted("output_attentions"):
        raise ValueError("output_attentions: the patched attention makes no weights; call undo() on the report first")
    if wanted("output_hidden_states") and shared_by(self) is not None:
        raise ValueError("output_hidden_states: of ranks that share a batch each has its own rows' alone")


def _without_cache(self, kwargs, plan, cache):
    """kwargs with use_cache off where nobody can use a cache: in training, and for packs."""
    never = plan.packed or plan.cp is not None
    if never and (cache is not None or kwargs.get("use_cache")):
        why = "a row that holds several documents has" if plan.packed else "ranks that share a batch have"
        raise ValueError(f"use_cache: {why} no cache")
    if cache is None and kwargs.get("use_cache") is None and (never or (self.training and torch.is_grad_enabled())):
        kwargs["use_cache"] = False
    return kwargs


def rope_settings(config):
    """(keyword arguments of ops.mrope, None), or (None, why the operator does not fit)."""
    rope = config.rope_parameters
    if rope.get("rope_type", "default") != "default":
        return None, f"rope_type {rope['rope_type']!r}"
    dim = int(config.head_dim * rope.get("partial_rotary_factor", 1.0))
    section = list(rope.get("mrope_section", [11, 11, 10]))
    if dim % 2 or not 2 <= dim <= 512:
        return None, f"rotary dim {dim}"
    return {"rotary_dim": dim, "theta": float(rope["rope_theta"]), "section": section}, None


def attention(self, hidden_states, position_embeddings, attention_mask=None, **kwargs):
    """hidden_states [B, L, H] -> ([B, L, H], None); transformers' own code where no TextPlan comes along."""
    plan = kwargs.pop(PLAN, None)
    if plan is None:
        return type(self).forward(self, hidden_states, position_embeddings, attention_mask, **kwargs)
    tokens = hidden_states.shape[0] * hidden_states.shape[1]
    q, gate = self.q_proj(hidden_states).view(tokens, -1, 2 * self.head_dim).chunk(2, dim=-1)
    q = self.q_norm(q)
    k = self.k_norm(self.k_proj(hidden_states).view(tokens, -1, self.head_dim))
    v = self.v_proj(hidden_states).view(tokens, -1, self.head_dim)
    q, k = _turn(self, q, k, plan, position_embeddings)
    cache = kwargs.get("cache", kwargs.get("past_key_values"))
    if cache is not None:
        cache.update(*(_heads_first(x, hidden_states) for x in (k, v)), self.layer_idx)
    out = plan.attention(q, k, v, self.scaling)
    out = ops.sigmoid_gate(out, gate).view(*hidden_states.shape[:2], -1)
    return self.o_proj(out), None


def _turn(self, q, k, plan, position_embeddings):
    if plan.rope is not None:
        return ops.mrope(q, k, plan.positions, **plan.rope)
    apply = sys.modules[_transformers_class(self).__module__].apply_rotary_pos_emb
    cos, sin = (x.reshape(len(q), -1) for x in position_embeddings)
    return apply(q, k, cos, sin, unsqueeze_dim=1)


def _transformers_class(module):
    """The class before FSDP2 mixed itself in."""
    return next(c for c in type(module).__mro__ if c.__module__.startswith("transformers."))


def _heads_first(x, hidden_states):
    """[T, heads, D] as [B, heads, L, D]."""
    return x.view(*hidden_states.shape[:2], *x.shape[1:]).transpose(1, 2)
