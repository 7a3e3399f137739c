"""Pipeline parallelism: a model's layers over the ranks of a column, microbatches through them one behind another.

What goes from stage to stage has the shape that its microbatch gives it: every rank holds the batch, so nobody asks.
"""

import dataclasses

import torch
import torch.distributed as dist

from .pipeline_order import pipeline_order


@dataclasses.dataclass(frozen=True)
class PipelineParallel:
    """Which stages this rank of a column holds: stage s of `ranks * chunks` is chunk s // ranks of rank s % ranks."""

    rank: int = 0
    ranks: int = 1
    chunks: int = 1

    @property
    def stages(self):
        return self.ranks * self.chunks

    def stage(self, chunk):
        return chunk * self.ranks + self.rank

    @property
    def is_first(self):
        """Whether the first stage is this rank's, whose it then is as chunk 0."""
        return self.rank == 0

    @property
    def is_last(self):
        return self.rank == self.ranks - 1

    def layers(self, count, chunk):
        """range of the `count` layers that a chunk of this rank holds. What is over goes to inner stages first: the
        first has the tower and the embedding, the last the head."""
        if count < self.stages:
            raise ValueError(f"load: {count} layers cannot be cut into {self.stages} stages of a pipeline")
        each, over = divmod(count, self.stages)
        outer = (0, self.stages - 1)
        more = set(sorted(range(self.stages), key=lambda s: (s in outer, s))[:over])
        sizes = [each + (s in more) for s in range(self.stages)]
        first = sum(sizes[: self.stage(chunk)])
        return range(first, first + sizes[self.stage(chunk)])


class Channels:
    """Ways from rank to rank of every column, one for each direction and kind of message, so that none waits for
    another. columns: int [n, R], the global ranks of every column; every rank of the world makes it alike."""

    def __init__(self, columns, chunks):
        self._ways, self._sent = {}, []
        for column in columns.tolist():
            ring = [(r, (r + 1) % len(column)) for r in range(len(column) if chunks > 1 else len(column) - 1)]
            pairs = [("next", a, b) for a, b in ring] + [("skip", 0, len(column) - 1)]
            for kind, a, b in pairs:
                for way, source, sink in ((kind, a, b), (f"{kind} back", b, a)):
                    group = dist.new_group([column[a], column[b]])
                    if dist.get_rank() in (column[a], column[b]):
                        self._ways[way, source, sink] = group, column[source], column[sink]

    def open(self, device):
        """Sends one number through every way, so that the first step does not wait for communicators to be made."""
        for group, origin, to in self._ways.values():
            number = torch.ones(1, device=device)
            if dist.get_rank() == origin:
                dist.send(number, to, group=group)
            else:
                dist.recv(number, origin, group=group)

    def send(self, way, source, sink, tensors):
        """Begins to send tensors from one rank of the column, this one, to another."""
        group, _, to = self._ways[way, source, sink]
        self._sent = [of for of in self._sent if not of[0].is_completed()]
        for tensor in tensors:
            tensor = tensor.detach().contiguous()
            self._sent.append((dist.isend(tensor, to, group=group), tensor))

    def receive(self, way, source, sink, specs, device):
        """Tensors of `specs` [(shape, dtype)] that the other rank sends, in its order."""
        group, origin, _ = self._ways[way, source, sink]
        tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in specs]
        for tensor in tensors:
            dist.irecv(tensor, origin, group=group).wait()
        return tensors

    def wait(self):
        """Until all that was sent has arrived."""
        for work, _ in self._sent:
            work.wait()
        self._sent = []


class Pipeline:
    """Runs the stages of one rank.

    pp: PipelineParallel. channels: of all ranks. stages: has
        specs(microbatch) -> {name: (shape, dtype)} of what goes from a stage to the next, and skip_specs(microbatch)
            of what goes from the first to the last one besides;
        forward(microbatch, chunk, arrived) -> {name: tensor} of what goes on, and is kept until
        backward(microbatch, chunk, returned) -> {name: tensor} of what goes back.
    """

    def __init__(self, pp, channels, stages, device):
        self.pp, self.channels, self.stages, self.device = pp, channels, stages, device

    def step(self, microbatches, before_backward):
        """Forward and backward of so many microbatches, numbered from 0. before_backward(last): called ahead of every
        backward, with whether it is this rank's last."""
        order = pipeline_order(self.pp.ranks, self.pp.chunks, microbatches)[self.pp.rank]
        for at, (kind, chunk, microbatch) in enumerate(order):
            if kind == "F":
                self._forward(microbatch, chunk)
            else:
                before_backward(at == len(order) - 1)
                self._backward(microbatch, chunk)
        self.channels.wait()

    def forward(self, microbatch):
        """The forward of one microbatch through all stages, without a backward."""
        for chunk in range(self.pp.chunks):
            self._forward(microbatch, chunk)
        self.channels.wait()

    def _ends(self, chunk):
        stage = self.pp.stage(chunk)
        return stage == 0, stage == self.pp.stages - 1

    def _forward(self, microbatch, chunk):
        first, last = self._ends(chunk)
        arrived = {} if first else self._receive("next", -1, self.stages.specs(microbatch))
        if last:
            arrived |= self._receive("skip", None, self.stages.skip_specs(microbatch))
        out = self.stages.forward(microbatch, chunk, arrived)
        if not last:
            self._send("next", 1, [out[name] for name in self.stages.specs(microbatch)])
        if first:
            self._send("skip", None, [out[name] for name in self.stages.skip_specs(microbatch)])

    def _backward(self, microbatch, chunk):
        first, last = self._ends(chunk)
        returned = {} if last else self._receive("next back", 1, self.stages.specs(microbatch))
        if first:
            returned |= self._receive("skip back", None, self.stages.skip_specs(microbatch))
        out = self.stages.backward(microbatch, chunk, returned)
        if not first:
            self._send("next back", -1, [out[name] for name in self.stages.specs(microbatch)])
        if last:
            self._send("skip back", None, [out[name] for name in self.stages.skip_specs(microbatch)])

    def _other(self, by):
        """The rank `by` further, of None the one at the other end."""
        return self.pp.ranks - 1 - self.pp.rank if by is None else (self.pp.rank + by) % self.pp.ranks

    def _send(self, way, by, tensors):
        if tensors:
            self.channels.send(way, self.pp.rank, self._other(by), tensors)

    def _receive(self, way, by, specs):
        if not specs:
            return {}
        found = self.channels.receive(way, self._other(by), self.pp.rank, specs.values(), self.device)
        return dict(zip(specs, found, strict=True))
