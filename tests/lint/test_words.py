"""Words that may not stand in the sources."""

import re

import pytest

from tests.lint.source import C_SUFFIXES, ROOT, files, matching_lines, relative

C_FILES = files("csrc", suffixes=C_SUFFIXES)
TEXT = files(
    "csrc", "automodel_c", "tests", "benchmarks", "examples", "tools", "setup.py", "Makefile", "pyproject.toml",
    suffixes=(*C_SUFFIXES, ".py", ".pyi", ".yaml", ".md", ".sh"),
) + [p for p in ROOT.glob("*.md")]  # fmt: skip
TEXT = [p for p in TEXT if p != ROOT / "tests/lint/test_words.py"]

RULES = {
    "exit": (C_FILES, r"\b(exit|_exit|abort|quick_exit)\s*\("),
    "print": (C_FILES, r"\b(printf|fprintf|puts|perror|fputs)\s*\("),
    "fast-math": (TEXT, r"use_fast_math|-ffast-math|-Ofast"),
    "native": (TEXT, r"-m(arch|tune)=native"),
    "ascii": (C_FILES, r"[^\x00-\x7f]"),
    "paths": (TEXT, r"(?<![\w.])/(work|root|home|tmp|mnt|Users)/\w"),
    "todo": (TEXT, r"\b(TODO|FIXME|XXX|HACK)\b"),
    "conflict": (TEXT, r"^(<<<<<<<|>>>>>>>) "),
}


@pytest.mark.parametrize("rule", RULES)
def test_words(rule):
    paths, pattern = RULES[rule]
    found = matching_lines(paths, pattern, rule)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("rule", "line"),
    [
        ("exit", "    exit(1);"),
        ("print", '    fprintf(stderr, "x");'),
        ("ascii", "/* \N{EM DASH} */"),
        ("paths", "open('/tmp/x')"),
        ("native", "-march=native"),
        ("todo", "# TODO later"),
    ],
)
def test_the_rules_find_what_they_are_for(rule, line):
    assert re.search(RULES[rule][1], line)
    assert not re.search(RULES["print"][1], "    vsnprintf(text, n, f, ap);")


def test_sources_are_found():
    assert {"csrc/core/am_pool.c", "automodel_c/partition.py"} <= {relative(p) for p in TEXT}
