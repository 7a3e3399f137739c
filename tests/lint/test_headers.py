"""What a change of a header compiles again: setup.py finds headers by the names that stand quoted in the sources."""

import re

from tests.lint.source import C_SUFFIXES, files, relative

HEADERS = {path for path in files("csrc", suffixes=(".h", ".inc", ".cuh"))}


def test_headers_have_names_of_their_own():
    names = sorted(path.name for path in HEADERS)
    assert names == sorted(set(names))


def test_headers_are_included_by_name():
    """A quoted one, or AM_CPU_INC, which is one; those of the system and of the toolkits are not ours."""
    names, wrong = {path.name for path in HEADERS}, []
    for path in files("csrc", suffixes=C_SUFFIXES):
        for line in re.findall(r"^\s*#\s*include\s+(.*)", path.read_text(), re.M):
            quoted, angled = re.match(r'"(?:[\w./]*/)?(\w+\.\w+)"', line), re.match(r"<(?:.*/)?(.*)>", line)
            known = quoted[1] in names if quoted else angled[1] not in names if angled else line == "AM_CPU_INC"
            wrong += [] if known else [f"{relative(path)}: {line}"]
    assert wrong == []
