"""The vision tower of the 122B, forward and backward, beside transformers' on one GPU.

    python -m benchmarks.recipes.bench_tower            27 layers of 1,152, 16 heads of 72, 16,384 patches
    python -m benchmarks.recipes.bench_tower --tiny     small sizes on the CPU, to exercise the code

bf16 weights and pixels, every parameter with a gradient, no activation checkpointing. Frames of 256 to 4,096 patches,
and as many patches in equal frames. transformers runs its tower with torch's SDPA (a call a frame) and, where its
package is there, FlashAttention 3. Calls interleave in one process; medians of CUDA events.

Gate, before any time: tokens and chosen gradients by the error rule, truth is transformers' tower in fp32, its bf16 the
plain twin.

Predicted before the first run (H200): 6 flops a patch and weight (27 x 15.2 M + merger) are 42 TFLOP, 58 ms at 730
TFLOP/s; attention at D 72 over the mixed frames 1.9 and 5 ms; norms, GELU, residuals and rotary read and write some 40
rows of 1,152 and 4,304 a layer, 27 layers: 30 ms at 4 TB/s. Ours 95 ms. transformers adds unfused rotary in fp32, split
and cat of frames, and one SDPA a frame: 160 to 190 ms. 1.7 to 2.0 times.

Found: mixed frames 41.7 ms forward and 165.2 with backward, SDPA 75.6 and 236.9 (1.81 and 1.43 of ours), FA3 65.5 and
192.3 (1.57 and 1.16); 16 frames of 1,024 35.0 and 122.1 ms, SDPA 2.46 and 1.65 of it, FA3 1.70 and 1.35. What is
missing to 1.5 on mixed frames is attention's backward at head dim 72, some 200 TFLOP/s over frames of 4,096.
"""

import argparse
import os
import statistics
import sys
from pathlib import Path

import torch
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as theirs
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeVisionConfig

from automodel_c.models.qwen3_5.config import VisionConfig
from automodel_c.models.qwen3_5.vision import VisionModel
from benchmarks.harness import write_gpu_rows
from tests.numerics import assert_as_good_as

JSON = Path(__file__).parents[1] / "results/h200/tower.json"
REAL = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "out_hidden_size": 3072}
GATED = REAL | {"depth": 2}
TINY = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
MIXED = [(1, 64, 64), (2, 48, 64), (3, 32, 32), (8, 16, 24)]  # frames, rows, columns: 4096, 6144, 3072, 3072 patches
GRIDS = {"mixed frames": MIXED, "16 frames of 1,024": [(16, 32, 32)]}
TINY_GRIDS = {"mixed frames": [(1, 8, 8), (3, 4, 6)], "4 equal frames": [(4, 4, 4)]}
CHOSEN = ("patch_embed.proj.weight", "pos_embed.weight", "blocks.0.attn.qkv.weight", "blocks.0.norm1.weight",
          "blocks.1.mlp.linear_fc1.bias", "merger.linear_fc2.weight")  # fmt: skip
PACKAGES = ("transformers", "flash-attn-3")


def tower(sizes, attention, device, dtype):
    """Ours (attention None), or transformers' with an attention of its, in the same random weights."""
    torch.manual_seed(0)
    with torch.device(device):
        made = twin = theirs.Qwen3_5MoeVisionModel._from_config(
            Qwen3_5MoeVisionConfig(**sizes), dtype=torch.float32, attn_implementation=attention or "sdpa"
        )
        if attention is None:
            made = VisionModel(VisionConfig(**sizes))
            made.load_state_dict({k: v for k, v in twin.state_dict().items() if k in made.state_dict()})
    return made.to(device, dtype)


def pixels(grids, sizes, device, dtype):
    config, generator = VisionConfig(**sizes), torch.Generator().manual_seed(1)
    rows = sum(t * h * w for t, h, w in grids)
    return torch.randn(rows, config.patch_width, generator=generator).to(device, dtype)


def tokens(model, x, grid):
    out = model(x, grid_thw=grid)
    return out if isinstance(out, torch.Tensor) else out.pooler_output


