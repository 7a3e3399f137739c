"""Layers of the real 122B with all 256 experts over the GPUs of one host, and what they say of the whole recipe.

    torchrun --nproc-per-node 8 -m benchmarks.recipes.bench_layers            a GPU each, NCCL: ep 8 x cp 8, 128K tokens
    torchrun --nproc-per-node 2 -m benchmarks.recipes.bench_layers --tiny     small sizes on the CPU, gloo

All ranks share packs of 16K tokens a rank (cp) and the experts (ep). As many layers, in fours of three gated delta nets
and one attention, as the planner says fit; full activation checkpointing, fp32 masters and moments by FSDP2, two
microbatches, the gradients of each reduced at once. Two packs: uneven documents, one document.

Gate: bench_slice_ranks's, by the error rule, on the same mesh. The planner's time and memory stand beside (made before
the run, kept in results/predictions/layers.json), and a projection: what it says of 48 layers on 128 GPUs, ep 8, cp 16,
times how much this run took of what it said of it.
"""

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist

from automodel_c.models.qwen3_5.layers import GatedRMSNorm
from automodel_c.parallel import faults, wire
from automodel_c.recipes.parts import install_reduction
from benchmarks.harness import write_gpu_rows
from benchmarks.recipes import bench_slice, bench_slice_ranks
from benchmarks.recipes.bench_slice import REAL, TINY, between, by_kind, mark, optimizer_of, our_model, sharded
from benchmarks.recipes.bench_slice_ranks import Ranks, Shared, joined, over_ranks, release, say
from benchmarks.recipes.slice_jobs import LAYER_PACKS, MICROBATCHES, layers_prediction, projection

RESULTS = Path(__file__).parents[1] / "results"
KEPT = RESULTS / "predictions/layers.json"
STEPS, WARM = 6, 2


def model_of(ranks, sizes, vocab):
    """Sharded before it has memory, so that no rank ever holds a whole weight; random in place."""
    model = our_model(sizes, vocab, torch.device("meta"), ranks.cp, ranks.ep, fill=False)
    sharded(model, ranks.mesh, ranks.moe_mesh)
    model.to_empty(device=ranks.device)
    torch.manual_seed(dist.get_rank())
    with torch.no_grad():
        for weight in model.parameters():
            weight.to_local().normal_(0.0, 0.02)
        for norm in (m for m in model.modules() if isinstance(m, GatedRMSNorm)):
            norm.weight.to_local().fill_(1.0)
    install_reduction(model, ranks.device)
    return model


def timed(model, x, device, steps):
    """(median ms of a step, peak bytes, bytes of rows sent a step, profile, [losses])."""
    optimizer, times, losses = optimizer_of(model), [], []

    def step():
        begun, loss = mark(device), 0.0
        for _ in range(MICROBATCHES):
            part = model(x) / MICROBATCHES
            part.backward()
            loss = loss + part.detach()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return begun, mark(device), loss

    for n in range(WARM + steps):
        if n == WARM and device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        sent = wire.sent
        begun, ended, loss = step()
        sent = wire.sent - sent
        if n >= WARM:
            times.append(between(begun, ended))
        losses.append(loss)
    peak, profile = 0, {}
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated()
        profile = by_kind(step)
    return torch.tensor(times).median().item(), peak, sent, profile, [float(loss) for loss in losses]


def row(name, lengths, ranks, layers, options, said):
    device, world = ranks.device, ranks.world
    sizes = (TINY if options.tiny else REAL | {"num_experts": 256}) | {"num_hidden_layers": layers}
    vocab = 512 if options.tiny else bench_slice.HEADLESS_VOCAB
    x = Shared(lengths, sizes, vocab, 0, device, 1, ranks.cp, True)
    model = model_of(ranks, sizes, vocab)
    ms, peak, sent, profile, losses = timed(model, x, device, options.steps)
    assert all(torch.isfinite(torch.tensor(losses))), f"losses {losses}"
    del model
    release(device)
    tokens = sum(lengths) * MICROBATCHES
    step = over_ranks({"ms": ms}, "max")["ms"]
    found = {
        "pack": name, "mesh": f"ep {world} x cp {world}", "layers": layers, "documents": len(lengths),
        "tokens": tokens, "ms": step, "tokens_per_s_per_gpu": tokens / world / step * 1e3,
        "peak_gib": over_ranks({"peak": peak / 2**30}, "max")["peak"], "sent_mib": sent / 2**20, "predicted": said,
    }  # fmt: skip
    line = (
        f"{name:8s} {layers} layers, {found['mesh']}: {step:.1f} ms, {found['tokens_per_s_per_gpu']:,.0f} tokens/s/GPU"
    )
    say(f"{line}, {found['peak_gib']:.1f} GiB, rows sent {found['sent_mib']:,.1f} MiB")
    if said:
        found["of_predicted"] = step / said["step_ms"]
        found["projected_tokens_per_s_per_gpu"] = said["projection"] / found["of_predicted"]
        time, memory = said["step_ms"] / step - 1, said["peak_gib"] / max(found["peak_gib"], 1e-9) - 1
        say(f"    predicted {said['step_ms']:.1f} ms ({time:+.1%}), {said['peak_gib']:.1f} GiB ({memory:+.1%})")
        say(f"    attention's most {said['attention_balance']:.3f} of its mean; 48 layers on 128 GPUs:"
            f" {found['projected_tokens_per_s_per_gpu']:,.0f} tokens/s/GPU")  # fmt: skip
    for kind, value in (profile.get("kinds") or {}).items():
        say(f"    {kind:24s} {value:8.2f} ms")
    if "exposed_ms" in profile:
        words = (f"{what} {profile[f'{what}_ms']:.2f}" for what in ("communication", "exposed", "idle"))
        say(f"    ms: {', '.join(words)}")
    return found | profile


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="small sizes on the CPU")
    parser.add_argument("--steps", type=int, default=STEPS, help="timed steps of a row")
    parser.add_argument("--layers", type=int, help="a multiple of 4; default: what the planner says fits")
    parser.add_argument("--json", help="write here; default results/h200xN/layers.json, with --tiny none")
    parser.add_argument("--commit", default="", help="what was measured, where there is no git")
    options = parser.parse_args()
    device = joined("bench_layers", options.tiny)
    with faults.guard():
        measured(options, device)
    dist.destroy_process_group()


def measured(options, device):
    world = dist.get_world_size()
    bench_slice_ranks.gate({f"cp {world} x ep {world}": (world, world)}, options.tiny, device)
    kept = {} if options.tiny or not KEPT.exists() else json.loads(KEPT.read_text())
    path = options.json or (None if options.tiny else RESULTS / f"h200x{world}/layers.json")
    rows = []
    for name, lengths in LAYER_PACKS.items():
        if options.tiny:
            lengths = bench_slice_ranks.shapes(True)["one" if name == "one" else "heavy"](world, 0)
            said, layers = {}, options.layers or 4
        else:
            lengths = lengths(16384 * world)
            said = kept.get("rows", {}).get(f"{world} {name}", {})
            if not said or options.layers not in (None, said["layers"]):
                said = layers_prediction(lengths, world, options.layers) | {"projection": projection(lengths)}
            layers = said["layers"]
        rows.append(row(name, lengths, Ranks(device, world, world), layers, options, said))
        if path and dist.get_rank() == 0:
            write_gpu_rows(path, rows, options.commit)


if __name__ == "__main__":
    main()
