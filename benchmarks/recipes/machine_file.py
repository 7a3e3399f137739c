"""The constants that `automodel-c plan` predicts with, from measurements that are committed.

    python -m benchmarks.recipes.machine_file             prints them
    python -m benchmarks.recipes.machine_file --write     keeps them in automodel_c/recipes/planner/machines/h200.json

Every constant names the rows that it comes from. Rows of single operators are taken where there are some. Three are of
steps of the slice, because nothing else measured them: products of matrices, the gated delta rule on Hopper, and copies
of FSDP2; all of them of one run, 32K tokens in uneven documents, so that the other runs of the slice judge the planner.
What nobody measured is said to be assumed or stated.
"""

import argparse
import json
from pathlib import Path

from automodel_c.recipes.planner.packs import heavy_tailed
from benchmarks.recipes.bench_slice import REAL
from benchmarks.recipes.slice_jobs import slice_job

RESULTS = Path(__file__).parents[1] / "results"
TARGET = Path(__file__).parents[2] / "automodel_c/recipes/planner/machines/h200.json"
HEADS, DIM = 32, 256


def rows_of(name, folder="h200"):
    return json.loads((RESULTS / folder / f"{name}.json").read_text())["rows"]


def one(rows, **wanted):
    """The row whose fields are those."""
    found = [r for r in rows if all(r.get(key) == value for key, value in wanted.items())]
    if len(found) != 1:
        raise ValueError(f"{len(found)} rows with {wanted}")
    return found[0]


def constant(value, unit, source):
    return {"value": float(f"{value:.5g}"), "unit": unit, "source": source}


def scores(lengths):
    return sum(n * (n + 1) / 2 for n in lengths)


def attention():
    """Of each pass: seconds of a score (one head, one dim), from one document of 32K, and of a token (one head, one
    dim), which is what a hundred short documents take beyond that."""
    rows, hundred = rows_of("attention"), [64 + 37 * i * i % 937 for i in range(100)]
    for which in ("fwd", "bwd"):
        long, short = (one(rows, **{"pass": which, "shape": s})["ours"]["ms_median"] / 1e3 for s in ("32K", "hundred"))
        score = long / (scores([32768]) * HEADS * DIM)
        token = (short - score * scores(hundred) * HEADS * DIM) / (sum(hundred) * HEADS * DIM)
        source = f"attention.json {which}"
        yield f"attention_{which}_score", constant(score, "s a head and dim", f"{source} 32K")
        yield f"attention_{which}_token", constant(token, "s a head and dim", f"{source} hundred, beyond its scores")


def frames():
    rows = rows_of("attention_frames")
    for which in ("fwd", "bwd"):
        row = one(rows, **{"pass": which, "shape": "frames-d72"})
        per = row["ours"]["ms_median"] / 1e3 / (16 * 1024**2 * row["heads"] * row["dim"])
        yield f"frames_{which}_score", constant(per, "s a head and dim", f"attention_frames.json {which} frames-d72")


def experts():
    for kernel in ("gate_up", "down", "dact", "dx", "ddown", "dgate_up"):
        row = one(rows_of("moe"), routing="balanced", kernel=kernel)
        yield f"experts_{kernel}", constant(row["tflops"] * 1e12, "flops / s", f"moe.json balanced {kernel}")
    for kernel in ("permute", "unpermute"):
        row = one(rows_of("moe"), routing="balanced", kernel=kernel)
        yield f"experts_{kernel}", constant(row["copy_share"], "of a copy's rate", f"moe.json balanced {kernel}")
    swiglu = one(rows_of("moe"), routing="balanced", kernel="swiglu grad")["ours"]["ms_median"] / 1e3
    yield "experts_swiglu_grad", constant(swiglu / 262144 / 1024, "s a row and column", "moe.json balanced swiglu grad")
    router = one(rows_of("moe"), case="router 32K x 256")["ours"]["ms_median"] / 1e3
    yield "router", constant(router / 32768 / 256, "s a token and expert", "moe.json router 32K x 256")


