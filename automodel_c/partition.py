"""Packs, documents and frames: host planning that needs NumPy alone."""

import copy
import warnings

import numpy as np

from automodel_c import _amcore

_METHODS = ("minimax", "bisect")


def frame_partition(patches, world, *, alpha=0, method="minimax"):
    """Cut ordered video frames into contiguous parts of near-equal attention cost, one per rank.

    A frame of `p` patches costs `p * (p + alpha)`: `p * p` for attention inside the frame, `p * alpha` for the
    layers that see each patch alone. NeMo Automodel takes alpha = 3 * hidden of the vision tower.

    Args:
        patches: [n] integers >= 0 (list, NumPy array or CPU tensor; int32 or int64).
        world: ranks, >= 1.
        alpha: cost of one patch's linear layers in units of one patch pair's attention, >= 0.
        method: "minimax" has the least possible largest cost; "bisect" cuts at the running cost total * r / world.

    Returns:
        int64 [world + 1] cuts, rank r running frames [cuts[r], cuts[r + 1]), at least one each; None when there are
        fewer frames than ranks.

    Raises:
        ValueError: a negative count, `world` < 1, an unknown method, or costs that could reach 2^63.
        TypeError: something other than integers.
    """
    if method not in _METHODS:
        raise ValueError(f"frame_partition: method is {method!r}, one of {', '.join(_METHODS)} is needed")
    return _amcore.frame_partition(patches, world, alpha=alpha, bisect=method == "bisect")


def docs_from_ids(doc_ids):
    """Start and end of every document of a pack, in order, as int64 [N, 2].

    A document is a maximal run of one nonzero id; 0 is padding; an id that comes back is another document.
    `doc_ids` is [T], int32 or int64 (list, NumPy array or CPU tensor).
    """
    return _amcore.docs_from_ids(doc_ids)


class Pack:
    """Documents laid end to end in one token axis, described once a step for every operator of that step.

    Args:
        cu_seqlens: int32 or int64 [N + 1] offsets: 0 first, never decreasing. Documents of length 0 keep their row.
        doc_ids: int32 or int64 [T]; see `docs_from_ids`. Give one of the two.
        device: where operators of this pack run: None or "cpu" here; a CUDA device gets one copy of `docs` and `order`,
            on its current stream, and operators then copy nothing.

    Attributes:
        docs: int64 [N, 2], start and end of each document. Read-only.
        tokens: length of the token axis when `doc_ids` said it, else None (any T >= `end`).
        end: one past the last real token.
        order: int64 [N], the documents from the longest to the shortest: the order of work. Read-only.
        device_docs: `docs` as a tensor on `device`, or None on the CPU.
        device_plan: `docs` and `order` in one tensor [3 N] on `device`, or None; `device_docs` is a view of it.

    The arrays are copied at the call: changing them later changes nothing. ValueError and TypeError as for the
    functions above.
    """

    def __init__(self, *, cu_seqlens=None, doc_ids=None, device=None):
        if (cu_seqlens is None) == (doc_ids is None):
            raise ValueError("Pack: give exactly one of cu_seqlens and doc_ids")
        if doc_ids is not None:
            doc_ids = _amcore.index_array(_to_host(doc_ids, "doc_ids"))
            self.docs = _amcore.docs_from_ids(doc_ids)
            self.tokens = len(doc_ids)
        else:
            self.docs = _amcore.docs_from_offsets(_to_host(cu_seqlens, "cu_seqlens"))
            self.tokens = None
        self.docs.flags.writeable = False
        self.end = int(self.docs[-1, 1]) if len(self.docs) else 0
        self.order = np.argsort(-self.lengths, kind="stable")
        self.order.flags.writeable = False
        self._place(device)

    def __len__(self):
        return len(self.docs)

    def __setstate__(self, state):
        self.__dict__.update(state)
        self.docs.flags.writeable = False  # copy and pickle forget it

    def __repr__(self):
        axis = f">= {self.end}" if self.tokens is None else self.tokens
        return f"Pack({len(self)} documents, {self.num_real} real tokens, token axis {axis})"

    @property
    def lengths(self):
        """int64 [N]: tokens of each document."""
        return self.docs[:, 1] - self.docs[:, 0]

    @property
    def num_real(self):
        """Tokens that belong to a document."""
        return int(self.lengths.sum())

    @property
    def max_length(self):
        """Tokens of the longest document; 0 for an empty pack."""
        return int(self.lengths.max(initial=0))

    def to(self, device):
        """The same pack for operators on `device`; see the argument of that name."""
        made = copy.copy(self)
        made._place(device)
        return made

    def _place(self, device):
        self.device_plan = to_device(device, self.docs, self.order)
        self.device_docs = None if self.device_plan is None else self.device_plan[: self.docs.size].view(-1, 2)

    def check_tokens(self, tokens, name="x"):
        """ValueError unless a tensor of `tokens` rows can hold this pack."""
        if self.tokens is not None and tokens != self.tokens:
            raise ValueError(f"{name} has {tokens} tokens, the pack's doc_ids have {self.tokens}")
        if tokens < self.end:
            raise ValueError(f"{name} has {tokens} tokens, the pack ends at {self.end}")


def require_pack(name, pack):
    """TypeError unless `pack` is a Pack."""
    if not isinstance(pack, Pack):
        raise TypeError(f"{name}: argument 'pack' must be an automodel_c.Pack, not {type(pack).__name__}")


_warned = []


def _to_host(index, name):
    if not getattr(index, "is_cuda", False):
        return index
    import torch  # it made the index

    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"{name} is on a CUDA device and cannot be read under graph capture: give a Pack")
    if not _warned:
        _warned.append(name)
        warnings.warn(
            f"{name} is on a CUDA device: it is copied to the host at every call. Build one automodel_c.Pack a step "
            "from host data instead.",
            stacklevel=3,
        )
    return index.cpu()


def to_device(device, *parts):
    """The int64 arrays end to end as one tensor on a CUDA device, by one copy that the host need not wait for.

    None for the CPU and meta. RuntimeError under graph capture: a replay would read host memory that is gone.
    """
    if device is None or str(device).partition(":")[0] in ("cpu", "meta"):
        return None
    import torch  # only a CUDA pack needs it

    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("documents cannot be copied under graph capture: give a Pack made with device= before it")
    joined = np.concatenate([np.asarray(part, np.int64).ravel() for part in parts])
    return torch.from_numpy(joined).pin_memory().to(device, non_blocking=True)
