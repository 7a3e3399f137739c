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
CLIP_EVERY = {"train": 1, "held_out": 2}  # conversations about images to one about a clip, which is the harder
CLIP_DIGITS = (1, 2, 3)  # digits in a clip, in turn: one that moves, or some that are seen one after another
CLIP_QUESTIONS = (("Which digit?", "Digit?"), ("Which digits?", "Digits?"))  # about one, about some
CLIP_FPS = 2  # frames a second: a digit that stands is seen for one second, two frames, which is one temporal patch
EDITION = "images and clips 1\n"  # raise the number when what is written changes
STEPS = (-1, 0, 1, 0)  # where the frames show a digit that moves, in pixels of 8 across


def write_digits(folder):
    """Writes images/NNNN.png, clips/NNNN.gif, train.jsonl and held_out.jsonl under `folder`, unless they are there.

    The split is a function of the data alone and even over the digits; a clip shows digits of its own split. Files are
    written beside and renamed, so that an interrupted run leaves nothing that looks finished. Needs scikit-learn and
    Pillow. A folder of these digits with other clips, or none, is written anew; any other data set is left as it
    is.
    """
    folder = Path(folder)
    if (folder / "train.jsonl").exists() and not _is_other_edition(folder):
        return
    beside = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    for name in ("images", "clips"):
        (beside / name).mkdir(parents=True)
    lines = {split: _with_clips(*found, split, beside) for split, found in _write_images(beside).items()}
    for split, conversations in lines.items():
        text = "".join(json.dumps({"messages": c}) + "\n" for c in conversations)
        (beside / f"{split}.jsonl").write_text(text, encoding="utf-8")
    (beside / "edition").write_text(EDITION, encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    beside.rename(folder)


def _is_other_edition(folder):
    """Whether the folder holds the digits, by its first conversation, but not as they are written here."""
    with open(folder / "train.jsonl", encoding="utf-8") as lines:
        first = lines.readline()
    written = folder / "edition"
    same = written.exists() and written.read_text(encoding="utf-8") == EDITION
    return '"images/0000.png"' in first and QUESTIONS[0] in first and not same


def _write_images(folder):
    """For each split, its conversations about images, and the (number, pixels, digit) of those."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    seen = [0] * 10
    found = {"train": ([], []), "held_out": ([], [])}
    for number, (pixels, digit) in enumerate(zip(digits.images, digits.target.tolist(), strict=True)):
        _picture(pixels).save(folder / f"images/{number:04d}.png")
        split = "held_out" if seen[digit] % HELD_OUT_EVERY == HELD_OUT_EVERY - 1 else "train"
        seen[digit] += 1
        conversations, pictures = found[split]
        turns = _turn(
            {"type": "image", "image": f"images/{number:04d}.png"}, QUESTIONS[number % len(QUESTIONS)], str(digit)
        )
        if split == "train" and len(conversations) % AGAIN_EVERY == AGAIN_EVERY - 1:
            turns = turns + conversations[-1][:2]
        conversations.append(turns)
        pictures.append((number, pixels, str(digit)))
    return found


def _picture(pixels):
    from PIL import Image

    grey = Image.fromarray((pixels * 255 / 16).round().astype("uint8"))
    return grey.resize((SIDE, SIDE), Image.Resampling.NEAREST)


def _with_clips(conversations, pictures, split, folder):
    """The conversations, and after every so many of them one about a clip of this split's pictures."""
    lines = []
    for number, conversation in enumerate(conversations):
        lines.append(conversation)
        clip, rest = divmod(number, CLIP_EVERY[split])
        if rest == CLIP_EVERY[split] - 1:
            lines.append(_clip_turn(clip, pictures, split, folder))
    return lines


def _clip_turn(clip, pictures, split, folder):
    count = CLIP_DIGITS[clip % len(CLIP_DIGITS)]
    shown = [pictures[_draw(f"{split} {clip} {at}", len(pictures))] for at in range(count)]
    if count == 1:
        video = {"type": "video", "video": _write_moving(*shown[0][:2], folder)}
    else:
        frames = [f"images/{number:04d}.png" for number, _, _ in shown for _ in range(2)]
        video = {"type": "video", "video": frames, "fps": CLIP_FPS}
    questions = CLIP_QUESTIONS[min(count, 2) - 1]
    answer = "".join(digit for _, _, digit in shown)
    return _turn(video, questions[clip // len(CLIP_DIGITS) % len(questions)], answer)


def _write_moving(number, pixels, folder):
    """Writes an animation of a digit that goes to and fro, and returns its name."""
    name = f"clips/{number:04d}.gif"
    first, *rest = [_picture(_shifted(pixels, step)) for step in STEPS]
    first.save(folder / name, save_all=True, append_images=rest, duration=1000 // CLIP_FPS, loop=0)
    return name


def _shifted(pixels, step):
    moved = pixels * 0
    width = pixels.shape[1]
    moved[:, max(step, 0) : width + min(step, 0)] = pixels[:, max(-step, 0) : width - max(step, 0)]
    return moved


def _draw(text, below):
    """A number from 0 to below - 1 that only the text decides."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) % below


def _turn(medium, question, answer):
    content = [medium, {"type": "text", "text": question}]
    return [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
