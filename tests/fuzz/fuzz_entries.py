"""Every method of the extension under a fuzzer that coverage guides (atheris: libFuzzer), with ASan and UBSan.

`make fuzz-entries` builds the extension for it, preloads the sanitizer, and runs

    python -m tests.fuzz.fuzz_entries CORPUS [libFuzzer's options]     the fuzzer; what it keeps is in CORPUS
    python -m tests.fuzz.fuzz_entries pack|unpack CORPUS               that folder and corpus_entries.txt
    python -m tests.fuzz.fuzz_entries show FILE                        the call that an input is, and how it ends
"""

import hashlib
import sys
import tempfile
from pathlib import Path

import torch

from automodel_c import _amcore
from tests.core.memcheck import load_hostile
from tests.fuzz import entries


def target(folder):
    hostile, info = load_hostile(folder), _amcore.build_info()
    torch.set_num_threads(1)

    def one(data):
        try:
            entries.Case(data, hostile).run()
        finally:
            _amcore.set_isa(info["isa"])
            _amcore.set_num_threads(2)  # so that tasks cross threads, and few are started

    return one


def fuzz(arguments):
    import atheris

    with tempfile.TemporaryDirectory() as folder:
        atheris.Setup([sys.argv[0], *arguments], target(folder))
        atheris.Fuzz()


def main(verb, *rest):
    if verb == "pack":
        entries.keep(path.read_bytes() for path in Path(rest[0]).iterdir())
    elif verb == "unpack":
        for data in entries.corpus():
            (Path(rest[0]) / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
    elif verb == "show":
        with tempfile.TemporaryDirectory() as folder:
            case = entries.Case(Path(rest[0]).read_bytes(), load_hostile(folder))
        print(case, flush=True)
        print(repr(case.run()))
    else:
        fuzz([verb, *rest])


if __name__ == "__main__":
    main(*sys.argv[1:])
