"""The command line: automodel-c train | export | verify | plan | bench | doctor."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from . import __version__
from .diagnosis import doctor, report
from .keys import check_known
from .sums import SUMS, differences, read_sums

USAGE_ERROR = 2
_TRAIN_MODULES = ("torch", "transformers", "safetensors", "yaml", "tqdm", "PIL", "matplotlib", "sklearn", "tokenizers")


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
    parser.add_argument("--version", action="version", version=f"automodel-c {__version__}")
    verbs = parser.add_subparsers(required=True, metavar="train | export | verify | plan | bench | doctor")
    train = verbs.add_parser("train", help="train by a recipe", description="Trains by a recipe (YAML).")
    train.add_argument("recipe", help="a YAML file, such as examples/digits_cp2.yaml")
    train.add_argument("overrides", nargs="*", metavar="key=value", help="recipe keys to set: optimizer.lr=1e-3")
    train.add_argument("--nproc", type=_positive, metavar="N", help="start so many ranks on this machine with torchrun")
    train.add_argument("--check", action="store_true", help="read the recipe and build everything, but do not train")
    train.add_argument("--world", type=_positive, metavar="N", help="with --check: as one of N ranks, on none of them")
    train.set_defaults(run=_train)
    export = verbs.add_parser("export", help="write a checkpoint's model for Hugging Face", description=_EXPORT)
    export.add_argument("recipe", help="the YAML file that the run was started with")
    export.add_argument("checkpoint", metavar="step_folder", help="such as runs/digits/checkpoints/step_200, or LATEST")
    export.add_argument("folder", help="the directory to write: safetensors, config.json, the processor's files")
    export.add_argument("overrides", nargs="*", metavar="key=value", help="recipe keys to set, as the run had them")
    export.set_defaults(run=_export)
    verify = verbs.add_parser("verify", help="check the files of checkpoints and exports", description=_VERIFY)
    verify.add_argument("folders", nargs="+", metavar="folder", help="such as runs/digits/checkpoints/step_200")
    verify.set_defaults(run=_verify)
    _add_plan(verbs.add_parser("plan", help="say what a run would take, or how a pack is spread", description=_PLAN))
    bench = verbs.add_parser("bench", help="time operators beside their peers", description=_BENCH)
    bench.add_argument("names", nargs="*", metavar="name", help="such as attention or step; none: list them")
    bench.set_defaults(run=_bench)
    doctor = verbs.add_parser("doctor", help="say what is installed")
    doctor.set_defaults(run=_doctor)
    return parser


_EXPORT = "Writes the model of a training checkpoint as a directory that transformers and models.qwen3_5.load read."
_VERIFY = "Compares the files of step folders and exported directories with the sums that they were written with."
_BENCH = "Runs benchmarks of a source checkout: each checks every contestant, then times them interleaved."
_PLAN = """Predicts memory and time of a recipe on so many GPUs, part by part, and ranks the meshes that fit; or, with
--explain, plans the attention of one pack over ranks: who computes what, what travels, and why."""


def _add_plan(plan):
    plan.add_argument("recipe", nargs="?", help="a YAML file, with --gpus: what a run of it would take")
    plan.add_argument("overrides", nargs="*", metavar="key=value", help="recipe keys to set: distributed.cp_size=16")
    plan.add_argument("--gpus", type=_positive, metavar="N", help="so many ranks, one a GPU")
    plan.add_argument("--memory", type=float, metavar="GB", help="of a GPU, that a run must fit (80)")
    plan.add_argument("--media", type=float, default=0.25, metavar="SHARE", help="of tokens that are images' (0.25)")
    plan.add_argument("--machine", metavar="FILE", help="constants of bench_machine (the package's, of an H200)")
    plan.add_argument("--explain", action="store_true", help="print the plan of a pack's attention, rank by rank")
    plan.add_argument("--lengths", type=_lengths, metavar="N,NxM,...", help="documents of a pack: 131072,4096x8")
    plan.add_argument("--ranks", type=_positive, metavar="R", help="with --explain: ranks that share the pack")
    plan.add_argument("--heads", type=_heads, default=(32, 2), metavar="Q/KV", help="query and key heads (32/2)")
    plan.add_argument("--dim", type=_positive, default=256, metavar="D", help="of a head (256)")
    plan.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    plan.add_argument("--layout", choices=("contiguous", "round_robin"), default="contiguous")
    plan.add_argument("--scheme", choices=("auto", "home", "balanced", "heads"), default="auto")
    plan.add_argument("--full", action="store_true", help="attention that is not causal")
    plan.set_defaults(run=_plan)


def _lengths(text):
    lengths = []
    for part in text.split(","):
        length, times, count = part.partition("x")
        if not length.isdecimal() or (times and not count.isdecimal()):
            raise argparse.ArgumentTypeError(f"expected lengths such as 131072,4096x8, found {text}")
        lengths += [int(length)] * (int(count) if times else 1)
    return lengths


def _heads(text):
    query, _, key = text.partition("/")
    if not query.isdecimal() or not key.isdecimal() or not int(key) or not int(query) or int(query) % int(key):
        raise argparse.ArgumentTypeError(f"expected query heads / key heads, such as 32/2, found {text}")
    return int(query), int(key)


def _plan(arguments):
    if arguments.recipe is not None and not arguments.explain:
        return _predict(arguments)
    if not (arguments.explain and arguments.lengths and arguments.ranks) or arguments.recipe or arguments.gpus:
        return _complain("plan: give a recipe with --gpus N, or --explain with --lengths and --ranks")
    return _plan_attention(arguments)


def _predict(arguments):
    from .recipes.config import RecipeError, load_recipe
    from .recipes.planner import Machine, explain
    from .recipes.runtime import UsageError, mesh_shape

    if arguments.gpus is None:
        return _complain("plan: --gpus says on how many GPUs the recipe would run")
    try:
        recipe = load_recipe(arguments.recipe, arguments.overrides)
        mesh_shape(recipe.distributed, arguments.gpus)
        limit = arguments.memory and arguments.memory * 1e9
        machine = Machine.load(arguments.machine)
        lines = explain(
            recipe, arguments.gpus, machine, limit=limit, lengths=arguments.lengths, media=arguments.media
        )  # fmt: skip
        print("\n".join(lines))
    except (RecipeError, NotImplementedError, UsageError, ValueError, OSError) as error:
        return _complain(error)
    return 0


def _plan_attention(arguments):
    import itertools

    import torch

    from .parallel.plan import ContextPlan, make_pack

    pack, tokens = make_pack([0, *itertools.accumulate(arguments.lengths)], None, None)
    plan = ContextPlan(pack, tokens, ranks=arguments.ranks, layout=arguments.layout, scheme=arguments.scheme)
    dtype = getattr(torch, arguments.dtype)
    print(plan.explain(*arguments.heads, arguments.dim, dtype, causal=not arguments.full))
    return 0


def _positive(text):
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number, at least 1, found {text}")
    return int(text)


def _train(arguments):
    from .recipes.config import RecipeError, load_recipe

    try:
        recipe = load_recipe(arguments.recipe, arguments.overrides)
    except (RecipeError, NotImplementedError) as error:
        return _complain(error)
    if arguments.world is not None:
        return _dry_run(recipe, arguments)
    if arguments.nproc is not None and "RANK" not in os.environ:
        from .recipes.runtime import UsageError, mesh_shape

        try:  # here, for of ranks that all refuse the first to end would silence the one that speaks
            mesh_shape(recipe.distributed, arguments.nproc)
        except UsageError as error:
            return _complain(error)
        return _start_ranks(arguments)
    return _train_here(recipe, arguments.check)


def _dry_run(recipe, arguments):
    from .recipes.dry_run import dry_run
    from .recipes.finetune_vlm import UsageError, raised_here

    if not arguments.check or arguments.nproc is not None:
        return _complain("--world goes with --check, and not with --nproc: it starts no ranks")
    try:
        print("\n".join(dry_run(recipe, arguments.world).describe()))
    except UsageError as error:
        return _complain(error)
    except (ValueError, NotImplementedError) as error:
        if raised_here(error):
            return _complain(error)
        raise
    return 0


def _train_here(recipe, check):
    from .recipes.finetune_vlm import UsageError, train
    from .recipes.stopping import EXIT_STATUS, Stopped

    try:
        train(recipe, check=check)
    except UsageError as error:
        return _complain(error)
    except Stopped:
        return EXIT_STATUS
    return 0


def _export(arguments):
    from .recipes.config import RecipeError, load_recipe

    overrides = [*arguments.overrides, f"checkpoint.restore_from={arguments.checkpoint}"]
    try:
        recipe = load_recipe(arguments.recipe, overrides)
        from .recipes.export import export

        export(recipe, arguments.folder)
    except (RecipeError, NotImplementedError, ValueError) as error:
        return _complain(error)
    print(f"wrote {arguments.folder}")
    return 0


def _verify(arguments):
    sound = True
    for folder in arguments.folders:
        found = differences(folder)
        if found is None:
            found = [f"it has no {SUMS}"]
        for words in found:
            print(f"{folder}: {words}", file=sys.stderr)
        if not found:
            print(f"{folder}: {len(read_sums(folder))} files are sound")
        sound = sound and not found
    return 0 if sound else 1


def _bench(arguments):
    root = Path(__file__).parents[1]
    files = {p.stem.removeprefix("bench_"): p for p in sorted((root / "benchmarks").glob("*/bench_*.py"))}
    if not files:
        return _complain("the benchmarks come with the source: run this in a checkout installed with pip install -e")
    try:
        for name in arguments.names:
            check_known(name, files)
    except ValueError as error:
        return _complain(error)
    if not arguments.names:
        print("\n".join(files))
    for name in arguments.names:
        module = ".".join(files[name].relative_to(root).with_suffix("").parts)
        done = subprocess.run([sys.executable, "-m", module], cwd=root, check=False)
        if done.returncode:
            return done.returncode
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
    for line in report(doctor()):
        print(line)
    return 0
