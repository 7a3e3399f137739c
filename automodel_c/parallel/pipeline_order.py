"""In which order the ranks of a pipeline run the forwards and backwards of microbatches.

A model is cut into stages; of R ranks with `chunks` stages each, stage s is chunk s // R of rank s % R. A forward of a
microbatch goes through the stages from first to last, its backward from last to first.
"""

SCHEDULES = ("1f1b", "interleaved1f1b")


def stages_per_rank(schedule=None, stages=None):
    """How many stages each rank has. schedule: "1F1B" (None), of one, or "Interleaved1F1B", of `stages`, at least 2
    (None: 2). ValueError for another schedule, or a number that does not go with it."""
    name = "1F1B" if schedule is None else str(schedule)
    if name.lower() not in SCHEDULES:
        raise ValueError(f"pipeline.pp_schedule: expected 1F1B or Interleaved1F1B, found {schedule!r}")
    interleaved = name.lower() != SCHEDULES[0]
    stages = stages or (2 if interleaved else 1)
    if interleaved != (stages > 1):
        takes = "at least 2" if interleaved else "1, Interleaved1F1B more"
        raise ValueError(f"pipeline.stages_per_rank={stages}: {name} takes {takes}")
    return stages


def pipeline_order(ranks, chunks, microbatches):
    """For every rank its [(kind, chunk, microbatch)], kind "F" or "B": one forward, one backward.

    A rank runs as many forwards ahead as keep the others busy, then a backward whenever it can: of one chunk a rank r
    holds at most R - r microbatches' activations. What is worked out is a run in which every forward takes one unit and
    every backward two, so that ranks that keep to these orders never wait for each other in a ring.
    """
    forwards = [(m, c) for m in range(microbatches) for c in range(chunks)]
    forwards.sort(key=lambda of: (of[0] // ranks, of[1], of[0]))
    backwards = sorted(forwards, key=lambda of: (of[0] // ranks, -of[1], of[0]))
    run = _Run(ranks, chunks, forwards, backwards)
    ahead = [r + 1 for r in reversed(range(ranks))] if chunks == 1 else _ahead(ranks, chunks)
    while not run.is_over():
        if not run.advance(ahead):  # too few microbatches are under way for the first backward: with odd counts
            ahead = [n + 1 for n in ahead]
    return run.order


def _ahead(ranks, chunks):
    return [2 * (ranks - 1 - r) + (chunks - 1) * ranks + 1 for r in range(ranks)]


class _Run:
    def __init__(self, ranks, chunks, forwards, backwards):
        self.ranks, self.stages, self.time = ranks, ranks * chunks, 0
        self.lists = {"F": forwards, "B": backwards}
        self.next = [{"F": 0, "B": 0} for _ in range(ranks)]
        self.free = [0] * ranks  # when each rank is done with what it does
        self.done = {}  # (kind, stage, microbatch) -> when
        self.order = [[] for _ in range(ranks)]

    def is_over(self):
        return all(at["B"] == len(self.lists["B"]) for at in self.next)

    def advance(self, ahead):
        """Starts what can start now, and goes on to when something ends. False where nothing can ever start."""
        started = [self._start(r, ahead[r]) for r in range(self.ranks) if self.free[r] <= self.time]
        later = [t for t in (*self.free, *self.done.values()) if t > self.time]
        if later:
            self.time = min(later)
        return any(started) or bool(later)

    def _start(self, rank, ahead):
        at = self.next[rank]
        for kind, takes in (("B", 2), ("F", 1)):
            if at[kind] == len(self.lists[kind]) or (kind == "F" and at["F"] - at["B"] >= ahead):
                continue
            microbatch, chunk = self.lists[kind][at[kind]]
            stage = chunk * self.ranks + rank
            if self._is_ready(kind, stage, microbatch):
                self.done[kind, stage, microbatch] = self.free[rank] = self.time + takes
                self.order[rank].append((kind, chunk, microbatch))
                at[kind] += 1
                return True
        return False

    def _is_ready(self, kind, stage, microbatch):
        last = stage == self.stages - 1
        if kind == "F":
            needs = [] if stage == 0 else [("F", stage - 1, microbatch)]
        else:
            needs = [("F", stage, microbatch)] + ([] if last else [("B", stage + 1, microbatch)])
        return all(self.done.get(of, self.time + 1) <= self.time for of in needs)
