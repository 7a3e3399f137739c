"""The table of ptxas's numbers fails for a spill, and generated files are fresh."""

import re
import sys
from pathlib import Path

from automodel_c.recipes.keys import describe_keys
from tests.lint.source import ROOT

sys.path.insert(0, str(ROOT / "tools"))
import gen_docs
import gen_wgmma
import ptxas_table

LOG = """ptxas info    : Compiling entry function '_Z4goodPf' for 'sm_90a'
ptxas info    : Function properties for _Z4goodPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 24 registers, used 1 barriers, 4224 bytes smem
ptxas info    : Compiling entry function '_Z3badPf' for 'sm_90a'
ptxas info    : Function properties for _Z3badPf
    16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 255 registers
"""


def test_parse():
    good, bad = ptxas_table.parse(LOG)
    assert good == {"kernel": "_Z4goodPf", "arch": "sm_90a", "registers": 24, "smem": 4224, "stack": 0, "spills": 0}
    assert (bad["registers"], bad["smem"], bad["stack"], bad["spills"]) == (255, 0, 16, 12)


def test_a_spill_fails(monkeypatch, capsys):
    monkeypatch.setattr(ptxas_table, "newest_logs", lambda folder, sources: {Path("x.cu"): LOG})
    assert ptxas_table.main() == 1
    assert "1 with stack or spills\n  bad" in capsys.readouterr().out
    monkeypatch.setattr(
        ptxas_table, "newest_logs", lambda folder, sources: {Path("x.cu"): LOG[: LOG.index("_Z3bad") - 60]}
    )
    assert ptxas_table.main() == 0


def test_generated_file_is_fresh(capsys):
    assert gen_wgmma.main(["--check"]) == 0, capsys.readouterr().out


def test_recipe_keys_page_has_every_key():
    """Those of sections that a recipe may leave out too."""
    page = (ROOT / "docs/recipe_keys.md").read_text(encoding="utf-8")
    keys = [line.partition(": ")[0] for line in describe_keys()]
    assert {"wandb.mode", "validation_dataset.limit"} <= set(keys)
    assert sorted(re.findall(r"^\| `([\w.]+)`", page, re.M)) == sorted(keys)


def test_generated_pages_are_fresh(capsys):
    assert gen_docs.main(["--check"]) == 0, capsys.readouterr().out
