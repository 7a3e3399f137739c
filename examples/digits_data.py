"""Writes the data set of the recipes here: handwritten digits as images, clips and chat-style JSONL.

Run `python examples/digits_data.py [folder]`; training does the same by itself when the folder is missing.
"""

import sys

from automodel_c.data.digits import write_digits

if __name__ == "__main__":
    folder = sys.argv[1] if len(sys.argv) > 1 else ".cache/digits"
    write_digits(folder)
    print(f"digits are in {folder}: images/, clips/, train.jsonl, held_out.jsonl")
