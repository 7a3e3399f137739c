"""The command line: automodel-c train | doctor."""

import argparse
import os
import platform
import sys
from importlib import metadata

USAGE_ERROR = 2
_TRAIN_MODULES = ("torch", "transformers", "safetensors", "yaml", "tqdm", "PIL", "matplotlib", "sklearn", "tokenizers")
_PACKAGES = (
    "numpy",
    "torch",
    "transformers",
    "safetensors",
    "tokenizers",
    "pillow",
    "scikit-learn",
    "matplotlib",
)


def main(argv=None):
    """Runs the command line and returns the exit status; usage errors print one line and no traceback."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    overrides = [word for word in rest if not word.startswith("-")]  # argparse stops collecting them at an option
    if len(overrides) < len(rest) or (rest and not hasattr(arguments, "overrides")):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if overrides:
        arguments.overrides = [*arguments.overrides, *overrides]
    try:
        return arguments.run(arguments)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _TRAIN_MODULES:
            raise
        return _complain(f"{missing} is not installed: pip install 'automodel_c[train]'")


def _parser():
    parser = argparse.ArgumentParser(prog="automodel-c", description="Fine-tune Qwen3.5 vision-language models.")
    verbs = parser.add_subparsers(required=True, metavar="train | doctor")
    train = verbs.add_parser("train", help="train by a recipe", description="Trains by a recipe (YAML).")
    train.add_argument("recipe", help="a YAML file, such as examples/digits.yaml")
    train.add_argument("overrides", nargs="*", metavar="key=value", help="recipe keys to set: optimizer.lr=1e-3")
    train.add_argument("--nproc", type=_positive, help="start so many ranks on this machine with torchrun")
    train.add_argument("--check", action="store_true", help="read the recipe and build everything, but do not train")
    train.set_defaults(run=_train)
    doctor = verbs.add_parser("doctor", help="say what is installed")
    doctor.set_defaults(run=_doctor)
    return parser


def _positive(text):
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, found {number}")
    return number


def _train(arguments):
    from .recipes.config import RecipeError, load_recipe

    try:
        recipe = load_recipe(arguments.recipe, arguments.overrides)
    except (RecipeError, NotImplementedError) as error:
        return _complain(error)
    if arguments.nproc is not None and "RANK" not in os.environ:
        return _start_ranks(arguments)
    return _train_here(recipe, arguments.check)


def _train_here(recipe, check):
    from .recipes.finetune_vlm import UsageError, train

    try:
        train(recipe, check=check)
    except UsageError as error:
        return _complain(error)
    return 0


def _complain(error):
    if os.environ.get("RANK", "0") == "0":
        print(f"automodel-c: error: {error}", file=sys.stderr)
    return USAGE_ERROR


def _start_ranks(arguments):
    """Runs the same command under torchrun's launcher; returns the exit status of the rank that failed first, or 0."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // arguments.nproc)))
    command = ["-m", "automodel_c", "train", arguments.recipe, *arguments.overrides]
    if arguments.check:
        command.append("--check")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=arguments.nproc,
        max_restarts=0,
        start_method="spawn",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id=str(os.getpid()),
    )
    try:
        elastic_launch(config, sys.executable)(*command)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode != USAGE_ERROR:
            print(f"automodel-c: rank {rank} failed first, with exit status {failure.exitcode}", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 1
    except SignalException as error:
        print(f"automodel-c: ended by {error.sigval.name}", file=sys.stderr)
        return 128 + error.sigval
    return 0


def _doctor(_):
    print(f"python {platform.python_version()} on {platform.machine()}, {os.cpu_count()} cores")
    for package in _PACKAGES:
        try:
            print(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            print(f"{package} missing")
    return 0
