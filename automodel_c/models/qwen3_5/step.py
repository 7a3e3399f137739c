"""From a batch to what one forward needs: checked, planned on the host, placed on the model's device.

Letters: T tokens, P rows of pixel_values, m the merge size.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np
import torch
from torch.utils.checkpoint import noop_context_fn

from automodel_c import ops, parallel
from automodel_c.data.positions import IMAGE, TEXT, VIDEO, pack_positions
from automodel_c.keys import check_known
from automodel_c.parallel import alarms
from automodel_c.parallel.tensor import TensorParallel
from automodel_c.partition import Pack

from .share import Share

KEYS = (
    "input_ids", "labels", "cu_seqlens", "doc_ids", "position_ids", "mm_token_type_ids", "num_label_tokens",
    "pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw",
)  # fmt: skip
IGNORE = -100


@dataclasses.dataclass(frozen=True)
class Step:
    """A pack as the layers see it, and what mixes its tokens; recomputation in backward uses the same.

    Attributes:
        pack: Pack over T, the whole pack.
        positions: int64 [3, T], of this rank's rows as all that layers see.
        padding: bool [T], True where no document is, or None when all rows are real; this rank's rows of tp.
        plan: ContextPlan of several ranks, or None.
        experts_travel: whether other ranks hold some of the experts.
    """

    pack: Pack
    positions: torch.Tensor
    padding: torch.Tensor | None
    plan: parallel.ContextPlan | None = None
    experts_travel: bool = False

    def attention(self, q, k, v):
        """Causal attention inside every document, [T, Hq, D]."""
        if self.plan is None:
            return ops.attention(q, k, v, pack=self.pack, causal=True)
        return parallel.attention(q, k, v, self.plan, causal=True)

    def causal_conv1d(self, x, weight):
        """The short convolution with its SiLU, [T, C]."""
        if self.plan is None:
            return ops.causal_conv1d(x, weight, activation="silu", pack=self.pack)[0]
        return parallel.causal_conv1d(x, weight, self.plan, activation="silu")

    def gated_delta_rule(self, q, k, v, g, beta):
        """The recurrence of every document, [T, Hv, Dv]."""
        if self.plan is None:
            return ops.gated_delta_rule(q, k, v, g, beta, pack=self.pack)[0]
        return parallel.gated_delta_rule(q, k, v, g, beta, self.plan)

    @property
    def checkpoint_context(self):
        """context_fn for activation checkpointing: over ranks, rows that came in are kept, so that none moves again."""
        alone = self.plan is None and not self.experts_travel
        return noop_context_fn if alone else parallel.checkpoint_context_fn


@dataclasses.dataclass(frozen=True)
class Media:
    """Images, then videos, of the whole pack. Attributes: pixel_values [P, width]; grids int64 [n, 3]; places int64
    [P / m^2] on the host, the rows of the pack that their embeddings take; merge, m. Without media one black frame that
    takes no place."""

    pixel_values: torch.Tensor
    grids: np.ndarray
    places: np.ndarray
    merge: int


@dataclasses.dataclass(frozen=True)
class Ahead:
    """What multi-token prediction reads k tokens further: embedded int64 [T], rows of the embeddings; positions int64
    [3, T]; labels int64 [T], IGNORE beyond the document. embedded and labels are of this rank's rows of tp."""

    embedded: torch.Tensor
    positions: torch.Tensor
    labels: torch.Tensor


