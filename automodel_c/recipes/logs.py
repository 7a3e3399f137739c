"""Where the numbers of a run go: metrics.jsonl and validation.jsonl, and TensorBoard and W&B where the recipe asks."""

import dataclasses
import importlib.util
from pathlib import Path

from .metrics import MetricsLog
from .runtime import UsageError


def check_loggers(recipe):
    """UsageError, before anything is built, where a package that the recipe's logs need is not installed."""
    wishes = {"logging.tensorboard": ("tensorboard", recipe.logging.tensorboard), "wandb": ("wandb", recipe.wandb)}
    for key, (package, wish) in wishes.items():
        if wish not in (None, False) and _is_absent(package):
            raise UsageError(f"{key} needs the package {package}, which is not installed: pip install {package}")


def _is_absent(package):
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:
        return True
    return spec is None or spec.origin is None  # just a folder of that name, such as W&B writes


class Logs:
    """The logs of a run in `folder`, on its main rank. first_step: the steps that are done; later rows are dropped."""

    def __init__(self, recipe, folder, first_step):
        folder = Path(folder)
        self._files = {
            "train": MetricsLog(folder / "metrics.jsonl", first_step),
            "held_out": MetricsLog(folder / "validation.jsonl", first_step),
        }
        self._sinks = []
        if recipe.logging.tensorboard:
            self._sinks.append(_TensorBoard(recipe, folder, first_step))
        if recipe.wandb is not None:
            self._sinks.append(_Wandb(recipe, folder))

    def train(self, row):
        """A step's row: numbers by name, `step` among them."""
        self._write("train", row)

    def held_out(self, row):
        """An evaluation's row."""
        self._write("held_out", row)

    def _write(self, kind, row):
        self._files[kind].append(row)
        numbers = {f"{kind}/{key}": value for key, value in row.items() if key != "step"}
        for sink in self._sinks:
            sink.write(numbers, row["step"])

    def close(self, *, failed=False):
        """Writes out what is held back; failed: how W&B is to show the run."""
        for sink in self._sinks:
            sink.close(failed)
        self._sinks = []


class _TensorBoard:
    def __init__(self, recipe, folder, first_step):
        from torch.utils.tensorboard import SummaryWriter

        where = recipe.logging.tensorboard
        self.writer = SummaryWriter(folder / "tensorboard" if where is True else where, purge_step=first_step + 1)

    def write(self, numbers, step):
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)

    def close(self, failed):
        self.writer.close()


class _Wandb:
    def __init__(self, recipe, folder):
        import wandb

        section = recipe.wandb
        folder.mkdir(parents=True, exist_ok=True)
        self.run = wandb.init(
            project=section.project or "automodel_c",
            entity=section.entity,
            name=section.name or folder.name,
            dir=section.dir or folder,
            mode=section.mode,
            id=section.id,
            resume="allow" if section.id else None,
            config=dataclasses.asdict(recipe),
        )

    def write(self, numbers, step):
        self.run.log(numbers, step=step)

    def close(self, failed):
        self.run.finish(exit_code=int(failed))
