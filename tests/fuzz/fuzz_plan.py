"""Random bytes as documents, ids and frame costs: plans and partitions keep their laws or refuse in words.

python -m tests.fuzz.fuzz_plan --seconds 600 [--seed N]. What breaks a law is written to tests/fuzz/corpus, a JSON file
a case; test_fuzz.py replays all that lie there, hostile ones picked by hand among them.
"""

import argparse
import hashlib
import json
import random
import time
from itertools import pairwise
from pathlib import Path

import numpy as np

from automodel_c import docs_from_ids, frame_partition
from automodel_c.partition import Pack
from tests.ops.test_exchange import LAYOUTS, check_laws, plan_of

CORPUS = Path(__file__).parent / "corpus"
SCHEMES, HEADS = ["home", "balanced", "heads", "auto"], [(1, 1), (4, 2), (6, 3), (8, 1)]
EXTREMES = [0, 1, -1, 2**31 - 1, 2**31, 2**62, 2**63 - 1, -(2**63)]


def case_of(data):
    """The case that some bytes are: the first says which kind, the next few its options, the rest its numbers."""
    at = list(data) + [0] * 8
    kind, few = ("plan", "partition", "ids")[at[0] % 3], at[1:8]
    numbers = [EXTREMES[n % len(EXTREMES)] if few[6] % 7 == 6 and n > 247 else n % (few[0] % 97 + 1) for n in at[8:]]
    if kind == "plan":
        return {"kind": kind, "lengths": [n for n in numbers if 0 <= n < 1000], "ranks": few[1] % 9 + 1,
                "layout": sorted(LAYOUTS)[few[2] % len(LAYOUTS)], "scheme": SCHEMES[few[3] % 4],
                "causal": bool(few[4] % 2), "heads": list(HEADS[few[5] % 4])}  # fmt: skip
    if kind == "partition":
        alpha = EXTREMES[few[2] % 8] if few[3] % 5 == 4 else few[2]
        method = ("minimax", "bisect")[few[4] % 2]
        return {"kind": kind, "patches": numbers, "world": few[1] % 9, "alpha": alpha, "method": method}
    return {"kind": kind, "ids": numbers}


def check(case):
    """ValueError or OverflowError for what is refused; AssertionError for a broken law."""
    given = {key: value for key, value in case.items() if key != "refused"}
    {"plan": plan, "partition": partition, "ids": ids}[given.pop("kind")](**given)


def plan(lengths, ranks, layout, scheme, causal, heads):
    ends = np.cumsum([0, *lengths], dtype=np.int64)
    docs = np.stack([ends[:-1], ends[1:]], 1)
    docs, owners, padded, tasks, keys, queries, *_ = plan_of(
        docs, ranks, layout, scheme, causal, tokens=int(ends[-1]), heads=tuple(heads)
    )
    check_laws(docs, owners, padded, tasks, keys, queries, ranks, causal, heads=tuple(heads))


def partition(patches, world, alpha, method):
    cuts = frame_partition(patches, world, alpha=alpha, method=method)
    if cuts is None:
        assert len(patches) < world or not patches
        return
    assert cuts[0] == 0 and cuts[-1] == len(patches) and len(cuts) == world + 1 and (np.diff(cuts) >= 0).all()
    cost = [sum(p * (p + alpha) for p in patches[a:b]) for a, b in pairwise(cuts.tolist())]
    whole = [p * (p + alpha) for p in patches]
    assert method == "bisect" or max(cost) <= sum(whole) // world + max(whole)


def ids(ids):
    docs = docs_from_ids(np.array(ids, dtype=np.int64))
    assert Pack(doc_ids=ids).docs.tolist() == docs.tolist()
    inside = np.zeros(len(ids), dtype=bool)
    for start, end in docs:
        assert start < end and len(set(ids[start:end])) == 1 and not inside[start:end].any()
        inside[start:end] = True
    assert docs.tolist() == sorted(docs.tolist())


def run(seed, rounds=None, seconds=None):
    """Cases tried, and how many were refused."""
    random_, made, refused, until = random.Random(seed), 0, 0, time.monotonic() + (seconds or 1e9)
    while made < (rounds or 1 << 62) and time.monotonic() < until:
        case = case_of(random_.randbytes(random_.choice([1, 9, 12, 20, 60])))
        made += 1
        try:
            check(case)
        except (ValueError, OverflowError):
            refused += 1
        except Exception as error:
            text = json.dumps(case)
            (CORPUS / f"{hashlib.sha256(text.encode()).hexdigest()[:12]}.json").write_text(text + "\n")
            raise AssertionError(f"{text} gave {error!r}") from error
    return made, refused


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    options = parser.parse_args()
    print("seed", options.seed, flush=True)
    print("{} cases, {} refused".format(*run(options.seed, seconds=options.seconds)))
