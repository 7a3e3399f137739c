"""SHA256SUMS: a folder's files with their sums, in the format of `sha256sum`, which checks them too."""

import hashlib
from pathlib import Path

SUMS = "SHA256SUMS"


def sums_of(folder, names):
    """[(name, SHA-256 in hexadecimal)] of files of a folder."""
    return [(name, _digest(Path(folder) / name)) for name in names]


def write_sums(folder, sums=None):
    """Writes SHA256SUMS of (name, sum) pairs; None: of all files there."""
    if sums is None:
        sums = sums_of(folder, [path.name for path in Path(folder).iterdir() if path.is_file()])
    lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(sums))
    (Path(folder) / SUMS).write_text(lines, encoding="utf-8")


def read_sums(folder):
    """{name: sum} as SHA256SUMS says, None where there is none. ValueError where it says something else."""
    path, sums = Path(folder) / SUMS, {}
    if not path.is_file():
        return None
    for number, line in enumerate(path.read_bytes().decode("utf-8", "replace").splitlines(keepends=True), start=1):
        digest, two_spaces, name = line.removesuffix("\n").partition("  ")
        if len(digest) != 64 or not two_spaces or not name or "/" in name or not line.endswith("\n"):
            raise ValueError(f"{path}, line {number}: no SHA-256 sum of a file")
        sums[name] = digest
    return sums


def differences(folder, part=0, parts=1):
    """What is not as SHA256SUMS says, in words, a file each: [] where all is, None without SHA256SUMS. Looks at every
    `parts`-th file from `part` on, of those listed and those there."""
    folder = Path(folder)
    try:
        if (sums := read_sums(folder)) is None:
            return None
        there = {path.name for path in folder.iterdir()} - {SUMS}
    except (OSError, ValueError) as error:
        return [str(error)] if part == 0 else []
    found = [_difference(folder, name, sums.get(name)) for name in sorted(there | set(sums))[part::parts]]
    return [words for words in found if words]


def _difference(folder, name, digest):
    if digest is None:
        return f"{name} is not in {SUMS}"
    try:
        return "" if _digest(folder / name) == digest else f"{name} is not what was written"
    except OSError as error:
        return f"{name}: {error.strerror}"


def _digest(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
