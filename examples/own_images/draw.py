"""Stands in for your own images: writes coloured shapes and what to say about them, a conversation a line.

python examples/own_images/draw.py [folder]; the folder gets images/*.png, train.jsonl and held_out.jsonl.
"""

import json
import random
import sys
from pathlib import Path

from PIL import Image, ImageDraw

COLOURS = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 220), "yellow": (230, 200, 30)}
SHAPES = ("circle", "square", "triangle", "cross")
COUNTS = {"train": 1500, "held_out": 80}


def draw(shape, colour, chance):
    """A picture of 32 x 32 pixels: the shape somewhere on a background that is never the same."""
    picture = Image.new("RGB", (32, 32), tuple(chance.randrange(60) for _ in range(3)))
    pen, size = ImageDraw.Draw(picture), chance.randrange(18, 27)
    x, y = (chance.randrange(1, 31 - size) for _ in range(2))
    box, middle = (x, y, x + size, y + size), size // 2
    if shape == "circle":
        pen.ellipse(box, fill=colour)
    elif shape == "square":
        pen.rectangle(box, fill=colour)
    elif shape == "triangle":
        pen.polygon([(x, y + size), (x + size, y + size), (x + middle, y)], fill=colour)
    else:
        pen.rectangle((x, y + middle - 2, x + size, y + middle + 2), fill=colour)
        pen.rectangle((x + middle - 2, y, x + middle + 2, y + size), fill=colour)
    return picture


def conversation(name, answer):
    """What is seen and asked, and what the model shall say; file names are relative to the JSONL file."""
    question = [{"type": "image", "image": name}, {"type": "text", "text": "What is this?"}]
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


if __name__ == "__main__":
    folder, chance = Path(sys.argv[1] if len(sys.argv) > 1 else "own_images"), random.Random(0)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for split, count in COUNTS.items():
        with open(folder / f"{split}.jsonl", "w", encoding="utf-8") as lines:
            for number in range(count):
                colour, shape = chance.choice(list(COLOURS)), chance.choice(SHAPES)
                name = f"images/{split}_{number:03d}.png"
                draw(shape, COLOURS[colour], chance).save(folder / name)
                lines.write(json.dumps(conversation(name, f"{colour} {shape}")) + "\n")
    print(f"{folder} holds {COUNTS['train']} images to learn from and {COUNTS['held_out']} held out")