class Pass:
    """One model's forward, and forward with backward, over grids."""

    def __init__(self, sizes, attention, grids, device, dtype=torch.bfloat16):
        self.model = tower(sizes, attention, device, dtype)
        self.x = pixels(grids, sizes, device, dtype)
        self.grid = torch.tensor(grids, device="cpu" if attention is None else device)
        generator = torch.Generator().manual_seed(2)
        self.dout = torch.randn(len(self.x) // 4, sizes["out_hidden_size"], generator=generator).to(device, dtype)

    def forward(self):
        with torch.no_grad():
            return tokens(self.model, self.x, self.grid)

    def both(self):
        self.model.zero_grad(set_to_none=True)
        out = tokens(self.model, self.x, self.grid)
        out.backward(self.dout)
        return out.detach()

    def results(self):
        """Tokens and the chosen gradients."""
        named = dict(self.model.named_parameters())
        return [self.both(), *(named[name].grad for name in CHOSEN)]


def gate(sizes, grids, device):
    found = Pass(sizes, None, grids, device).results()
    naive = Pass(sizes, "sdpa", grids, device).results()
    truth = Pass(sizes, "eager", grids, device, torch.float32).results()
    for name, a, b, c in zip(("tokens", *CHOSEN), found, naive, truth, strict=True):
        numbers = assert_as_good_as(a, b, c.double(), name=name, dtype=torch.bfloat16)
        print(f"gate {name:32s} ours {numbers['ours_fro']:.2e}  transformers {numbers['naive_fro']:.2e}", flush=True)


def times(calls, rounds):
    """{name: [ms]} of each call on the device, one after another in every round."""
    found = {name: [] for name in calls}
    for name in [*calls] * 2:
        calls[name]()
    for _ in range(rounds):
        for name, call in calls.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(100_000_000)  # some 50 ms, for the host to be ahead
            begin.record()
            call()
            end.record()
            end.synchronize()
            found[name].append(begin.elapsed_time(end))
    return found


def rows(sizes, shapes, rounds, device):
    for shape, grids in shapes.items():
        passes, missing = {"ours": Pass(sizes, None, grids, device)}, {}
        for name, attention in {"sdpa": "sdpa", "fa3": "flash_attention_3"}.items():
            try:
                passes[name] = Pass(sizes, attention, grids, device)
            except (ImportError, ValueError) as error:
                missing[name] = str(error).splitlines()[0]
        for what in ("forward", "both"):
            calls = {name: getattr(each, what) for name, each in passes.items()}
            if device.type == "cuda":
                ms = times(calls, rounds)
            else:
                ms = {name: [0.0] for name, call in calls.items() if call() is not None}
            median = {name: statistics.median(some) for name, some in ms.items()}
            row = {"shape": shape, "patches": len(passes["ours"].x), "what": what, "ms": ms, "missing": missing}
            row["ratios"] = {k: v / median["ours"] for k, v in median.items() if median["ours"] and k != "ours"}
            words = "  ".join(f"{name} {value:.2f} ms" for name, value in median.items())
            ratios = "  ".join(f"{name} / ours {value:.2f}" for name, value in row["ratios"].items())
            print(f"{shape:20s} {what:8s} {words}  {ratios}", flush=True)
            yield row


def main():
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.recipes.bench_tower", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--tiny", action="store_true", help="small sizes on the CPU")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", help="write here; a full run goes to benchmarks/results/h200")
    parser.add_argument("--commit", default="", help="what was measured, where there is no git")
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    device = torch.device("cpu" if options.tiny else "cuda")
    torch.backends.cudnn.allow_tf32 = False  # of transformers' convolution: the truth is fp32
    sizes, shapes = (TINY, TINY_GRIDS) if options.tiny else (REAL, GRIDS)
    gate(TINY if options.tiny else GATED, shapes["mixed frames"], device)
    found = list(rows(sizes, shapes, options.rounds, device))
    if not options.tiny:
        write_gpu_rows(options.json or JSON, found, options.commit, PACKAGES)
    return 0


if __name__ == "__main__":
    sys.exit(main())
