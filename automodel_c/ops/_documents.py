"""The documents of a call: one of pack, cu_seqlens and doc_ids, or none."""

import torch

from automodel_c.partition import Pack, require_pack, to_device


def pack_of(name, argument, tokens, pack, cu_seqlens, doc_ids):
    """The Pack that describes `argument`'s `tokens` rows, None for a single document.

    ValueError for two descriptions, or one of another length; TypeError for a pack that is none.
    """
    if sum(x is not None for x in (pack, cu_seqlens, doc_ids)) > 1:
        raise ValueError(f"{name}: give at most one of pack, cu_seqlens and doc_ids")
    if cu_seqlens is not None or doc_ids is not None:
        pack = Pack(cu_seqlens=cu_seqlens, doc_ids=doc_ids)
    if pack is not None:
        require_pack(name, pack)
        pack.check_tokens(tokens, f"{name}: {argument}")
    return pack


def ends_of(pack, tokens):
    """Starts and ends of the documents as an int64 [2 N] host tensor."""
    return torch.tensor([0, tokens]) if pack is None else torch.from_numpy(pack.docs.flatten())


def plan_beside(x, pack):
    """The documents and the order of work beside `x`, as an int64 [3 N] tensor for CUDA kernels; None on the CPU.

    Without a copy, and so legal under graph capture, for a single document and for a pack made with x's device.
    """
    if not x.is_cuda:
        return None
    if pack is None:
        plan = torch.zeros(3, dtype=torch.int64, device=x.device)
        plan[1].fill_(x.shape[0])
        return plan
    if pack.device_plan is not None and pack.device_plan.device == x.device:
        return pack.device_plan
    return to_device(x.device, pack.docs, pack.order)
