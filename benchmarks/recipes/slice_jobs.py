"""The slice of the 122B that benchmarks.recipes.bench_slice runs, as Jobs: what predictions are held against."""

from automodel_c.models.qwen3_5.config import CONFIGS, read_config
from automodel_c.recipes.planner import Job

EXPERTS, HEADLESS, LOSS_BYTES = 32, 8192, 6 << 30


def slice_job(lengths, *, world=1, cp=1, ep=1, head=False):
    """Three layers of gated delta net and one of attention, 32 experts. lengths: of one pack."""
    config = CONFIGS["122B-A10B"]
    text = config["text_config"] | {
        "num_hidden_layers": 4, "layer_types": None, "num_experts": EXPERTS, "mtp_num_hidden_layers": 0,
        "vocab_size": 248320 if head else HEADLESS,
    }  # fmt: skip
    text = read_config({**config, "text_config": {k: v for k, v in text.items() if v is not None}}).text
    return Job(
        text, None, world, cp, ep, tuple(lengths), head=head, projected=not head, clip=False, loss_bytes=LOSS_BYTES
    )
