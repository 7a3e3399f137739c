"""What was swapped and what was left, and the way back."""

import functools
import types
from typing import NamedTuple


class Swap(NamedTuple):
    """An operation of a module that runs in this package."""

    path: str
    what: str
    by: str


class Left(NamedTuple):
    """An operation of a module that stays transformers'."""

    path: str
    what: str
    why: str


class Report:
    """The result of `patch_transformers`; `str()` is a table.

    Attributes:
        swapped: list of (module path, what, by what).
        left: list of (module path, what, why).
        cp: the ContextParallel whose ranks share a batch, or None.
    """

    def __init__(self, root, cp=None):
        self.swapped, self.left, self.cp = [], [], cp
        self.root, self._modules = root, []
        root._amcore_report = self

    def swap(self, path, what, by):
        self.swapped.append(Swap(path, what, by))

    def leave(self, path, what, why):
        self.left.append(Left(path, what, why))

    def bind(self, module, function):
        """Makes `function(module, ...)` the forward of this one instance, with the signature of its class's."""

        @functools.wraps(type(module).forward)
        def forward(self, *args, **kwargs):
            return function(self, *args, **kwargs)

        module.forward = types.MethodType(forward, module)
        module._amcore_report = self
        self._modules.append(module)

    def undo(self):
        """Gives every module the forward of its class again; the second call does nothing."""
        for module in self._modules:
            del module.forward
        for module in {*self._modules, self.root}:
            vars(module).pop("_amcore_report", None)
        self._modules.clear()

    @property
    def active(self):
        """Whether the patch is in place."""
        return bool(self._modules)

    def __str__(self):
        rows = [(path or "(model)", what, by) for path, what, by in self.swapped]
        rows += [(path or "(model)", what, f"left: {why}") for path, what, why in self.left]
        rows = [("module", "what", "by what"), *_merged(rows)]
        widths = [max(len(row[i]) for row in rows) for i in range(2)]
        return "\n".join(f"{path:{widths[0]}}  {what:{widths[1]}}  {by}" for path, what, by in rows)

    def __repr__(self):
        return f"Report({len(self.swapped)} swapped, {len(self.left)} left{'' if self.active else ', undone'})"


def _merged(rows):
    """Rows that differ in a layer's number alone as one, with `*` for the number and a count."""
    counts = {}
    for path, what, by in rows:
        name = ".".join("*" if part.isdigit() else part for part in path.split("."))
        counts[name, what, by] = counts.get((name, what, by), 0) + 1
    return [(f"{path} ({n})" if n > 1 else path, what, by) for (path, what, by), n in counts.items()]
