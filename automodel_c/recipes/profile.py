"""Where a step's time goes, operator by operator: `automodel-c train --profile`.

torch's profiler sees every operator of the extension and of torch; entries of the extension that are no torch operators
(the optimizer, rows between ranks) get a range each while it runs. Off, a step has a handful of empty `span`s more.
"""

import contextlib
import functools
import json
from dataclasses import asdict, dataclass, field

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, record_function

from automodel_c import _amcore

WARM_UP = 1  # steps before the first that is looked at
_SPAN, _OURS, _ENTRY = "step: ", "automodel_c::", "_amcore::"
_ENDINGS = ("_backward", "_forward", "_residual", "_joined", "_")
_running = None  # the Profile that looks at this process's steps just now
_NOTHING = contextlib.nullcontext()


def span(name):
    """A part of a step: "data", "forward", "backward", "clip" or "optimizer"."""
    return record_function(_SPAN + name) if _running is not None else _NOTHING


@dataclass
class Row:
    """An operator in one part of a step: calls and seconds over all profiled steps; share of their time."""

    operator: str
    part: str
    calls: int = 0
    seconds: float = 0.0
    share: float = 0.0


@dataclass
class Table:
    """What a Profile found on one rank. seconds: of all its steps. clock: "wall" or "gpu", what rows are measured by:
    of either they add up to `seconds`, a GPU's with "idle", when it had no kernel, and more where its streams
    overlap."""

    first_step: int
    steps: int
    seconds: float
    clock: str
    world: int
    rows: list = field(default_factory=list)

    def lines(self, most=30):
        """The table for people, the costliest rows first."""
        last = self.first_step + self.steps - 1
        yield (
            f"profile of steps {self.first_step} to {last} on rank 0 of {self.world}:"
            f" {1e3 * self.seconds / self.steps:,.1f} ms a step; {self.clock} time"
        )
        yield f"{'operator':<28} {'part':<11} {'calls':>7} {'total ms':>10} {'mean ms':>9} {'share':>7}"
        for row in self.rows[:most]:
            mean = 1e3 * row.seconds / row.calls if row.calls else float("nan")
            calls, mean = (f"{row.calls:,}", f"{mean:,.3f}") if row.calls else ("", "")
            total = f"{1e3 * row.seconds:,.1f}"
            yield f"{row.operator:<28} {row.part:<11} {calls:>7} {total:>10} {mean:>9} {100 * row.share:>5.1f} %"
        left = self.rows[most:]
        if left:
            total, share = sum(row.seconds for row in left), sum(row.share for row in left)
            yield f"{f'{len(left)} more':<47} {1e3 * total:>11,.1f} {'':>9} {100 * share:>5.1f} %"

    def write(self, folder):
        """profile.json and profile.png in `folder`."""
        rows = [{**asdict(row), "mean_seconds": row.seconds / row.calls if row.calls else None} for row in self.rows]
        text = json.dumps({**asdict(self), "rows": rows}, indent=1)
        (folder / "profile.json").write_text(text + "\n", encoding="utf-8")
        from .plots import draw_profile

        draw_profile(self, folder / "profile.png")


class Profile:
    """Looks at `steps` steps of a run on this rank, after WARM_UP or as few as the run has.

    Around every step: ``with profile.step(number):``; `table` is there when enough were seen, or after `finish`.
    """

    def __init__(self, steps, *, left, device, world):
        self.wanted, self.device, self.world = min(steps, left), device, world
        self.skip = min(WARM_UP, left - self.wanted)
        self.first, self.seen, self.table = None, 0, None
        self._profiler, self._undo = None, None

    @contextlib.contextmanager
    def step(self, number):
        if self.skip > 0 or self.table is not None:
            self.skip -= 1
            yield
            return
        if self._profiler is None:
            self.first = number
            self._start()
        with record_function(_SPAN + "rest"):
            yield
        self.seen += 1
        if self.seen == self.wanted:
            self.finish()

    def _start(self):
        global _running
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (self.device.type == "cuda")
        self._undo = contextlib.ExitStack()
        self._undo.enter_context(_ranges(nvtx=self.device.type == "cuda"))
        self._profiler = torch.profiler.profile(activities=activities)
        self._profiler.start()
        _running = self

    def finish(self):
        """Ends it, however many steps it has seen. Returns the Table, None of no step."""
        global _running
        if self._profiler is not None:
            _running = None
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self._profiler.stop()
            self._undo.close()
            if self.seen:
                clock = "gpu" if self.device.type == "cuda" else "wall"
                seconds, rows = _rows_of(self._profiler.events(), clock)
                self.table = Table(self.first, self.seen, seconds, clock, self.world, rows)
            self._profiler = None
        return self.table


