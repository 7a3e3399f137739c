"""The command line: automodel-c train | plan | doctor | bench | export | verify."""

import argparse
import difflib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from . import __version__
from .diagnosis import doctor, report
from .keys import check_known
from .sums import SUMS, differences, read_sums

USAGE_ERROR = 2
PROFILED_STEPS = 5
_TRAIN_MODULES = ("torch", "transformers", "safetensors", "yaml", "tqdm", "PIL", "matplotlib", "sklearn", "tokenizers")

_MAIN = """\
Fine-tune Qwen3.5 vision-language models.

  automodel-c doctor                                       what is here, and what is missing
  automodel-c train examples/digits_cp2.yaml --nproc 2     train by a recipe, on two ranks
  automodel-c train --help                                 more of each command
"""
_TRAIN = "Trains by a recipe: YAML with NeMo Automodel's keys, of which the command line may set any."
_TRAIN_EXAMPLES = """\
examples:
  automodel-c train examples/digits_cp2.yaml --nproc 2
  automodel-c train my.yaml optimizer.lr=1e-5 step_scheduler.max_steps=100 output_dir=runs/try
  automodel-c train my.yaml --nproc 2 checkpoint.restore_from=LATEST       go on from the newest checkpoint
  automodel-c train my.yaml --check                                        build everything, take no step
  automodel-c train my.yaml --check --world 128                            what a run of 128 ranks would hold
  automodel-c train my.yaml --profile                                      where the time of a step goes
  automodel-c train --keys optimizer                                       the keys of a section, and their defaults
  torchrun --nnodes 2 --nproc-per-node 8 --rdzv-endpoint host:29500 -m automodel_c train my.yaml

A value is YAML: key=null, key=[0.9, 0.95], key='{a: 1}'. A run writes metrics.jsonl, validation.jsonl, curves.png,
checkpoints/ and hf/ (for transformers) into output_dir, which is runs/<name of the recipe> unless the recipe says.
Ctrl-C, or SIGTERM, finishes the step, saves a checkpoint and leaves with status 130 (143); again leaves at once.
"""
_EXPORT = "Writes the model of a training checkpoint as a directory that transformers and models.qwen3_5.load read."
_EXPORT_EXAMPLES = """\
examples:
  automodel-c export examples/digits_cp2.yaml LATEST runs/digits_hf
  automodel-c export my.yaml LOWEST_VAL out                                the checkpoint that did best on held-out data
  automodel-c export my.yaml runs/my/checkpoints/step_200 out
  automodel-c export my.yaml LATEST out output_dir=runs/try                of a run with that override
"""
_BENCH = "Runs benchmarks of a source checkout: each checks every contestant, then times them interleaved."
_BENCH_EXAMPLES = """\
examples:
  automodel-c bench                      their names
  automodel-c bench attention step       these, one after another
"""
_VERIFY = "Compares the files of step folders and exported directories with the sums that they were written with."
_VERIFY_EXAMPLES = """\
examples:
  automodel-c verify runs/digits_cp2/checkpoints/step_200
  automodel-c verify runs/*/checkpoints/step_* runs/digits_cp2/hf
"""
_PLAN = """\
Predicts memory and time of a recipe on so many GPUs, part by part, and ranks the meshes that fit; or, with --explain,
plans the attention of one pack over ranks: who computes what, what travels, and why.
"""
_PLAN_EXAMPLES = """\
examples:
  automodel-c plan examples/qwen3_5_122b_128k.yaml --gpus 128
  automodel-c plan my.yaml --gpus 16 --memory 141 distributed.cp_size=8
  automodel-c plan --explain --lengths 131072,4096x8 --ranks 8 --heads 32/2 --dim 256
  automodel-c plan --explain --lengths 4096x32 --ranks 32 --scheme home    where every row stays at home
A length NxM is M documents of N tokens. --scheme auto takes what measured prices call cheapest.
"""
_DOCTOR = "Says what is installed, what this machine has, and the command that mends what is missing. Needs no torch."
_DOCTOR_EXAMPLES = """\
examples:
  automodel-c doctor
  automodel-c doctor --json > doctor.json      the dict of automodel_c.doctor(), for a report
"""


class _Parser(argparse.ArgumentParser):
    """argparse's, which also says what a misspelt command or option may have meant."""

    def error(self, message):
        verbs = {verb for action in self._actions for verb in action.choices or () if isinstance(action.choices, dict)}
        wrong = re.search(r"invalid choice: '(.*?)'", message) if verbs else None
        if wrong:
            message = f"unknown command {wrong[1]}{_near(wrong[1], verbs)}"
        super().error(message)


