"""The gated delta rule over ranks where every document that goes on ends on the next span: states are made as early as
they can be, and waited for as late.

Forward, a rank runs the document that goes on, sends its state, and while states travel runs the documents inside and
prepares of the one that came in what needs no state. Backward, it makes the gradient of the state that came in, sends
that, and meanwhile runs the documents inside. The gradient of the state is one of several results of the document's
backward pass, or, where the rank before would wait for that, made in a shorter pass of its own ahead.
"""

import numpy as np
import torch

from automodel_c import _amcore, ops
from automodel_c.ops import gdn
from automodel_c.ops._documents import ends_of, plan_beside

from .exchange import begin, begin_back
from .recompute import note, noted

EARLY = 0.36  # of a backward pass is what the gradient of the first state takes alone


def across(tensors, plan, scale, qk_l2norm):
    """The output [local, Hv, Dv] of this rank's q, k, v, g and beta. Every rank of the plan comes here."""
    scale = max(1, tensors[0].shape[2]) ** -0.5 if scale is None else float(scale)
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return _Edges.apply(*tensors, plan, scale, bool(qk_l2norm), keep)


def sends_early(straddles, rank):
    """Whether a rank makes the gradient of the state that came in ahead of the rest: where that ends sooner."""
    ranks, local = straddles.plan.ranks, straddles.plan.local
    came, goes = (np.bincount(straddles.owner, rows, minlength=ranks) for rows in straddles.edge_rows)
    spans = np.flatnonzero((straddles.owner == rank) & straddles.came)
    if not len(spans):
        return False
    before = straddles.owner[spans[-1] - 1]
    ends = [
        max(max(local - goes[before], share * came[rank]) + goes[before], local + more * came[rank])
        for share, more in ((1.0, 0.0), (EARLY, EARLY))
    ]
    return bool(ends[1] < ends[0])


class _Call:
    """One `Part` of the rows: its tensors, its documents, and how it is run."""

    def __init__(self, part, piece, scale, l2norm):
        self.part, self.piece = part, piece
        self.docs = ends_of(part.pack, part.rows), plan_beside(piece[0], part.pack_on(piece[0].device))
        self.scale, self.l2norm = scale, l2norm

    def prepare(self):
        return gdn.prepare(*self.piece, *self.docs, self.scale, self.l2norm)

    def run(self, first, final, keep, prepared=None):
        return gdn._forward(*self.piece, *self.docs, first, self.scale, self.l2norm, final, keep, prepared)

    def differentiate(self, dout, dfinal, first, states):
        return gdn._backward(
            dout, dfinal, *self.piece, *self.docs, first, states, self.scale, self.l2norm, first is not None
        )  # fmt: skip

    def early(self, dout, first, states):
        """The gradient of the first state, ahead of `differentiate`; None where no kernel is faster at it alone."""
        if not can_be_early(self.piece, self.docs[0]):
            return None
        return gdn.initial_gradient(
            dout, None, *self.piece, *self.docs, first, states, self.scale, self.l2norm
        )  # fmt: skip


def can_be_early(piece, docs):
    """Whether the gradient of a first state takes less than the whole pass."""
    q, k, v = piece[:3]
    return q.is_cuda and _amcore.gated_delta_rule_row(q, k, v, docs, backward=True).endswith("sm90")


