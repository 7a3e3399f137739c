"""On the path of a run's ranks: AM_FAULT=<what>:<rank>:<step> makes that step go wrong; `what` is raise or nan.
AM_WATCH=<file> has every rank write, after each step, a line of numbers to <file>.<rank>."""

import ctypes
import gc
import importlib.machinery
import json
import os
import sys
from pathlib import Path

MODULE = "automodel_c.recipes.finetune_vlm"


class _Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name != MODULE:
            return None
        spec = super().find_spec(name, path, target)
        run = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (run(module), _change(module))
        return spec


def _change(module):
    if "AM_FAULT" in os.environ:
        _break(module)
    if "AM_WATCH" in os.environ:
        _watch(module)


def _break(module):
    what, rank, wanted = os.environ["AM_FAULT"].split(":")
    step = module._step

    def at(run, number, batches, *rest):
        if os.environ["RANK"] == rank and number == int(wanted):
            if what == "raise":
                raise ZeroDivisionError("made to fail")
            pixels = [batch["pixel_values"] for batch in batches if "pixel_values" in batch]  # not in packs of text
            for of in pixels:
                of.fill_(float("nan"))
            assert pixels, "no pixels in this step"
        return step(run, number, batches, *rest)

    module._step = at


def _watch(module):
    """Descriptors, threads, packs seen, plans and attention plans made; between two checkpoints memory too:
    resident KiB once malloc has given back what it can, and the KiB that malloc has given out."""
    from automodel_c.parallel import context, plan

    step, made = module._step, {"packs": 0, "plans": 0, "attention": 0}
    file = open(f"{os.environ['AM_WATCH']}.{os.environ['RANK']}", "w", buffering=1)

    def counted(owner, name, key):
        of = getattr(owner, name)

        def count(*args, **options):
            made[key] += 1
            return of(*args, **options)

        setattr(owner, name, count)

    libc = ctypes.CDLL(None)

    class Mallinfo(ctypes.Structure):
        _fields_ = [(name, ctypes.c_size_t) for name in "arena a b c mapped d e in_use f g".split()]

    libc.mallinfo2.restype = Mallinfo

    def given_out():
        info = libc.mallinfo2()
        return info.in_use + info.mapped

    counted(context, "ContextPlan", "plans")
    counted(plan, "AttentionPlan", "attention")

    def at(run, number, batches, *rest):
        found = step(run, number, batches, *rest)
        if isinstance(found, int):  # a signal, and no step was taken
            return found
        made["packs"] += len(batches)
        row = {"step": number, "loss": found.loss}
        if number % 20 == 10:
            gc.collect()
            libc.malloc_trim(0)
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            row |= {"kib": pages * os.sysconf("SC_PAGE_SIZE") / 1024, "malloc_kib": given_out() / 1024}
            row |= {"blocks": sys.getallocatedblocks()}
        row |= {"files": len(os.listdir("/proc/self/fd")), "threads": len(os.listdir("/proc/self/task")), **made}
        file.write(json.dumps(row) + "\n")
        return found

    module._step = at


if "RANK" in os.environ and {"AM_FAULT", "AM_WATCH"} & set(os.environ):
    sys.meta_path.insert(0, _Finder)
