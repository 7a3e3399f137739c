"""`patch_transformers`: transformers' Qwen3.5 models on the operators of this package."""

from automodel_c.parallel import ContextParallel

from .report import Report
from .swaps import SWAPS, family_name, left_between_ranks

__all__ = ["Report", "patch_transformers"]


def patch_transformers(model, *, cp=None):
    """Swaps the parts of a transformers Qwen3.5 model that `automodel_c.ops` can run, in place.

    model: a Qwen3_5 or Qwen3_5Moe model of transformers (ForConditionalGeneration, ForCausalLM, a base model, or any
    module that holds one); the tests pass with 5.12, 5.16, 5.20 and 5.24. Only this instance changes: modules get a
    forward of their own, parameters stay where they are, so that FSDP2, checkpointing and state dicts work as before.
    cp: a `parallel.ContextParallel`, whose ranks share every batch; None, or one rank, shares nothing.

    Returns a Report: `swapped`, `left`, and `undo()`. Patching a patched model returns its report again.

    What differs from transformers:
        documents: a row may hold several, told by restarting `position_ids` ([T], [1, T], [3, 1, T], [4, 1, T]), an
            indexed `attention_mask` (1..n, 0 padding) or `cu_seqlens`; nothing crosses their edges, in gated-delta
            layers neither. Masks of more than two axes are ValueError.
        labels: `loss` counts no prediction across a document's edge and is 0 where nothing is labelled; `logits` is
            None then. Without labels logits are made as before. Padding's rows differ, and its labels count nothing.
        cache: none is made in training and for packs; generation fills one here and decodes in transformers' code.
        output_attentions is ValueError.
        over ranks: all pass the same whole batch, every rank embeds it and runs its frames, and the layers see a rank's
            rows alone. `loss` and `aux_loss` are parts that sum over the group to one rank's, gradients likewise: add
            them up, or shard the weights with FSDP2 over the group. Without labels `logits` are the whole batch's on
            every rank (a gradient through them is what all ranks ask together); `router_logits` are a rank's own. There
            is no cache, hence no generation, and output_hidden_states is ValueError. Checkpointing with
            `context_fn=parallel.checkpoint_context_fn` moves no row twice.

    ValueError: nothing here is Qwen3.5, or a part is patched by another call, or with another cp. NotImplementedError:
    under cp, a part that mixes tokens has no operator; the model is left as it was. TypeError: cp is something else.
    """
    if not isinstance(cp, ContextParallel | None):
        raise TypeError(f"patch_transformers: cp must be a ContextParallel or None, not {type(cp).__name__}")
    cp = None if cp is None or cp.group is None else cp
    parts = list(model.named_modules())
    report = vars(model).get("_amcore_report")
    if report is not None and report.root is model:
        if report.cp is not cp:
            raise ValueError(
                f"patch_transformers: the model is patched already, with cp={report.cp}; undo() that first"
            )
        return report
    if not any(family_name(module) in ("TextModel", "VisionModel") for _, module in parts):
        raise ValueError(f"patch_transformers: {type(model).__name__} holds no Qwen3.5 model of transformers")
    for path, module in parts:
        if "_amcore_report" in vars(module):
            raise ValueError(f"patch_transformers: '{path}' is patched already; call undo() on its report first")
    report = Report(model, cp)
    for path, module in parts:
        swap = SWAPS.get(family_name(module))
        if swap is not None:
            swap(report, path, module)
    left = [] if cp is None else left_between_ranks(report)
    if left:
        report.undo()
        path, what, why = left[0]
        raise NotImplementedError(
            f"patch_transformers: over the {cp.ranks} ranks of cp every part that mixes tokens must run on operators;"
            f" '{path}', {what}: {why}"
        )
    return report
