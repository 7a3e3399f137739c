"""Which part of a whole weight a rank holds."""

import dataclasses

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from automodel_c.parallel.uneven import place_of


@dataclasses.dataclass(frozen=True)
class Part:
    """`tensor`, which begins at `offsets` of a whole weight of `shape`."""

    tensor: torch.Tensor
    offsets: tuple
    shape: tuple

    @classmethod
    def of(cls, weight, first=0, rows=None):
        """Of a DTensor this rank's shard; of a plain tensor all of it, which is rows `first` onwards of `rows` in all
        (None: it is whole)."""
        if isinstance(weight, DTensor):
            offsets = place_of(weight)
            if offsets is None:
                _, offsets = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
            return cls(weight.to_local(), tuple(offsets), tuple(weight.shape))
        rows = len(weight) if rows is None and weight.ndim else rows
        shape = (rows, *weight.shape[1:]) if weight.ndim else ()
        return cls(weight, (first, *[0] * (weight.ndim - 1)) if weight.ndim else (), shape)

    @property
    def whole(self):
        return tuple(self.tensor.shape) == self.shape

    @property
    def slices(self):
        """What of the whole weight it is."""
        return tuple(slice(o, o + n) for o, n in zip(self.offsets, self.tensor.shape, strict=True))

    def row(self, index):
        """The part of row `index` of the whole, None where this rank holds nothing of it."""
        at = index - self.offsets[0]
        if not 0 <= at < len(self.tensor):
            return None
        return Part(self.tensor[at], self.offsets[1:], self.shape[1:])

    def rows(self, begin, end):
        """What there is of it of rows [begin, end) of the whole, as a part of these."""
        first, last = self.offsets[0], self.offsets[0] + len(self.tensor)
        low = min(max(begin, first), last)
        high = max(low, min(end, last))
        offset = min(max(low - begin, 0), end - begin)
        return Part(
            self.tensor[low - first : high - first], (offset, *self.offsets[1:]), (end - begin, *self.shape[1:])
        )
