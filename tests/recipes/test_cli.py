import json
import os
import re
import shlex
import signal
import subprocess
import sys

import pytest
import yaml

from automodel_c.cli import _parser, main
from automodel_c.recipes.config import load_recipe
from automodel_c.recipes.keys import describe_keys
from automodel_c.recipes.runtime import UsageError, mesh_shape
from automodel_c.recipes.schema import Distributed

from .conftest import DIGITS, ROOT, run_cli


def _refused(capsys, *arguments):
    """The one line that a usage error prints."""
    try:
        status = main(list(arguments))
    except SystemExit as exit:
        status = exit.code
    out = capsys.readouterr()
    assert status == 2 and "Traceback" not in out.err + out.out
    return out.err


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "required"),
        (["tain"], "unknown command tain; did you mean train?"),
        (["fly"], "unknown command fly; there are bench, doctor, export, plan, train"),
        (["train"], "required: recipe"),
        (["train", "no/such.yaml"], "recipe no/such.yaml: No such file"),
        (["train", DIGITS, "optimizer.rl=1"], "unknown key optimizer.rl; the nearest known key is optimizer.lr"),
        (["train", DIGITS, "--nproc", "0"], "--nproc: expected a whole number, at least 1, found 0"),
        (["train", DIGITS, "--nproc", "two"], "--nproc: expected a whole number, at least 1, found two"),
        (["train", DIGITS, "--chek"], "unknown argument --chek; did you mean --check?"),
        (["train", DIGITS, "--nproc=2", "--optimizer.lr=1"], "keys have no dashes before them: optimizer.lr=1"),
        (["train", DIGITS, "optimizer.lr"], "override 'optimizer.lr': expected key=value"),
        (["train", DIGITS, "optimizer.lr=fast"], "optimizer.lr: expected float, found 'fast'"),
        (["train", "--keys", "optimzer"], "unknown key optimzer; the nearest known key is optimizer"),
        (["doctor", "all"], "unknown argument all"),
        (["train", DIGITS, "--nproc", "2", "seeed=1"], "unknown key seeed; the nearest known key is seed"),
        (["train", DIGITS, "--nproc", "3", "distributed.cp_size=2"], "cp_size=2, but 3 ranks were started"),
        (["train", DIGITS, "--nproc", "3", "distributed.ep_size=2"], "ep_size=2, but 3 ranks were started"),
        (["train", DIGITS, "--nproc", "3", "distributed.tp_size=2"], "tp_size=2, but 3 ranks were started"),
        (["train", DIGITS, "--nproc", "2", "distributed.pp_size=2", "pipeline.stages_per_rank=2"], "1F1B takes 1"),
        (
            ["train", DIGITS, "distributed.strategy=megatron_fsdp"],
            "distributed.strategy=megatron_fsdp trains on GPUs alone, found device 'cpu': megatron-fsdp gathers and",
        ),
        (["export", DIGITS, "runs"], "required: folder"),
        (["export", DIGITS, "runs", "hf"], "checkpoint.restore_from='runs': expected a folder called step_<n>"),
        (["bench", "atention"], "unknown key atention; the nearest known key is attention"),
        (["plan", "--lengths", "8", "--ranks", "2"], "plan: give a recipe with --gpus N, or --explain"),
        (
            ["plan", "--explain", "--lengths", "8,4x", "--ranks", "2"],
            "expected lengths such as 131072,4096x8, found 8,4x",
        ),
        (["plan", "--explain", "--lengths", "8", "--ranks", "2", "--heads", "3/2"], "such as 32/2, found 3/2"),
    ],
)
def test_main_usage_error(capsys, arguments, message):
    assert message in _refused(capsys, *arguments)


