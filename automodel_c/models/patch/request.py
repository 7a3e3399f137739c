"""What a call of the whole model asks of its text model, carried through transformers' code as one keyword."""

import functools

from automodel_c.parallel import alarms

REQUEST = "amcore_request"
_FLASH = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


class Request:
    """Attributes: cu_seqlens; attention_mask, as the caller gave it; keep, a list that takes (hidden states of this
    rank's rows, plan); makes_loss, whether nobody else reads them."""

    def __init__(self):
        self.cu_seqlens = self.attention_mask = self.keep = None
        self.makes_loss = False


def shared_by(module):
    """The ContextParallel whose ranks share a patched module's batches, or None."""
    return vars(module)["_amcore_report"].cp


def on_every_rank(function):
    """A forward that, where ranks share the batch and one of them raises, makes all of them raise."""

    @functools.wraps(function)
    def call(self, *args, **kwargs):
        cp = shared_by(self)
        if cp is None:
            return function(self, *args, **kwargs)
        with alarms.everywhere(cp.group):
            return function(self, *args, **kwargs)

    return call


def take_request(kwargs):
    """(Request, the other kwargs) from a call's keywords: the outermost patched module makes the request.

    cu_seqlens may also be called cu_seq_lens_q, as for transformers' flash attention; the keywords that go with that
    are dropped, since they say the same again. ValueError where keys and queries differ.
    """
    kwargs = dict(kwargs)
    request = kwargs.pop(REQUEST, None) or Request()
    flash = {name: kwargs.pop(name) for name in _FLASH if name in kwargs}
    offsets = kwargs.pop("cu_seqlens", None)
    queries, keys = flash.get("cu_seq_lens_q"), flash.get("cu_seq_lens_k")
    if queries is not None and keys is not None and queries.tolist() != keys.tolist():
        raise ValueError("cu_seq_lens_q and cu_seq_lens_k differ: a patched model attends within one sequence")
    if offsets is not None and queries is not None:
        raise ValueError("cu_seqlens and cu_seq_lens_q both describe the documents")
    given = offsets if offsets is not None else queries
    if given is not None:
        request.cu_seqlens = given
    return request, kwargs


def keep_mask(request, attention_mask):
    """The mask for transformers' code: 0/1, since its auxiliary loss weighs tokens by it. The request keeps the
    indexed one."""
    if attention_mask is None or attention_mask.ndim != 2 or attention_mask.dtype.is_floating_point:
        return attention_mask
    if attention_mask.is_meta or not bool((attention_mask > 1).any()):
        return attention_mask
    if request.attention_mask is None:
        request.attention_mask = attention_mask
    return (attention_mask != 0).to(attention_mask.dtype)
