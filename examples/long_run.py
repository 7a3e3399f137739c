"""Data for examples/long_run.yaml, and what its run must have been: python examples/long_run.py write | check RUN

Conversations that fill 48 packs of 256 tokens: one document that takes 92 % of its pack, images, clips and text, few of
them distinct, so that a hundred steps learn them by heart.
"""

import json
import math
import sys
from pathlib import Path

from automodel_c.data.digits import write_digits

FOLDER, DIGITS = Path(".cache/long_run"), Path(".cache/digits")
WORDS = [" digit", " is", " this", " at", " and", " say", " which"]  # one token each
LONG, TEXTS = 226, 6  # words of the long answer: 236 tokens with the question, of 256


def conversations():
    """All of them, each as its messages."""
    yield turn([{"type": "text", "text": "Look"}], "".join(WORDS[i % 7] for i in range(LONG)))
    lines = [json.loads(line)["messages"] for line in (DIGITS / "train.jsonl").read_text("utf-8").splitlines()]
    images = [m for m in lines if len(m) == 2 and m[0]["content"][0]["type"] == "image"][:16]
    clips = [m for m in lines if m[0]["content"][0]["type"] == "video"][:12]
    texts = [turn([{"type": "text", "text": "say" + WORDS[i]}], WORDS[i + 1] + WORDS[i]) for i in range(TEXTS)]
    for _ in range(20):
        yield from images + clips + texts


def turn(content, answer):
    return [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]


def write():
    write_digits(DIGITS)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in ("images", "clips"):
        if not (FOLDER / name).exists():
            (FOLDER / name).symlink_to((DIGITS / name).resolve())
    text = "".join(json.dumps({"messages": m}) + "\n" for m in conversations())
    (FOLDER / "train.jsonl").write_text(text, encoding="utf-8")


def check(run):
    """The last loss, gradients and memory of a run; exit status 1 where one is not as asked. Memory is the most so far,
    on a CPU with what malloc holds: it nears its end slowly, and must not grow by 2 % in the last quarter."""
    rows = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text("utf-8").splitlines()]
    last, settled = rows[-1], rows[len(rows) * 3 // 4]
    grown = last["memory"] / settled["memory"] - 1
    print(f"{len(rows)} steps: loss {rows[0]['loss']:.3f} to {last['loss']:.4f} (asked: below 0.05)")
    print(f"gradient norms {min(r['grad_norm'] for r in rows):.3g} to {max(r['grad_norm'] for r in rows):.3g}")
    print(
        f"memory {settled['memory']:.3f} GiB at step {settled['step']}, {last['memory']:.3f} at the end: {grown:+.1%}"
    )
    finite = all(math.isfinite(r["loss"]) and math.isfinite(r["grad_norm"]) for r in rows)
    sys.exit(0 if finite and last["loss"] < 0.05 and grown < 0.02 else 1)


if __name__ == "__main__":
    write() if sys.argv[1:2] == ["write"] else check(sys.argv[2])
