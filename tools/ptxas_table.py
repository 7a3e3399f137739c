"""Registers, shared memory, stack and spills of every CUDA kernel, from what ptxas said when it was compiled.

Reads the logs beside the objects in build/objects. A byte of stack or spill is an error: exit status 1.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
_KERNEL = re.compile(r"Compiling entry function '(\S+)' for '(\w+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


def parse(log):
    """One dict for each kernel that a ptxas log speaks of."""
    kernels = []
    for line in log.splitlines():
        if found := _KERNEL.search(line):
            row = {"kernel": found[1], "arch": found[2], "registers": 0, "smem": 0, "stack": 0, "spills": 0}
            kernels.append(row)
        elif kernels and (found := _STACK.search(line)):
            kernels[-1].update(stack=int(found[1]), spills=int(found[2]) + int(found[3]))
        elif kernels and (found := _USED.search(line)):
            smem = _SHARED.search(line)
            kernels[-1].update(registers=int(found[1]), smem=int(smem[1]) if smem else 0)
    return kernels


def readable(names):
    """The names without C++ mangling, where c++filt is at hand."""
    if not names or shutil.which("c++filt") is None:
        return names
    done = subprocess.run(["c++filt", "-p"], input="\n".join(names), capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def newest_logs(folder, sources):
    """The newest log of each source: older ones belong to sources that have changed since."""
    logs = {}
    for source in sources:
        found = sorted(folder.glob(f"{source.stem}-*.log"), key=lambda p: p.stat().st_mtime)
        logs.update({source: found[-1].read_text()} if found else {})
    return logs


def main():
    sources = sorted((ROOT / "csrc/cuda").rglob("*.cu"))
    logs = newest_logs(ROOT / "build/objects", sources)
    missing = [str(source.relative_to(ROOT)) for source in sources if source not in logs]
    if missing:
        print(f"not compiled here, so not reported: {', '.join(missing)} (no nvcc, or AM_CUDA=0)")
    rows = [row for log in logs.values() for row in parse(log)]
    names = readable([row["kernel"] for row in rows])
    width = max(map(len, names), default=6)
    print(f"{'kernel':{width}}  {'arch':7} {'registers':>9} {'smem':>7} {'stack':>6} {'spills':>7}")
    for name, row in zip(names, rows, strict=True):
        numbers = f"{row['registers']:9} {row['smem']:7} {row['stack']:6} {row['spills']:7}"
        print(f"{name:{width}}  {row['arch']:7} {numbers}")
    bad = [name for name, row in zip(names, rows, strict=True) if row["stack"] or row["spills"]]
    print(f"{len(rows)} kernels, {len(bad)} with stack or spills" + "".join(f"\n  {name}" for name in bad))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
