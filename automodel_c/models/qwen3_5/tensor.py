"""Which weights the ranks of tensor parallelism split, and how.

The plan maps patterns of modules to styles, by the names that transformers gives both: "colwise" splits a weight's rows
(what it makes), "rowwise" its columns (what it takes); the head's rows are words, whose loss the ranks make together.
All other styles leave a weight whole on every rank, which sees
its own rows or heads and so makes a part of the gradient: norms of queries and keys
("replicated_with_grad_allreduce"), gated delta nets ("colwise_gather_output", since their heads share a convolution),
embeddings, a head that is the embedding, router, experts. Parts are summed where FSDP2 reduces.
"""

import re

from torch import nn
from torch.distributed.tensor import DTensor, Shard

from automodel_c.keys import check_known

DIMS = {"colwise": 0, "rowwise": 1}
WHOLE = ("replicated", "replicated_with_grad_allreduce", "colwise_gather_output", "sequence_parallel")
_SPLIT = {  # what is split together, or not at all
    "self_attn": {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise"},
    "mlp": {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"},
}
_GATHERED = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")


def plan_of(text, given=None, head="replicated"):
    """{pattern: style} of a TextConfig. given: None, or a mapping whose styles take the place of the plan's. head: the
    plan's style of a head that may be split, None where it is the embedding.

    ValueError names a style that is not known, a pattern that is not the model's, a weight that this definition splits
    in one way alone, or never, and one that is split without those that it is used with.
    """
    plan = _plan(text) | {"lm_head": "replicated"}  # split where it is asked for
    for pattern, style in (given or {}).items():
        key = pattern.removeprefix("model.").removeprefix("language_model.")
        check_known(key, plan, "tp_plan.")
        if style not in (*DIMS, *WHOLE):
            raise ValueError(
                f"tp_plan: unknown parallel style {style!r} of {pattern}; one of {', '.join((*DIMS, *WHOLE))} is needed"
            )
        *path, name = key.split(".")
        possible = _SPLIT[path[-1]].get(name) if path and path[-1] in _parts(text) else None
        possible = "colwise" if key == "lm_head" and head else possible
        if style in DIMS and style != possible:
            how = f"{possible!r}, or whole" if possible else "whole"
            raise ValueError(f"tp_plan: {pattern} is {style!r}; it may be {how}")
        plan[key] = style
    for part in _parts(text):
        styles = {name: plan[f"layers.*.{part}.{name}"] for name in _SPLIT[part]}
        if any(style in DIMS for style in styles.values()) and styles != _SPLIT[part]:
            raise ValueError(f"tp_plan: weights of {part} are split together or not at all, found {styles}")
    return plan


def _parts(text):
    return ("self_attn",) if text.num_experts else ("self_attn", "mlp")


def _plan(text):
    plan = {f"layers.*.{part}.{name}": style for part in _parts(text) for name, style in _SPLIT[part].items()}
    plan |= {f"layers.*.self_attn.{name}": "replicated_with_grad_allreduce" for name in ("q_norm", "k_norm")}
    plan |= {f"layers.*.linear_attn.{name}": "colwise_gather_output" for name in _GATHERED}
    return plan | {"embed_tokens": "replicated"}


def splits(plan, part):
    """Whether a plan splits the weights of "self_attn" or "mlp"."""
    return any(style in DIMS for key, style in plan.items() if re.search(rf"\.{part}\.\w+$", key))


def check_sizes(text, plan, tp):
    """ValueError for heads or a width that the ranks of a TensorParallel do not divide."""
    sizes = []
    if splits(plan, "self_attn"):
        sizes += [("num_attention_heads", text.num_attention_heads), ("num_key_value_heads", text.num_key_value_heads)]
    if splits(plan, "mlp"):
        sizes.append(("intermediate_size", text.intermediate_size))
    if plan["lm_head"] in DIMS:
        sizes.append(("vocab_size", text.vocab_size))
    for name, size in sizes:
        if size % tp.ranks:
            raise ValueError(f"load: {name} is {size}, no multiple of the {tp.ranks} ranks of tp")


def cut(module, part, tp):
    """Keeps this rank's part of the weights of a module of attention or an MLP, which become DTensors over tp."""
    for name, style in _SPLIT[part].items():
        linear = getattr(module, name)
        linear.weight = split(linear.weight, DIMS[style], tp)
    module.is_cut = True


def split(weight, dim, tp):
    """This rank's part of a whole weight, a parameter that is a DTensor over tp."""
    local = weight.detach().chunk(tp.ranks, dim)[tp.rank].clone()
    spread = DTensor.from_local(local, tp.mesh, [Shard(dim)], run_check=False)
    return nn.Parameter(spread, requires_grad=weight.requires_grad)


def head_style(tied, vocab, tp):
    """The plan's style of the head: split where the ranks divide the words, None where it is the embedding."""
    if tied:
        return None
    return "replicated" if vocab % tp.ranks else "colwise"


def is_split(module):
    """Whether `cut` was here."""
    return getattr(module, "is_cut", False)
