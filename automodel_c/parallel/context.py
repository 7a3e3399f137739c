"""Context parallelism: the tokens of one pack over the ranks of a group."""

import torch
import torch.distributed as dist

from . import alarms
from .carry import has_nccl
from .exchange import exchange
from .plan import LAYOUTS, SCHEMES, ContextPlan, Prices, make_pack, measured_prices


class ContextParallel:
    """The ranks that share a pack.

    ``group``: their process group (gloo, or NCCL on GPUs). None, or a group of one rank, is the plain path: nothing is
    cut or sent.
    """

    def __init__(self, group=None):
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise TypeError(f"ContextParallel: group must be a process group or None, not {type(group).__name__}")
        self.ranks, self.rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
        if self.rank < 0:
            raise ValueError(f"ContextParallel: global rank {dist.get_rank()} is not in the group")
        self.group = group if self.ranks > 1 else None
        if self.group is not None:
            alarms.watch(self.group)

    def __repr__(self):
        return f"ContextParallel(rank {self.rank} of {self.ranks})"

    def __deepcopy__(self, memo):
        return self  # a copy of a model is over the same ranks

    def plan(self, *, cu_seqlens=None, doc_ids=None, tokens=None, layout="contiguous", scheme="auto", prices=None):
        """One step's `ContextPlan`, on the host; the same arguments on every rank.

        Args:
            cu_seqlens, doc_ids: the documents of the whole pack, one of them; neither is a single document.
            tokens: length of the token axis (default: where the documents end). It is padded to a multiple of
                2 * ranks.
            layout: "contiguous", rank r holds rows [r T, (r + 1) T); "round_robin": of 2 * ranks chunks, rank r holds
                chunks r and 2 * ranks - 1 - r.
            scheme: where attention is computed: "home", by who holds the query rows; "balanced", every rank within 5 %
                of the mean, rows of overloaded ones migrating; "heads", the heads of long documents that lie on several
                ranks split over the ranks, each computing all rows of its heads, the other rows as with "balanced";
                "auto", what the prices call cheapest.
            prices: a `Prices`; the package's own measurements when None, on GPUs where the group has NCCL.

        Raises:
            ValueError: both descriptions, doc_ids of other than `tokens` elements, an unknown layout or scheme.
            TypeError: as for `Pack`; prices of another kind.
        """
        with alarms.everywhere(self.group):
            for name, value, known in (("layout", layout, LAYOUTS), ("scheme", scheme, SCHEMES)):
                if value not in known:
                    raise ValueError(f"plan: {name} is {value!r}, one of {', '.join(known)} is needed")
            if not isinstance(prices, Prices | None):
                raise TypeError(f"plan: prices must be Prices or None, not {type(prices).__name__}")
            pack, tokens = make_pack(cu_seqlens, doc_ids, tokens)
            if prices is None and self.group is not None and has_nccl(self.group):
                prices = measured_prices("h200_nccl")
            return ContextPlan(
                pack, tokens, ranks=self.ranks, rank=self.rank, group=self.group, layout=layout, scheme=scheme,
                prices=prices,
            )  # fmt: skip

    def shard(self, x, plan, fill=0):
        """This rank's rows of ``x`` [tokens, ...] -> [local, ...]; rows past the end hold ``fill``. Differentiable."""
        with alarms.everywhere(self.group):
            self._check("shard", x, plan, "tokens")
            parts = []
            for begin, end in plan.chunks_of(plan.rank):
                real = min(max(begin, plan.tokens), end) - begin
                parts.append(x[begin : begin + real] if real else x[:0])
                parts.append(x.new_full((end - begin - real, *x.shape[1:]), fill))
            return torch.cat(parts)

    def gather(self, x_local, plan):
        """Every rank's ``x_local`` [local, ...] -> the whole [tokens, ...], without padding, on every rank.

        Its gradient is the sum over ranks: each rank's upstream gradient counts. ``gather(shard(x))`` is x, to the bit.
        """
        with alarms.everywhere(self.group):
            self._check("gather", x_local, plan, "local")
            if plan.ranks == 1:
                return x_local[: plan.tokens]
            plan.use()
            return exchange(x_local, plan.gather_route, plan.group)

    def _check(self, name, x, plan, wanted):
        if not isinstance(plan, ContextPlan):
            raise TypeError(f"{name}: plan must come from ContextParallel.plan, not {type(plan).__name__}")
        if (plan.ranks, plan.rank) != (self.ranks, self.rank):
            raise ValueError(f"{name}: the plan is for rank {plan.rank} of {plan.ranks}, this is {self!r}")
        if plan.group is not self.group:
            raise ValueError(f"{name}: the plan is for another group of {plan.ranks} ranks")
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: x must be a torch tensor, not {type(x).__name__}")
        rows = getattr(plan, wanted)
        if x.ndim == 0 or x.shape[0] != rows:
            found = f"{x.shape[0]} rows" if x.ndim else "no axis"
            raise ValueError(f"{name}: x has {found}, the plan has {rows} {wanted} rows (token axis first)")