def shares():
    """Of a copy's rate, of what memory bounds."""
    memory = {name: name.replace("_", " ") for name in ("rms_norm residual", "rms_norm", "q norm", "k norm", "swiglu")}
    memory |= {"gated_rms_norm": "", "sigmoid_gate": "", "mrope": "", "layer_norm": "", "gelu tanh": ""}
    for op in memory:
        for which in ("fwd", "bwd"):
            row = one(rows_of("memory"), **{"op": op, "pass": which, "dtype": "torch.bfloat16"})
            yield (
                f"{op.replace(' ', '_')}_{which}",
                constant(row["copy_share"], "of a copy's rate", f"memory.json {op} {which}"),
            )
    for op, name in (("causal_conv1d packed", "conv"), ("gdn_gate", "gdn_gate")):
        for which in ("fwd", "bwd"):
            row = one(rows_of("conv_gate"), **{"op": op, "pass": which})
            yield f"{name}_{which}", constant(row["copy_share"], "of a copy's rate", f"conv_gate.json {op} {which}")


def of_the_slice():
    """From one run of the slice; see the head."""
    row = one(rows_of("slice"), variant="ours", shape="32K heavy")
    source, tokens, kinds = "slice.json ours 32K heavy", row["tokens"], row["kinds"]
    h, heads = REAL["hidden_size"], REAL["linear_num_value_heads"]
    keys, values = REAL["linear_num_key_heads"] * 128, heads * 128
    linear = h * (2 * keys + values) + 2 * h * values + 2 * h * heads
    full = h * 3 * REAL["num_attention_heads"] * DIM + 2 * h * REAL["num_key_value_heads"] * DIM
    dense = 3 * linear + full + 4 * (3 * h * REAL["shared_expert_intermediate_size"] + h)
    yield (
        "products",
        constant(
            8 * dense * tokens / kinds["products"] * 1e3, "flops / s", f"{source}: products, forward twice and backward"
        ),
    )
    named = {name: ms for ms, name in row["longest"]}
    ms = {part: sum(v for k, v in named.items() if f"gdn_{part}_" in k) for part in ("fwd", "prepare")}
    forward = (ms["fwd"] + ms["prepare"] * 2 / 3) / 6  # three layers forward twice; backward prepares once more
    backward = kinds["gated delta rule"] / 3 - 2 * forward
    for which, value in (("fwd", forward), ("bwd", backward)):
        yield f"gdn_{which}", constant(value / 1e3 / tokens / heads, "s a token and value head", f"{source}: gdn_*")
    chunk_cat = next(ms for ms, name in row["longest"] if "chunk_cat" in name)
    copy = copy_rate()[0]
    yield (
        "fsdp_chunk_cat",
        constant(
            6 * sum(numbers()) / (chunk_cat / 1e3) / copy,
            "of a copy's rate",
            f"{source}: chunk_cat of bf16 gradients to fp32",
        ),
    )


def numbers():
    """Weights of the slice's layers, and of its root."""
    job = slice_job([2])
    return sum(sum(job.numbers(kind).values()) for kind in job.layers), sum(job.root)


def copy_rate():
    row = one(rows_of("adam"), op="f32")
    return row["bytes"] / (row["copy"]["ms_median"] / 1e3), "adam.json f32: a copy of as many bytes"


