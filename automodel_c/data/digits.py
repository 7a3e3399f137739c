"""scikit-learn's 1,797 handwritten digits as images and chat-style JSONL."""

import json
import os
import shutil
from pathlib import Path

QUESTION = "Which digit is this?"
SIDE = 32  # pixels: each of the 8x8 becomes 4x4, so that a patch of 8 pixels holds 2x2 of them
HELD_OUT_EVERY = 6  # every sixth sample of a digit is held out: about 300, evenly over the digits


def write_digits(folder):
    """Writes images/NNNN.png, train.jsonl and held_out.jsonl under `folder`, unless they are there.

    The split is a function of the data alone and even over the digits. Files are written beside and renamed, so
    that an interrupted run leaves nothing that looks finished. Needs scikit-learn and Pillow.
    """
    folder = Path(folder)
    if (folder / "train.jsonl").exists():
        return
    beside = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    (beside / "images").mkdir(parents=True)
    lines = _write_images(beside / "images")
    for split, conversations in lines.items():
        text = "".join(json.dumps(c) + "\n" for c in conversations)
        (beside / f"{split}.jsonl").write_text(text, encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    beside.rename(folder)


def _write_images(folder):
    from PIL import Image
    from sklearn.datasets import load_digits

    digits = load_digits()
    seen = [0] * 10
    lines = {"train": [], "held_out": []}
    for number, (pixels, digit) in enumerate(zip(digits.images, digits.target.tolist(), strict=True)):
        name = f"{number:04d}.png"
        grey = Image.fromarray((pixels * 255 / 16).round().astype("uint8"))
        grey.resize((SIDE, SIDE), Image.Resampling.NEAREST).save(folder / name)
        split = "held_out" if seen[digit] % HELD_OUT_EVERY == HELD_OUT_EVERY - 1 else "train"
        seen[digit] += 1
        lines[split].append(_conversation(f"images/{name}", digit))
    return lines


def _conversation(image, digit):
    question = [{"type": "image", "image": image}, {"type": "text", "text": QUESTION}]
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": str(digit)}]}