class Batch:
    """A caller's batch, checked. Under `cp`, a ContextParallel, what one rank holds of it; `depths`: how many tokens
    ahead its embeddings reach; `ep`, `tp`: the ExpertParallel and TensorParallel of the model.

    Attributes: share, Share; tokens, T as it was given: under tp padding may follow; input_ids int64, of the share's
    `rows`; labels int64 [T] of this rank's rows, of tp too, or None, IGNORE in padding; labelled_rows int64 [n], those
    with a label, where no ranks share the pack, the labels came on the host and are few, else None; label_count int64
    scalar, how many the whole batch has; real_rows, tokens of the whole batch that are in documents; num_label_tokens,
    what losses are divided by; step, Step; media, Media.
    """

    def __init__(self, batch, config, device, cp=None, depths=0, needs_labels=False, ep=None, tp=None):
        group = getattr(cp, "group", None)
        self.tp = tp = TensorParallel() if tp is None else tp
        with alarms.everywhere(group):
            given = _given(batch)
            self.tokens = len(_tensor(given, "input_ids", 1, integer=True))
            given = _filled(given, tp.ranks * (1 if group is None else 2 * cp.ranks) if tp.ranks > 1 else 1)
            ids = _tensor(given, "input_ids", 1, integer=True)
            tokens = len(ids)
            pack = _pack(given, tokens, device)
            ends = _ends(pack, tokens)
            real = ends > 0
            host_ids = np.where(real, ids.cpu().numpy(), 0)  # padding may hold anything
            _check_ids(host_ids, config.text.vocab_size)
            types = _types(given, host_ids, real, config)
            self.media, grids = _media(given, types, config)
            self._positions = _positions(given, types, pack, grids, config)
            labels = _labels(given, tokens, real)
            if needs_labels and labels is None:
                raise ValueError("batch: labels is missing")
        few = _few(labels)
        self._labels = None if labels is None else labels.to(device)
        self.label_count = None if labels is None else (self._labels != IGNORE).sum()
        self.num_label_tokens = given.get("num_label_tokens", self.label_count)
        documents = {key: given[key] for key in ("cu_seqlens", "doc_ids") if key in given}
        plan = None if group is None else cp.plan(**documents, tokens=tokens)
        if plan is not None:
            plan.use()
        self.share = share = Share(ends, plan, depths)
        self.real_rows = int(real.sum())
        padding = share.take(torch.from_numpy(~real), True)
        padding = tp.own(padding.to(device)) if padding.any() else None
        travel = getattr(ep, "group", None) is not None
        self.step = Step(pack, share.take(self._positions, 0).to(device), padding, plan, travel)
        self.input_ids = share.take(torch.from_numpy(host_ids), 0, None if plan is None else share.rows).to(device)
        self.labels = None if self._labels is None else tp.own(share.take(self._labels, IGNORE))
        alone = plan is None and tp.group is None
        self.labelled_rows = few.to(device) if alone and few is not None else None

    def ahead(self, k):
        """The `Ahead` of depth k, made from the whole pack: a document's next rows may be another rank's."""
        rows, inside = self.share.ahead(k)
        positions, labels = (
            self.share.take(x, fill, rows) for x, fill in ((self._positions, 0), (self._labels, IGNORE))
        )
        device, embedded = labels.device, torch.from_numpy(self.share.embedded(rows))
        labels = labels.masked_fill(~torch.from_numpy(inside).to(device), IGNORE)
        return Ahead(self.tp.own(embedded).to(device), positions.to(device), self.tp.own(labels))


@dataclasses.dataclass
class OnHost(Mapping):
    """A batch that FSDP2's root does not look into: it would move all of it to the device, and plans are made here.
    Hooks read it as they would the dict."""

    batch: dict

    def __getitem__(self, key):
        return self.batch[key]

    def __iter__(self):
        return iter(self.batch)

    def __len__(self):
        return len(self.batch)


def _given(batch):
    if isinstance(batch, OnHost):
        batch = batch.batch
    if not isinstance(batch, dict):
        raise TypeError(f"batch: expected a dict, found {type(batch).__name__}")
    for key in batch:
        check_known(key, KEYS, "batch.")
    return {key: value for key, value in batch.items() if value is not None}


def _filled(given, multiple):
    """`given` with padding behind the last token, so that `multiple` divides the tokens."""
    missing = -len(given["input_ids"]) % multiple
    if not missing:
        return given
    if not {"cu_seqlens", "doc_ids"} & given.keys():
        given = {**given, "cu_seqlens": [0, len(given["input_ids"])]}
    fills = {"input_ids": 0, "labels": IGNORE, "position_ids": 0, "mm_token_type_ids": TEXT, "doc_ids": 0}
    more = {}
    for key in fills.keys() & given.keys():
        x = given[key]
        x = x if isinstance(x, torch.Tensor) else torch.as_tensor(np.asarray(x))  # doc_ids may be what Pack takes
        more[key] = torch.nn.functional.pad(x, (0, missing), value=fills[key])
    return {**given, **more}


def _tensor(given, key, ndim, tokens=None, integer=False):
    """given[key], a tensor of `ndim` axes whose last has `tokens`; ValueError and TypeError name it."""
    if key not in given:
        raise ValueError(f"batch: {key} is missing")
    x = given[key]
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"batch: {key} must be a tensor, not {type(x).__name__}")
    if x.ndim != ndim:
        raise ValueError(f"batch: {key} has {x.ndim} axes, {ndim} are needed (a pack has no batch axis)")
    if tokens is not None and x.shape[-1] != tokens:
        raise ValueError(f"batch: {key} has {x.shape[-1]} tokens, input_ids has {tokens}")
    if integer and x.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"batch: {key} is {x.dtype}, int64 or int32 is needed")
    return x


def _pack(given, tokens, device):
    if "cu_seqlens" in given and "doc_ids" in given:
        raise ValueError("batch: give one of cu_seqlens and doc_ids, not both")
    if "doc_ids" in given:
        documents = {"doc_ids": given["doc_ids"]}
    else:
        documents = {"cu_seqlens": given.get("cu_seqlens", [0, tokens])}
    pack = Pack(**documents, device=device)
    pack.check_tokens(tokens, "batch: input_ids")
    return pack


