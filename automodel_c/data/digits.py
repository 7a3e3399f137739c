"""scikit-learn's 1,797 handwritten digits as images, short clips and chat-style JSONL."""

import hashlib
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
CLIP_EVERY = 2  # after every second image a clip: a third of the conversations
CLIP_QUESTIONS = ("Which digits?", "Digits?")
CLIP_DIGITS = (2, 3, 4)  # digits that a clip shows one after another, in turn
CLIP_FPS = 2  # frames a second: a digit is seen for one second, two frames, which is one temporal patch


def write_digits(folder):
    """Writes images/NNNN.png, train.jsonl and held_out.jsonl under `folder`, unless they are there.

    The split is a function of the data alone and even over the digits; a clip shows digits of its own split. Files are
    written beside and renamed, so that an interrupted run leaves nothing that looks finished. Needs scikit-learn and
    Pillow. ValueError when the folder's JSONL is another data set, without clips.
    """
    folder = Path(folder)
    if (folder / "train.jsonl").exists():
        held_out = folder / "held_out.jsonl"
        if not held_out.exists() or '"video"' not in held_out.read_text(encoding="utf-8"):
            raise ValueError(f"{folder} holds conversations without clips: remove it, or name another folder")
        return
    beside = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    (beside / "images").mkdir(parents=True)
    lines = {split: _with_clips(*found, split) for split, found in _write_images(beside / "images").items()}
    for split, conversations in lines.items():
        text = "".join(json.dumps({"messages": c}) + "\n" for c in conversations)
        (beside / f"{split}.jsonl").write_text(text, encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    beside.rename(folder)


def _write_images(folder):
    """For each split, its conversations about images, and the (file, digit) of those."""
    from PIL import Image
    from sklearn.datasets import load_digits

    digits = load_digits()
    seen = [0] * 10
    found = {"train": ([], []), "held_out": ([], [])}
    for number, (pixels, digit) in enumerate(zip(digits.images, digits.target.tolist(), strict=True)):
        name = f"images/{number:04d}.png"
        grey = Image.fromarray((pixels * 255 / 16).round().astype("uint8"))
        grey.resize((SIDE, SIDE), Image.Resampling.NEAREST).save(folder.parent / name)
        split = "held_out" if seen[digit] % HELD_OUT_EVERY == HELD_OUT_EVERY - 1 else "train"
        seen[digit] += 1
        conversations, pictures = found[split]
        turns = _turn({"type": "image", "image": name}, QUESTIONS[number % len(QUESTIONS)], str(digit))
        if split == "train" and len(conversations) % AGAIN_EVERY == AGAIN_EVERY - 1:
            turns = turns + conversations[-1][:2]
        conversations.append(turns)
        pictures.append((name, str(digit)))
    return found


def _with_clips(conversations, pictures, split):
    """The conversations, and after every CLIP_EVERY of them one about a clip of this split's pictures."""
    lines = []
    for number, conversation in enumerate(conversations):
        lines.append(conversation)
        clip, rest = divmod(number, CLIP_EVERY)
        if rest == CLIP_EVERY - 1:
            lines.append(_clip_turn(clip, pictures, split))
    return lines


def _clip_turn(number, pictures, split):
    shown = [
        pictures[_draw(f"{split} {number} {at}", len(pictures))] for at in range(CLIP_DIGITS[number % len(CLIP_DIGITS)])
    ]
    frames = [name for name, _ in shown for _ in range(2)]
    question = CLIP_QUESTIONS[number % len(CLIP_QUESTIONS)]
    return _turn({"type": "video", "video": frames, "fps": CLIP_FPS}, question, "".join(digit for _, digit in shown))


def _draw(text, below):
    """A number from 0 to below - 1 that only the text decides."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) % below


def _turn(medium, question, answer):
    content = [medium, {"type": "text", "text": question}]
    return [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
