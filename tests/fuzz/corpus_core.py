"""The inputs that fuzz_core.c's fuzzer keeps, as one file of the repository and as the folder that it wants.

python -m tests.fuzz.corpus_core pack|unpack FOLDER
"""

import hashlib
import sys
from pathlib import Path

FILE = Path(__file__).parent / "corpus_core.txt"  # an input a line, in hexadecimal


def inputs():
    return [bytes.fromhex(line) for line in FILE.read_text().splitlines()]


def main(verb, folder):
    if verb == "pack":
        found = sorted({path.read_bytes() for path in Path(folder).iterdir()} - {b""}, key=lambda x: (len(x), x))
        FILE.write_text("".join(f"{data.hex()}\n" for data in found))
    else:
        for data in inputs():
            (Path(folder) / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)


if __name__ == "__main__":
    main(*sys.argv[1:])