def _ends(pack, tokens):
    """One past the last token of each token's document, 0 in padding."""
    lengths = pack.lengths
    ends = np.zeros(tokens, dtype=np.int64)
    first = pack.docs[:, 0].repeat(lengths)
    inner = np.arange(len(first)) - (lengths.cumsum() - lengths).repeat(lengths)
    ends[first + inner] = pack.docs[:, 1].repeat(lengths)
    return ends


def _check_ids(ids, vocab):
    wrong = np.flatnonzero((ids < 0) | (ids >= vocab))
    if len(wrong):
        raise ValueError(f"batch: input_ids[{wrong[0]}] is {ids[wrong[0]]}, the vocabulary has {vocab} tokens")


def _types(given, ids, real, config):
    """TEXT, IMAGE or VIDEO of each token; TEXT in padding."""
    types = np.where(ids == config.image_token_id, IMAGE, np.where(ids == config.video_token_id, VIDEO, TEXT))
    types[~real] = TEXT
    if "mm_token_type_ids" in given:
        told = _tensor(given, "mm_token_type_ids", 1, len(ids)).cpu().numpy()
        for kind, word in ((IMAGE, "image"), (VIDEO, "video")):
            theirs, ours = ((x == kind) & real for x in (told, types))
            if (theirs != ours).any():
                raise ValueError(
                    f"batch: mm_token_type_ids marks {theirs.sum()} {word} tokens, input_ids has {ours.sum()}"
                    + (" elsewhere" if theirs.sum() == ours.sum() else "")
                )
    return types


def _media(given, types, config):
    """(Media, [grids of images, grids of videos])."""
    vision, merge, found, grids, places = config.vision, config.vision.spatial_merge_size, [], [], []
    for kind, word, pixels in ((IMAGE, "image", "pixel_values"), (VIDEO, "video", "pixel_values_videos")):
        grid = _grid(given, f"{word}_grid_thw", merge)
        rows = _rows(given, pixels, vision.patch_width)
        wanted = int(grid.prod(1).sum())
        if len(rows) != wanted:
            raise ValueError(f"batch: {pixels} has {len(rows)} rows, {word}_grid_thw asks for {wanted}")
        there, merged = np.flatnonzero(types == kind), wanted // merge**2
        if len(there) != merged:
            raise ValueError(f"batch: input_ids has {len(there)} {word} tokens, {word}_grid_thw asks for {merged}")
        found += [rows] if len(rows) else []
        grids.append(grid)
        places.append(there)
    places = np.concatenate(places)
    if not len(places):
        return Media(torch.zeros(merge**2, vision.patch_width), np.array([[1, merge, merge]]), places, merge), grids
    pixel_values = found[0] if len(found) == 1 else torch.cat([rows.to(found[0].device) for rows in found])
    return Media(pixel_values, np.concatenate(grids), places, merge), grids


def _grid(given, key, merge):
    if key not in given:
        return np.zeros((0, 3), dtype=np.int64)
    grid = _tensor(given, key, 2, integer=True).cpu().numpy().astype(np.int64)
    if grid.shape[1] != 3:
        raise ValueError(f"batch: {key} has {grid.shape[1]} columns, 3 are needed")
    wrong = np.flatnonzero((grid < 1).any(1) | (grid[:, 1:] % merge).any(1))
    if len(wrong):
        t, h, w = grid[wrong[0]].tolist()
        raise ValueError(f"batch: {key}[{wrong[0]}] is {t, h, w}: rows and columns must be multiples of {merge}, > 0")
    return grid


def _rows(given, key, width):
    if key not in given:
        return torch.zeros(0, width)
    rows = _tensor(given, key, 2)
    if not rows.is_floating_point():
        raise TypeError(f"batch: {key} is {rows.dtype}, a floating-point dtype is needed")
    if rows.shape[1] != width:
        raise ValueError(f"batch: {key} has {rows.shape[1]} columns, a patch has {width}")
    return rows


def _positions(given, types, pack, grids, config):
    if "position_ids" in given:
        positions = _tensor(given, "position_ids", 2, len(types), integer=True)
        if positions.shape[0] != 3:
            raise ValueError(f"batch: position_ids has {positions.shape[0]} axes, 3 are needed (time, height, width)")
        return positions.long()
    merge = config.vision.spatial_merge_size
    return torch.from_numpy(pack_positions(types, pack.docs, *grids, merge, "batch"))


def _few(labels):
    """Rows with a label, None where they are none or more than half, or where the labels are on a device."""
    if labels is None or labels.device.type != "cpu":
        return None
    rows = np.flatnonzero(labels.numpy() != IGNORE)
    return torch.from_numpy(rows) if 0 < 2 * len(rows) <= len(labels) else None


def _labels(given, tokens, real):
    """Labels where they were given, those of padding ignored; None where there are none."""
    if "labels" not in given:
        return None
    labels = _tensor(given, "labels", 1, tokens, integer=True).long()
    if not real.all():
        labels = labels.masked_fill(torch.from_numpy(~real).to(labels.device), IGNORE)
    return labels
