"""Hypothesis strategies that the tests of all operators share."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

LAYOUTS = ("contiguous", "strided", "rows", "offset", "transposed", "size1", "empty")


@dataclass(frozen=True)
class PackedDocs:
    """Documents end to end, some of length 0, on an axis of `tokens` >= cu_seqlens[-1]."""

    cu_seqlens: list[int]
    tokens: int

    @property
    def lengths(self):
        return [end - start for start, end in zip(self.cu_seqlens, self.cu_seqlens[1:], strict=False)]


@st.composite
def packed_docs(draw, max_tokens, max_docs=8):
    """A PackedDocs of at most `max_tokens`, padding included; no document and no token are possible."""
    tokens = draw(st.integers(0, max_tokens))
    ends = sorted(draw(st.lists(st.integers(0, tokens), max_size=max_docs)))
    return PackedDocs([0, *ends], tokens)


@st.composite
def doc_ids(draw, max_tokens, max_runs=10):
    """Ids of a pack as a list: 0 is padding, anywhere; an id may come back later."""
    runs = draw(st.lists(st.tuples(st.integers(0, 4), st.integers(1, max(1, max_tokens // 4))), max_size=max_runs))
    return [number for number, length in runs for _ in range(length)][:max_tokens]


def frame_costs(max_frames=24, max_patches=64):
    """Patches of ordered frames: equal ones, zeros and giants among them."""
    patches = st.one_of(st.integers(0, max_patches), st.sampled_from([0, 1, 4, max_patches, 100 * max_patches]))
    return st.one_of(
        st.lists(patches, max_size=max_frames),
        st.builds(lambda p, n: [p] * n, patches, st.integers(0, max_frames)),
    )


def shard_sizes(ranks, max_size=64):
    """Elements of each rank's shard: uneven, and empty on some ranks or all."""
    return st.lists(st.one_of(st.just(0), st.integers(0, max_size)), min_size=ranks, max_size=ranks)


def with_layout(x, layout):
    """The values of `x` in a tensor laid out in memory as `layout` says.

    strided: every second element of the last axis. rows: last axis contiguous, a gap after each row. offset: starts
    one element into its storage. transposed: axes reversed in memory. size1: a leading axis of size 1 with an odd
    stride is added and every axis of size 1 gets one. empty: no elements, odd strides.
    """
    if layout == "contiguous":
        return x.contiguous().clone(memory_format=torch.contiguous_format)
    if layout == "empty":
        return torch.empty(1, dtype=x.dtype, device=x.device).as_strided((0, *x.shape[1:]), (999,) * max(1, x.ndim))
    if layout == "size1":
        flat = x.contiguous().clone(memory_format=torch.contiguous_format)
        strides = [999 if n == 1 else s for n, s in zip(flat.shape, flat.stride(), strict=True)]
        return flat.as_strided((1, *flat.shape), (777, *strides))
    if layout == "transposed":
        axes = tuple(reversed(range(x.ndim)))
        return x.permute(axes).contiguous().clone(memory_format=torch.contiguous_format).permute(axes)
    if layout == "offset":
        block = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
        out = block[1:].view(x.shape)
    else:
        last = x.shape[-1] if x.ndim else 1
        wide = torch.zeros(*x.shape[:-1], 2 * last + 1, dtype=x.dtype, device=x.device)
        out = wide[..., : 2 * last : 2] if layout == "strided" else wide[..., :last]
        out = out.view(x.shape) if x.ndim else out[0]
    return out.copy_(x)


@st.composite
def tensors(draw, shape, layout=None, dtype=torch.float32):
    """Normal random values in `shape`, laid out as `layout` (any of LAYOUTS when left out)."""
    layout = draw(st.sampled_from(LAYOUTS)) if layout is None else layout
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    return with_layout(torch.randn(*shape, generator=generator).to(dtype), layout)
