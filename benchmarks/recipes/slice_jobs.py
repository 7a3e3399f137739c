"""What benchmarks.recipes.bench_slice and bench_layers run of the 122B, as Jobs of the planner: their predictions."""

from automodel_c.models.qwen3_5.config import CONFIGS, read_config
from automodel_c.recipes.planner import Job, Machine, memory, timing
from benchmarks.ops.bench_attention_cuda import heavy_tailed

EXPERTS, HEADLESS, LOSS_BYTES = 32, 8192, 6 << 30
LAYER_PACKS = {"uneven": heavy_tailed, "one": lambda tokens: [tokens]}
MICROBATCHES, MEMORY = 2, 131 << 30  # bytes of an H200 that a run may take, with all that is not torch's


def slice_job(lengths, *, world=1, cp=1, ep=1, head=False):
    """Three layers of gated delta net and one of attention, 32 experts. lengths: of one pack."""
    text = text_of(4, EXPERTS, 248320 if head else HEADLESS)
    return Job(
        text, None, world, cp, ep, tuple(lengths), head=head, projected=not head, clip=False, loss_bytes=LOSS_BYTES
    )


def layers_job(lengths, world, layers):
    """All experts, shared by all ranks as the pack is."""
    text = text_of(layers, 256, HEADLESS)
    return Job(
        text, None, world, world, world, tuple(lengths), microbatches=MICROBATCHES, head=False, projected=True,
        clip=False, loss_bytes=LOSS_BYTES,
    )  # fmt: skip


def text_of(layers, experts, vocab):
    config = CONFIGS["122B-A10B"]
    text = config["text_config"] | {
        "num_hidden_layers": layers, "layer_types": None, "num_experts": experts, "mtp_num_hidden_layers": 0,
        "vocab_size": vocab,
    }  # fmt: skip
    return read_config({**config, "text_config": {k: v for k, v in text.items() if v is not None}}).text


def layers_prediction(lengths, world, layers=None):
    """{layers, step_ms, peak_gib, attention_balance, ms}; layers: None: the most that fit, in fours, up to 48."""
    machine = Machine.load(pair=world == 2)
    if layers is None:
        held = {n: memory(layers_job(lengths, world, n)).reserved(machine) for n in range(4, 52, 4)}
        layers = max(n for n, size in held.items() if size <= MEMORY)
    job = layers_job(lengths, world, layers)
    seconds, costs = timing(job, machine), job.attention.costs
    return {
        "layers": layers, "step_ms": round(seconds.step * 1e3, 1),
        "peak_gib": round(memory(job).allocated / 2**30, 2),
        "attention_balance": round(float(costs.max() / costs.mean()), 4),
        "ms": {part: round(s * 1e3, 2) for part, s in seconds.parts.items()},
        "hidden_ms": {part: round(s * 1e3, 2) for part, s in seconds.hidden.items()},
    }  # fmt: skip


def projection(lengths):
    """Tokens a second and GPU that the planner says of the recipe, 48 layers on 128 GPUs at ep 8 and cp 16, on packs of
    128K as uneven as this one or of one document."""
    lengths = [131072] if len(lengths) == 1 else heavy_tailed(131072)
    config = read_config(CONFIGS["122B-A10B"])
    job = Job(config.text, None, 128, 16, 8, tuple(lengths))
    return round(timing(job, Machine.load()).rate(job), 1)