def _near(word, known):
    found = difflib.get_close_matches(word, sorted(known), n=1, cutoff=0.5)
    return f"; did you mean {found[0]}?" if found else f"; there are {', '.join(sorted(known))}"


def main(argv=None):
    """Runs the command line and returns the exit status; usage errors print one line and no traceback."""
    parser, verbs = _parser()
    arguments, rest = parser.parse_known_args(argv)
    overrides = [word for word in rest if not word.startswith("-")]  # argparse stops collecting them at an option
    if len(overrides) < len(rest) or (rest and not hasattr(arguments, "overrides")):
        wrong = next((word for word in rest if word.startswith("-")), rest[0])
        verb = verbs[arguments.verb]
        hint = _near(wrong, verb._option_string_actions) if wrong.startswith("-") else ""
        if "=" in wrong and hasattr(arguments, "overrides"):
            hint = f"; recipe keys have no dashes before them: {wrong.lstrip('-')}"
        verb.error(f"unknown argument {wrong}{hint}")
    if overrides:
        arguments.overrides = [*arguments.overrides, *overrides]
    try:
        return arguments.run(arguments)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _TRAIN_MODULES:
            raise
        return _complain(f"{missing} is not installed: pip install 'automodel_c[train]'")
    except KeyboardInterrupt:
        return _complain("interrupted", 128 + signal.SIGINT)
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0