@contextlib.contextmanager
def _ranges(*, nvtx):
    """Every entry of the extension in a range of its own, for NVIDIA's tools too where it runs on a GPU."""
    entries = {name: entry for name, entry in vars(_amcore).items() if type(entry).__name__.startswith("builtin")}
    for name, entry in entries.items():
        setattr(_amcore, name, _ranged(name, entry, nvtx))
    try:
        yield
    finally:
        for name, entry in entries.items():
            setattr(_amcore, name, entry)


def _ranged(name, entry, nvtx):
    @functools.wraps(entry)
    def call(*args, **options):
        with record_function(_ENTRY + name), torch.cuda.nvtx.range(name) if nvtx else _NOTHING:
            return entry(*args, **options)

    return call


def _rows_of(events, clock):
    """(seconds of all steps, rows): the tree of events of this thread, each microsecond in one row."""
    rows, steps = {}, 0.0
    for event in events:
        if event.device_type != DeviceType.CPU or event.cpu_parent is not None:
            continue
        if event.name.startswith(_SPAN):
            steps += event.time_range.elapsed_us()
            _add(rows, event, "rest", clock)
        elif event.name.startswith("autograd::"):  # on a GPU backward has a thread of its own
            if clock == "gpu":
                _add(rows, event, "backward", clock)
    if clock == "gpu":
        found = sum(row.seconds for row in rows.values())
        kernels = [e.time_range for e in events if e.device_type == DeviceType.CUDA and not _is_range(e)]
        total = sum(kernel.elapsed_us() for kernel in kernels) / 1e6
        _row(rows, "in no operator", "rest").seconds += max(0.0, total - found)
        _row(rows, "idle", "rest").seconds += max(0.0, steps - _covered(kernels)) / 1e6
    for row in rows.values():
        row.share = row.seconds / (steps / 1e6) if steps else 0.0
    found = sorted((row for row in rows.values() if row.seconds > 0), key=lambda row: -row.seconds)
    return steps / 1e6, found


def _add(rows, event, part, clock, node=""):
    """Counts an event in its row, or those in it. node: autograd's that it is in."""
    name = event.name
    if name.startswith(_SPAN):
        part, group = name.removeprefix(_SPAN), "Python"
    elif name.startswith(_OURS):
        operator = name.removeprefix(_OURS)
        own = operator.endswith("_backward") or f"automodel_c_{operator}_" in node  # a rotation's is a rotation
        part = "recomputed" if part == "backward" and not own else part
        return _count(rows, _plain(operator), part, _time(event, clock))
    elif name.startswith(_ENTRY):
        return _count(rows, _plain(name.removeprefix(_ENTRY)), part, _time(event, clock))
    elif name.startswith(("aten::", "c10d::", "fsdp::")):
        return _count(rows, name, part, _time(event, clock))
    else:
        group = "FSDP2" if name.startswith("FSDP") else "autograd" if part == "backward" else "Python"
        node = name if name.endswith(("Backward", "Backward0")) else node
    children = event.cpu_children
    for child in children:
        _add(rows, child, part, clock, node)
    own = _time(event, clock) - sum(_time(child, clock) for child in children)
    _row(rows, group, part).seconds += max(0.0, own)
    return None


def _is_range(event):
    """Whether a GPU's event is the shadow of a range of ours, no kernel and no copy."""
    return event.is_user_annotation or event.name.startswith((_SPAN, _ENTRY))


def _covered(times):
    """Microseconds in which at least one of these runs."""
    covered, end = 0.0, float("-inf")
    for time in sorted(times, key=lambda time: time.start):
        covered += max(0.0, time.end - max(time.start, end))
        end = max(end, time.end)
    return covered


def _time(event, clock):
    return (event.device_time_total if clock == "gpu" else event.time_range.elapsed_us()) / 1e6


def _count(rows, operator, part, seconds):
    row = _row(rows, operator, part)
    row.calls += 1
    row.seconds += seconds


def _row(rows, operator, part):
    return rows.setdefault((operator, part), Row(operator, part))


def _plain(operator):
    """The public name: rms_norm of rms_norm_residual and of rms_norm_backward."""
    for ending in _ENDINGS:
        operator = operator.removesuffix(ending)
    return operator