class _Edges(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, g, beta, plan, scale, l2norm, keep):
        calls = _calls((q, k, v, g, beta), plan, scale, l2norm)
        states = plan.straddles.states(q.shape[2], v.shape[2])
        outs, kept, firsts = ({} for _ in range(3))
        sent = [v.new_zeros((0, v.shape[1], q.shape[2]), dtype=torch.float32)]
        for i, call in calls.items():
            if call.part.goes:
                outs[i], last, kept[i] = call.run(None, True, keep)
                sent.append(_columns(last))
        if len(sent) == 1:  # what is wrong is said before rows move
            ops.gated_delta_rule(q[:0], k[:0], v[:0], g[:0], beta[:0], scale=scale, qk_l2norm=l2norm)
        arrived = noted()
        end = begin(torch.cat(sent), states.route, plan.group) if arrived is None else lambda: arrived
        for i, call in calls.items():
            if not call.part.goes and not call.part.came:
                outs[i], _, kept[i] = call.run(None, False, keep)
        prepared = {i: call.prepare() for i, call in calls.items() if call.part.came}
        arrived = note(end())
        blocks = iter(arrived.split(v.shape[2]))
        for i, call in calls.items():
            if call.part.came:
                firsts[i] = next(blocks).permute(1, 2, 0).contiguous()[None]
                outs[i], _, kept[i] = call.run(firsts[i], False, keep, prepared.pop(i))
        ctx.plan, ctx.options, ctx.at, ctx.came = plan, (scale, l2norm), list(kept), list(firsts)
        ctx.save_for_backward(q, k, v, g, beta, *(kept.values() if keep else ()), *firsts.values())
        return _joined([outs[i] for i in calls], v)

    @staticmethod
    def backward(ctx, dout):
        kept = ctx.saved_tensors
        tensors, saved = kept[:5], kept[5:]
        states = dict(zip(ctx.at, saved, strict=False))
        firsts = dict(zip(ctx.came, saved[len(ctx.at) :], strict=True))
        calls = _calls(tensors, ctx.plan, *ctx.options)
        dout = dout if dout.stride(-1) == 1 else dout.contiguous()
        douts = dict(zip(calls, _pieces((dout,), [c.part for c in calls.values()]), strict=True))
        found, sent = {}, [dout.new_zeros((0, *firsts_shape(tensors)), dtype=torch.float32)]
        early = sends_early(ctx.plan.straddles, ctx.plan.rank)

        def differentiate(i, dfinal=None):
            *found[i], dfirst = calls[i].differentiate(*douts[i], dfinal, firsts.get(i), states[i])
            return dfirst

        for i in firsts:
            ahead = calls[i].early(*douts[i], firsts[i], states[i]) if early else None
            sent.append(_columns(differentiate(i) if ahead is None else ahead))
        route = ctx.plan.straddles.states(tensors[0].shape[2], tensors[2].shape[2]).route
        end = begin_back(torch.cat(sent), route, ctx.plan.group)
        for i, call in calls.items():
            if not call.part.goes and i not in found:
                differentiate(i)
        back = iter(end().split(tensors[2].shape[2]))
        for i, call in calls.items():
            if call.part.goes:
                differentiate(i, next(back).permute(1, 2, 0).contiguous()[None])
        grads = [
            _joined([found[i][n] for i in calls], x) if ctx.needs_input_grad[n] else None for n, x in enumerate(tensors)
        ]
        return *grads, None, None, None, None


def firsts_shape(tensors):
    """Of a column of a state: [Hv, Dk]."""
    return tensors[2].shape[1], tensors[0].shape[2]


def _calls(tensors, plan, scale, l2norm):
    """{index: `_Call`} of the parts with rows, in their order."""
    parts = [part for part in plan.straddles.parts if part.rows]
    pieces = _pieces(tensors, parts)
    return {i: _Call(*each, scale, l2norm) for i, each in enumerate(zip(parts, pieces, strict=True))}


def _pieces(tensors, parts):
    if len(parts) == 1:
        return [tensors]
    return list(zip(*(x.split([part.rows for part in parts]) for x in tensors), strict=True)) or []


def _joined(pieces, like):
    """Side by side; of none, no rows like another tensor's."""
    if not pieces:
        return torch.empty_like(like)
    return torch.cat(pieces) if len(pieces) > 1 else pieces[0]


def _columns(states):
    """[N, Hv, Dk, n] -> [N n, Hv, Dk]."""
    return states.permute(0, 3, 1, 2).flatten(0, 1)
