"""What the lints read: files of the repository, their lines, C functions by our formatting."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
C_SUFFIXES = (".c", ".h", ".inc", ".cu", ".cuh")


def files(*folders, suffixes):
    """Source files below the folders (or the single files named), sorted."""
    found = []
    for folder in folders:
        path = ROOT / folder
        found += [path] if path.is_file() else [p for p in sorted(path.rglob("*")) if p.suffix in suffixes]
    return [p for p in found if "__pycache__" not in p.parts and ".venv" not in p.parts]


def relative(path):
    return path.relative_to(ROOT).as_posix()


def matching_lines(paths, pattern, rule):
    """'file:line: text' of every line that matches and does not say `lint: allow <rule>`."""
    wanted = re.compile(pattern)
    return [
        f"{relative(path)}:{number}: {line.strip()}"
        for path in paths
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if wanted.search(line) and f"lint: allow {rule}" not in line
    ]


def c_functions(path):
    """(name, first line, length, is_kernel) of every function of a clang-formatted C or CUDA file."""
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines):
        if line == "{" and not lines[number - 1].startswith("}"):
            signature = " ".join(lines[_start(lines, number) : number])
            end = next(i for i in range(number, len(lines)) if lines[i].startswith("}"))
            name = re.search(r"(\w+)\s*\(", re.sub(r"__\w+__\s*\(.*?\)+ ", "", signature))
            yield (name[1] if name else signature), number + 1, end - number + 1, "__global__" in signature


def _start(lines, brace):
    first = brace
    while first > 0 and lines[first - 1] and lines[first - 1][0] not in "}#/*;":
        first -= 1
    return first


def slices():
    """The slices that module.c registers."""
    text = (ROOT / "csrc/python/module.c").read_text().replace("\\\n", "")
    return re.findall(r"X\((\w+)\)", re.search(r"#define AM_SLICES\(X\)(.*)", text)[1])
