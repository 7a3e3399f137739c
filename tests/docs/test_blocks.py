"""Every block of Python and shell of the README and the guides runs, in order, in a folder like a fresh checkout.

A block of Python is a part of its page's one script; one that says `ranks=2` is a script of its own under torchrun.
Every line of a shell block is a command. What takes minutes, or changes this machine, runs in the reduced form of
REDUCED; a row of it that no page needs any more is an error. Of a block that says `console`, commands run and the lines
shown below them are compared. Recipes in YAML and conversations in JSON are read.
"""

import json
import os
import re
import subprocess
import sys

import pytest
import yaml

from automodel_c.recipes.config import load_recipe
from tests.lint.source import ROOT, relative

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "examples/own_images/README.md"]
GENERATED = ("api.md", "recipe_keys.md")
PAGES = [page for page in PAGES if page.name not in GENERATED]

_SHORT, _ONE_MORE = "step_scheduler.max_steps=2", "step_scheduler.max_steps=3 #"
REDUCED = {  # how a line begins -> what runs in its place, with the rest of the line behind it
    "make demo": "automodel-c train examples/digits_cp2.yaml --nproc 2 " + _SHORT,
    "make test": "make -n test",
    "make build": "make -n build",
    "make lint": "make -n lint",
    "automodel-c train examples/digits_cp2.yaml --nproc 2 checkpoint.restore_from=LATEST": (
        f"automodel-c train examples/digits_cp2.yaml --nproc 2 checkpoint.restore_from=LATEST {_ONE_MORE}"
    ),
    "automodel-c train examples/digits_cp2.yaml --nproc 4 distributed.ep_size=2 checkpoint.restore_from=LATEST": (
        "automodel-c train examples/digits_cp2.yaml --nproc 4 distributed.ep_size=2 checkpoint.restore_from=LATEST "
        + _ONE_MORE
    ),
    "automodel-c train examples/digits_cp2.yaml --nproc 2 distributed.ep_size=2": (
        f"automodel-c train examples/digits_cp2.yaml --nproc 2 distributed.ep_size=2 {_SHORT} "
    ),
    "torchrun --nproc-per-node 2 -m automodel_c train examples/digits_cp2.yaml": (
        f"python -m torch.distributed.run --nproc-per-node 2 -m automodel_c train examples/digits_cp2.yaml {_SHORT}"
    ),
    "automodel-c train examples/own_images/recipe.yaml": (
        f"automodel-c train examples/own_images/recipe.yaml {_SHORT}"
    ),
}
NEEDS = {  # what a page takes for granted, run before it
    "docs/recipes.md": [
        f"automodel-c train examples/digits_cp2.yaml --nproc 2 {_SHORT}",
        "python examples/own_images/draw.py own_images",
        f"automodel-c train examples/own_images/recipe.yaml {_SHORT}",
    ],
}


def blocks(page):
    """(info string, text) of each fenced block."""
    return re.findall(r"^```([^\n`]*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)


def commands(text):
    lines = (line.partition("  #")[0].strip().replace(".venv/bin/", "") for line in text.splitlines())
    return [line for line in lines if line]


def reduced(line):
    """(the line as it runs, the row of REDUCED that changed it)."""
    rows = [row for row in REDUCED if line == row or line.startswith(row + " ")]
    if not rows:
        return line, None
    row = max(rows, key=len)
    return REDUCED[row] + line.removeprefix(row), row


@pytest.fixture
def checkout(tmp_path):
    """A folder that looks like this checkout, in which runs and data are nobody else's."""
    for path in ROOT.iterdir():
        if path.name not in (".git", "runs", "build", ".cache", "own_images", "docs", ".pytest_cache"):
            (tmp_path / path.name).symlink_to(path)
    return tmp_path


def run(command, folder, timeout=280):
    """Runs a list, or a line of shell in which `python` and `automodel-c` are this environment's, and returns it."""
    if isinstance(command, str):
        python = f'"{sys.executable}"'
        line = re.sub(r"^python\b", lambda _: python, command)
        line = re.sub(r"^automodel-c\b", lambda _: f"{python} -m automodel_c", line)
        command = ["bash", "-euc", line]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout)


def good(command, folder):
    done = run(command, folder)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_blocks_run(page, checkout):
    for line in NEEDS.get(relative(page), ()):
        good(line, checkout)
    script = ""
    for number, (info, text) in enumerate(blocks(page)):
        kind, *more = info.split()[:2] or [""]
        if kind == "python" and more:
            path = checkout / f"block_{number}.py"
            path.write_text(text, encoding="utf-8")
            ranks = more[0].removeprefix("ranks=")
            good(
                [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, path],
                checkout,
            )
        elif kind == "python":
            script += text
            path = checkout / "page.py"
            path.write_text(script, encoding="utf-8")  # names of earlier blocks are there
            good([sys.executable, path], checkout)
        elif kind == "bash":
            for line in commands(text):
                good(reduced(line)[0], checkout)
        elif kind == "console":
            _compare(text, checkout)
        elif kind == "json":
            assert json.loads(text)
        elif kind == "yaml":
            path = checkout / "block.yaml"
            path.write_text(text, encoding="utf-8")
            assert yaml.safe_load(text) and load_recipe(path)
        else:
            assert kind in ("", "text", "mermaid"), f"{relative(page)}: nobody knows what to do with {info!r}"


def _compare(text, folder):
    """The lines shown stand in what the command says, in order; `...` leaves something out, times vary."""
    first, *shown = text.splitlines()
    assert first.startswith("$ ")
    done = run(first.removeprefix("$ "), folder)
    said, at = re.sub(r"\d+\.\d+ s\b", "0 s", done.stdout + done.stderr), 0
    for part in (part.strip() for line in shown for part in re.sub(r"\d+\.\d+ s\b", "0 s", line).split("...")):
        found = said.find(part.rstrip("}"), at)
        assert found >= 0, f"{first} does not say {part!r} after {said[:at][-200:]!r}, but {said[at:][:2000]!r}"
        at = found


def test_every_reduction_is_of_a_line_that_is_there():
    lines = [line for page in PAGES for info, text in blocks(page) if info == "bash" for line in commands(text)]
    used = {reduced(line)[1] for line in lines}
    assert set(REDUCED) - used == set()
    assert len(lines) > 10


@pytest.mark.parametrize("page", [*PAGES, ROOT / "DESIGN.md", ROOT / "CONVENTIONS.md"], ids=relative)
def test_links_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)):
        path, _, anchor = target.partition("#")
        if path.startswith(("http", "mailto")):
            continue
        there = (page.parent / path) if path else page
        assert there.exists(), f"{relative(page)}: {target}"
        if anchor:
            titles = re.findall(r"^#+ (.*)$", there.read_text(encoding="utf-8"), re.M)
            anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            assert anchor in anchors, f"{relative(page)}: {target} is none of {sorted(anchors)}"