def test_bench_lists_and_runs(capsys, monkeypatch):
    """Names come from the files; each runs as a module of its own, until one fails."""
    assert main(["bench"]) == 0
    names = capsys.readouterr().out.split()
    assert {"adam", "attention", "partition", "step"} <= set(names)
    ran = []
    monkeypatch.setattr(
        "automodel_c.cli.subprocess.run",
        lambda command, **_: (ran.append(command[1:]), subprocess.CompletedProcess(command, len(ran) // 2))[1],
    )
    assert main(["bench", "step", "adam", "gdn"]) == 1
    assert ran == [["-m", "benchmarks.recipes.bench_step"], ["-m", "benchmarks.ops.bench_adam"]]


def test_plan_explains_a_pack(capsys):
    """Every rank has its line, and the reason follows."""
    arguments = ["plan", "--explain", "--lengths", "131072,4096x8", "--ranks", "8", "--heads", "32/2", "--dim", "256"]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("9 documents, 163840 tokens (+0 padding), longest 131072; 8 ranks hold 20480 rows each")
    assert [line.split()[0] for line in lines[3:11]] == [str(rank) for rank in range(8)]
    assert max(float(line.split()[1]) for line in lines[3:11]) <= 1.05
    assert lines[12].startswith("  rows: home ") and lines[13].startswith(
        "  heads of 1 document split, other rows: home "
    )
    assert "the time saved exceeds their traffic" in lines[14]
    assert "documents that go on to another rank: 1, over 6 edges" in lines[15]
    assert lines[16].startswith("  gated delta rule, 64 heads of 128 x 128: 21 messages, 144.000 MiB")
    assert main([*arguments, "--scheme", "home", "--full", "--dtype", "float32"]) == 0
    out = capsys.readouterr().out
    assert "float32, not causal; scheme home" in out and "the scheme was forced: 0 rows migrate" in out
    assert main([*arguments, "--scheme", "heads"]) == 0
    assert "the scheme was forced: heads of 1 document are split" in capsys.readouterr().out


@pytest.mark.parametrize(
    "override, message",
    [
        ("step_scheduler.local_batch_size=5", "global_batch_size=16 is no multiple"),
        ("distributed.dp_size=4", "distributed.dp_size=4, but 1 ranks were started"),
        ("distributed.cp_size=2", "cp_size=2, but 1 ranks were started: no multiple of it; --nproc N starts N"),
        ("output_dir=/proc/nowhere", "output_dir='/proc/nowhere': No such file or directory"),
        ("checkpoint.restore_from=runs/nowhere", "checkpoint.restore_from='runs/nowhere': expected a folder"),
        ("dataset.split=tests", "no JSONL, Parquet or Arrow file of split 'tests'"),
        ("model.config.text_config.hiden_size=8", "text_config.hiden_size; .*text_config.hidden_size"),
        ("model.config.text_config.vocab_size=8", "vocab_size=8: the tokenizer has"),
        ("model.config.text_config=5", "model.config.text_config: expected a mapping, found 5"),
        ("model.config.text_config.hidden_size=abc", "model.config: .*expected int, got str"),
        (
            "model.config.text_config.vocab_size=null",
            "model.config.text_config.vocab_size: expected an int, found None",
        ),
        ("model.torch_dtype=int8", "model.torch_dtype: expected a floating-point dtype"),
        ("lr_scheduler.lr_decay_style=WSD", "wsd_decay_steps: lr_decay_style=WSD needs it"),
        ("distributed.enable_compile=true", "enable_compile=True is not supported: a layer is compiled for one pack"),
    ],
)
def test_main_refused_while_building(capsys, tiny, tmp_path, override, message):
    error = _refused(capsys, "train", DIGITS, *tiny, f"output_dir={tmp_path}", override)
    assert re.search(message, error), error


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_main_without_a_gpu(capsys, monkeypatch, backend):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    error = _refused(capsys, "train", DIGITS, f"dist_env.backend={backend}")
    assert f"dist_env.backend={backend} gives each rank of this machine a GPU: rank 0 has none, torch sees 0" in error


def test_main_check(capsys, tiny, tmp_path):
    assert main(["train", DIGITS, *tiny, "--check", f"output_dir={tmp_path / 'out'}"]) == 0
    assert "recipe is fine" in capsys.readouterr().out
    assert not (tmp_path / "out").exists(), "a check writes nothing"


def test_main_refused_on_two_ranks(tiny):
    done = run_cli("train", DIGITS, *tiny, "--nproc", "2", "--check", "step_scheduler.local_batch_size=5")
    assert done.returncode == 2 and "Traceback" not in done.stderr + done.stdout
    assert done.stderr.count("global_batch_size=16 is no multiple") == 1


@pytest.mark.parametrize(
    "world, section, expected",
    [
        (4, {"cp_size": 2}, (2, 2, 1, 1)),
        (4, {"cp_size": None}, (4, 1, 1, 1)),
        (6, {"cp_size": 3, "dp_size": 2}, (2, 3, 1, 1)),
        (4, {"cp_size": 2, "dp_size": 4}, "dp_size=4 and distributed.cp_size=2, but 4 ranks were started"),
        (3, {"cp_size": 2}, "distributed.cp_size=2, but 3 ranks were started: no multiple of it"),
        (4, {"cp_size": 2, "ep_size": 4}, (2, 2, 1, 1)),
        (6, {"ep_size": None}, (6, 1, 1, 1)),
        (32, {"tp_size": 4, "pp_size": 4}, (2, 1, 4, 4)),
        (32, {"pp_size": 4, "ep_size": 16}, "ep_size=16 and distributed.pp_size=4, but 32 ranks were started"),
        (6, {"tp_size": 2, "pp_size": 2}, "tp_size=2 and distributed.pp_size=2, but 6 ranks were started: no multiple"),
        (6, {"cp_size": 2, "ep_size": 4}, "distributed.ep_size=4, but 6 ranks were started: no multiple of it"),
    ],
)
def test_mesh_shape(world, section, expected):
    if isinstance(expected, tuple):
        assert mesh_shape(Distributed(**section), world) == expected
    else:
        with pytest.raises(UsageError, match=expected):
            mesh_shape(Distributed(**section), world)


@pytest.mark.parametrize("module", ["yaml", "torch", "transformers"])
def test_main_without_the_packages_for_training(module):
    """Where NumPy alone is installed, train says what to install."""
    code = f"import sys; sys.modules[{module!r}] = None; from automodel_c.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "train", DIGITS]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (
        2,
        f"automodel-c: error: {module} is not installed: pip install 'automodel_c[train]'\n",
    )


@pytest.mark.parametrize(
    "rank, status, expected, said",
    [
        (None, 0, 0, ""),
        (1, 2, 2, ""),
        (0, 130, 130, ""),
        (1, -signal.SIGTERM, 143, "automodel-c: ended by SIGTERM\n"),
        (None, -signal.SIGHUP, 129, "automodel-c: ended by SIGHUP\n"),
        (1, -signal.SIGKILL, 137, "automodel-c: rank 1 failed first: killed by SIGKILL\n"),
        (0, 1, 1, "automodel-c: rank 0 failed first, with exit status 1\n"),
    ],
)
def test_main_of_ranks_that_ended(monkeypatch, capsys, rank, status, expected, said):
    """The launcher adds a line of its own only where no rank has said why."""
    monkeypatch.setattr("automodel_c.recipes.launch.run_ranks", lambda *_: (rank, status))
    monkeypatch.delenv("RANK", raising=False)
    assert main(["train", DIGITS, "--nproc", "2"]) == expected
    assert capsys.readouterr().err == said


def test_help_teaches(capsys):
    """Every command's help has examples, whose commands, options and keys are there."""
    verbs = ("train", "plan", "doctor", "bench", "export")
    for verb in verbs:
        with pytest.raises(SystemExit) as exit:
            main([verb, "--help"])
        text = capsys.readouterr().out
        assert exit.value.code == 0 and "examples:\n" in text
        parser = _parser()[1][verb]
        for line in re.findall(r"^ +automodel-c (.*?)(?:  .*)?$", text, re.M):
            name, *words = shlex.split(line.split(" > ")[0])
            assert name == verb
            if "--keys" in words:
                assert describe_keys(words[-1])
                continue
            found, rest = parser.parse_known_args(words)
            assert all("=" in word for word in rest)
            for override in (*rest, *getattr(found, "overrides", ())):
                assert describe_keys(override.partition("=")[0])
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert all(f"\n    {verb} " in text for verb in verbs)


def test_train_keys(capsys):
    """Every key of the schema, as a recipe may hold it."""
    with pytest.raises(SystemExit) as exit:
        main(["train", "--keys"])
    lines = capsys.readouterr().out.splitlines()
    assert exit.value.code == 0
    assert "optimizer.betas: list of float = [0.9, 0.999]" in lines
    assert "step_scheduler.max_steps: int = null  # null: as many as num_epochs hold" in lines
    strategies = "# or megatron_fsdp: on GPUs, by the package megatron-fsdp from 0.5 on"
    assert f"distributed.strategy: str = fsdp2  {strategies}" in lines
    assert "wandb.mode: str = null  # online, offline or disabled; null: what WANDB_MODE says, else online" in lines
    for line in lines:
        key, default = re.match(r"([\w.]+): .*? = ([^#]*?)(?:  #|$)", line).groups()
        if "wandb" not in key and "validation" not in key and not isinstance(yaml.safe_load(default), dict | list):
            load_recipe(DIGITS, [f"{key}={default}"] if not key.startswith(("model.", "processor.")) else [])


def test_doctor(capsys):
    assert main(["doctor"]) == 0
    assert "torch 2." in capsys.readouterr().out
    assert main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["packages"]["torch"].startswith("2.")
