"""On the path of a run's ranks: AM_FAULT=<what>:<rank>:<step> makes that step go wrong; `what` is raise or nan."""

import importlib.machinery
import os
import sys

MODULE = "automodel_c.recipes.finetune_vlm"


class _Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name != MODULE:
            return None
        spec = super().find_spec(name, path, target)
        run = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (run(module), _break(module))
        return spec


def _break(module):
    what, rank, wanted = os.environ["AM_FAULT"].split(":")
    step = module._step

    def at(run, number, batches):
        if os.environ["RANK"] == rank and number == int(wanted):
            if what == "raise":
                raise ZeroDivisionError("made to fail")
            for batch in batches:
                batch["pixel_values"].fill_(float("nan"))
        return step(run, number, batches)

    module._step = at


if "AM_FAULT" in os.environ and "RANK" in os.environ:
    sys.meta_path.insert(0, _Finder)
