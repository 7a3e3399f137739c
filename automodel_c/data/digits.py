"""scikit-learn's 1,797 handwritten digits as images and chat-style JSONL."""

import json
import os
import shutil
from pathlib import Path

QUESTIONS = (  # of one to seven tokens where the words below are one each
    "Which digit is this?",
    "Digit?",
    "Which digit is this? Look at this and say which digit this is.",
    "This is which digit?",
)
AGAIN_EVERY = 5  # every fifth conversation of training asks about a second image, one that came before
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
        turns = _turn(f"images/{name}", digit, number)
        if split == "train" and len(lines[split]) % AGAIN_EVERY == AGAIN_EVERY - 1:
            turns = turns + lines[split][-1]["messages"][:2]
        lines[split].append({"messages": turns})
    return lines


def _turn(image, digit, number):
    text = QUESTIONS[number % len(QUESTIONS)]
    question = [{"type": "image", "image": image}, {"type": "text", "text": text}]
    return [{"role": "user", "content": question}, {"role": "assistant", "content": str(digit)}]