def _parser():
    """The parser, and those of the commands by name."""
    raw = {"formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = _Parser(prog="automodel-c", description=_MAIN, allow_abbrev=False, **raw)
    parser.add_argument("--version", action="version", version=f"automodel-c {__version__}")
    verbs = parser.add_subparsers(
        required=True, dest="verb", metavar="train | plan | doctor | bench | export | verify", parser_class=_Parser
    )

    def verb(name, help, description, examples, run):
        found = verbs.add_parser(
            name, help=help, description=description, epilog=examples, allow_abbrev=False, **raw
        )  # fmt: skip
        found.set_defaults(run=run)
        return found

    _add_train(verb("train", "train by a recipe", _TRAIN, _TRAIN_EXAMPLES, _train))
    _add_plan(verb("plan", "say what a run would take, or how a pack is spread", _PLAN, _PLAN_EXAMPLES, _plan))
    doctor = verb("doctor", "say what is installed and what is missing", _DOCTOR, _DOCTOR_EXAMPLES, _doctor)
    doctor.add_argument("--json", action="store_true", help="print automodel_c.doctor() as JSON")
    bench = verb("bench", "time operators beside their peers", _BENCH, _BENCH_EXAMPLES, _bench)
    bench.add_argument("names", nargs="*", metavar="name", help="such as attention or step; none: list them")
    export = verb("export", "write a checkpoint's model for Hugging Face", _EXPORT, _EXPORT_EXAMPLES, _export)
    export.add_argument("recipe", help="the YAML file that the run was started with")
    export.add_argument("checkpoint", metavar="step_folder", help="such as runs/digits/checkpoints/step_200, or LATEST")
    export.add_argument("folder", help="the directory to write: safetensors, config.json, the processor's files")
    export.add_argument("overrides", nargs="*", metavar="key=value", help="recipe keys to set, as the run had them")
    verify = verb("verify", "check the files of checkpoints and exports", _VERIFY, _VERIFY_EXAMPLES, _verify)
    verify.add_argument("folders", nargs="+", metavar="folder", help="such as runs/digits/checkpoints/step_200")
    return parser, verbs.choices


def _add_train(train):
    train.add_argument("recipe", help="a YAML file, such as examples/digits_cp2.yaml")
    train.add_argument("overrides", nargs="*", metavar="key=value", help="recipe keys to set: optimizer.lr=1e-3")
    train.add_argument("--nproc", type=_positive, metavar="N", help="start so many ranks on this machine")
    train.add_argument("--check", action="store_true", help="read the recipe and build everything, but do not train")
    train.add_argument("--world", type=_positive, metavar="N", help="with --check: as one of N ranks, on none of them")
    train.add_argument(
        "--profile",
        action="store_true",
        help=f"take times of --profile-steps steps, operator by operator: a table, profile.json and profile.png;"
        f" {PROFILED_STEPS} after the first step unless told",
    )
    train.add_argument("--profile-steps", type=_positive, metavar="N", help="how many; --profile is meant")
    train.add_argument("--keys", action=_Keys, nargs="?", help="list recipe keys, all or of a section, and exit")


class _Keys(argparse.Action):
    """--keys [SECTION]: needs no recipe, as --help does not."""

    def __init__(self, *args, **options):
        super().__init__(*args, metavar="SECTION", default=argparse.SUPPRESS, **options)

    def __call__(self, parser, namespace, values, option_string=None):
        from .recipes.keys import describe_keys

        try:
            print("\n".join(describe_keys(values or "")))
        except ValueError as error:
            parser.error(str(error))
        parser.exit()


def _add_plan(plan):
    plan.add_argument("recipe", nargs="?", help="a YAML file, with --gpus: what a run of it would take")
    plan.add_argument("overrides", nargs="*", metavar="key=value", help="recipe keys to set: distributed.cp_size=16")
    plan.add_argument("--gpus", type=_positive, metavar="N", help="so many ranks, one a GPU")
    plan.add_argument("--memory", type=float, metavar="GB", help="of a GPU, that a run must fit (80)")
    plan.add_argument("--media", type=float, default=0.25, metavar="SHARE", help="of tokens that are images' (0.25)")
    plan.add_argument("--machine", metavar="FILE", help="of automodel-c bench machine (the package's, of an H200)")
    plan.add_argument("--explain", action="store_true", help="print the plan of a pack's attention, rank by rank")
    plan.add_argument("--lengths", type=_lengths, metavar="N,NxM,...", help="documents of a pack: 131072,4096x8")
    plan.add_argument("--ranks", type=_positive, metavar="R", help="with --explain: ranks that share the pack")
    plan.add_argument("--heads", type=_heads, default=(32, 2), metavar="Q/KV", help="query and key heads (32/2)")
    plan.add_argument("--dim", type=_positive, default=256, metavar="D", help="of a head (256)")
    plan.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    plan.add_argument("--layout", choices=("contiguous", "round_robin"), default="contiguous")
    plan.add_argument("--scheme", choices=("auto", "home", "balanced", "heads"), default="auto")
    plan.add_argument("--full", action="store_true", help="attention that is not causal")


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
    profile = (arguments.profile_steps or PROFILED_STEPS) if arguments.profile or arguments.profile_steps else None
    if arguments.nproc is not None and "RANK" not in os.environ:
        from .recipes.logs import check_loggers
        from .recipes.runtime import UsageError, mesh_shape

        try:  # here, for of ranks that all refuse the first to end would silence the one that speaks
            mesh_shape(recipe.distributed, arguments.nproc)
            check_loggers(recipe)
        except UsageError as error:
            return _complain(error)
        return _start_ranks(arguments, profile)
    return _train_here(recipe, arguments.check, profile)


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


def _train_here(recipe, check, profile):
    from .parallel.faults import RankFailure
    from .recipes.finetune_vlm import UsageError, train
    from .recipes.interrupt import Interrupted

    try:
        train(recipe, check=check, profile=profile)
    except RankFailure as error:
        if error.message.startswith("KeyboardInterrupt"):  # the other rank was quicker to leave at once
            raise KeyboardInterrupt from None
        raise
    except UsageError as error:
        return _complain(error)
    except Interrupted as error:
        return _complain(error, error.status)
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


def _complain(error, status=USAGE_ERROR):
    if os.environ.get("RANK", "0") == "0":
        print(f"automodel-c: {'error: ' if status == USAGE_ERROR else ''}{error}", file=sys.stderr)
    return status


def _start_ranks(arguments, profile):
    """Runs the same command on --nproc ranks; returns the exit status of the rank that failed first, or 0."""
    from .recipes.interrupt import SIGNALS
    from .recipes.launch import run_ranks

    command = ["-m", "automodel_c", "train", arguments.recipe, *arguments.overrides]
    if arguments.check:
        command.append("--check")
    if profile:
        command += ["--profile-steps", str(profile)]
    rank, status = run_ranks(command, arguments.nproc)
    if status in (0, USAGE_ERROR, *(128 + number for number in SIGNALS)):
        return status  # it has said why
    if rank is None or -status in SIGNALS:
        return _complain(f"ended by {signal.Signals(-status).name}", 128 - status)
    how = f", with exit status {status}" if status > 0 else f": killed by {signal.Signals(-status).name}"
    return _complain(f"rank {rank} failed first{how}", status if status > 0 else 128 - status)


def _doctor(arguments):
    facts = doctor()
    print(json.dumps(facts, indent=2) if arguments.json else "\n".join(report(facts)))
    return 0