def links():
    rows = rows_of("exchange_cuda", "h200x2")
    small, large = (one(rows, what="rows delivered", MiB=n) for n in (1, 256))
    rate = (256 - 1) * 2**20 / (large["bare_us"] - small["bare_us"]) * 1e6
    source = "h200x2/exchange_cuda.json"
    yield "pair_bytes", constant(rate, "bytes / s a direction", f"{source} rows delivered, bare, 1 and 256 MiB")
    yield "message", constant(small["ours_us"] / 1e6, "s", f"{source} rows delivered, 1 MiB")
    reduce = one(rows, what="reduce-scatter, float32", MiB=256)
    yield (
        "pair_reduce_scatter",
        constant(
            128 * 2**20 / reduce["nccl_us"] * 1e6, "bytes / s a direction", f"{source} reduce-scatter 256 MiB, NCCL"
        ),
    )
    alone, both = (one(rows_of("slice_ranks", "h200x2"), mesh=m, shape="32K heavy") for m in ("one", "dp 2"))
    source = "h200x2/slice_ranks.json dp 2, 32K heavy"
    gather = next(ms for ms, name in both["longest"] if "AllGather" in name)
    layers, root = numbers()
    yield (
        "pair_gather",
        constant((2 * layers + root) / gather * 1e3, "bytes / s a direction", f"{source}: NCCL's gathers"),
    )
    work = [k for k in alone["kinds"] if k not in ("other", "optimizer", "communication")]
    slower = sum(both["kinds"][k] - alone["kinds"][k] for k in work)
    yield "crowded", constant(
        slower / (both["communication_ms"] - both["exposed_ms"]), "of wire time beside work",
        f"{source}: by how much longer kernels take than on one",
    )  # fmt: skip
    spread = one(rows_of("slice_ranks", "h200x2"), mesh="ep 2", shape="32K heavy")
    rows = slice_job(heavy_tailed(32768), world=2, ep=2).arriving * 32768 * REAL["num_hidden_layers"]
    yield "rows_idle", constant(
        (spread["idle_ms"] - alone["idle_ms"]) / 1e3 / rows, "s a row that arrives",
        "h200x2/slice_ranks.json ep 2, 32K heavy: nothing runs on the device, beyond what one rank has of that",
    )  # fmt: skip
    yield "nvlink_bytes", constant(350e9, "bytes / s a GPU and direction", "stated")
    yield "infiniband_bytes", constant(50e9, "bytes / s a GPU and direction", "stated: 400 Gbit/s a GPU")


def constants():
    rate, source = copy_rate()
    yield "copy", constant(rate, "bytes / s, read and written", source)
    yield from of_the_slice()
    yield from attention()
    yield from frames()
    yield from experts()
    yield from shares()
    adam = one(rows_of("adam"), op="f32")["ours"]["ms_median"] / 1e3
    yield "adam", constant(adam / 1e9, "s a parameter", "adam.json f32")
    clip = one(rows_of("adam"), op="norm")["ms_median"]["clip_grad_norm_"] / 1e3
    yield "clip", constant(clip / 1e9, "s a parameter", "adam.json norm")
    loss = one(rows_of("loss"), op="linear_cross_entropy", row="fast")
    t, h, v = loss["shape"]
    again = 1 - loss["extra_bytes"] / (2 * t * v)  # logits that are made twice
    yield (
        "loss",
        constant(
            (6 + 2 * again) * t * h * v / loss["ours"]["ms_median"] * 1e3,
            "flops / s",
            "loss.json linear_cross_entropy fast",
        ),
    )
    yield from links()
    yield "slack", constant(0.05, "of what is allocated", "assumed: no committed run tells what is reserved")
    yield "context", constant(1.5 * 2**30, "bytes", "assumed: CUDA context, libraries, NCCL's buffers")
    yield "memory", constant(80e9, "bytes", "what a recipe must fit: an H100's; an H200 has 150e9")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help=f"keep them as {TARGET.name}")
    options = parser.parse_args()
    about = {
        "machine": "NVIDIA H200, torch 2.11, CUDA 13.0",
        "written_by": "python -m benchmarks.recipes.machine_file",
    }
    text = json.dumps(about | {"constants": dict(constants())}, indent=1) + "\n"
    print(text, end="")
    if options.write:
        TARGET.write_text(text)


if __name__ == "__main__":
    main()
