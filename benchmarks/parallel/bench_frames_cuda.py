"""The vision tower over two GPUs, frames sharded beside replicated: python -m benchmarks.parallel.bench_frames_cuda

A pack of 120K tokens, of which images and clips are 112K, in documents of text and one image each, contiguous over two
ranks; the tower of the 122B (27 layers of 1,152) in bf16, as the model runs it (`models.qwen3_5.frames.see`).
Replicated, every rank runs every frame; sharded, its own, and one exchange brings the tokens where their rows are
embedded. Frozen (forward) and trainable (forward and backward, each block made again). The exchange by itself is timed
as well.

Gate: tokens and parameter gradients, summed over the ranks, of the sharded tower beside the replicated one's, relative
error below 1e-2 (frames go through products of other sizes).

Predicted before the first run (two H200s): 448K patches take 370 TFLOP forward, 0.53 s, and attention over frames of
1,024 to 4,096 patches 0.1 s; sharded half of it, balanced within a frame, 1.95 times as fast, forward and both. Tokens
lie in the pack as their frames do, cut by cost there and by tokens here: only those between the two cuts travel, at
most 5 % of 224 MiB of them, 1 ms: 0.3 % of the tower's time.

Found: 1,265 and 622 ms forward (2.04 times), 5,268 and 2,742 ms with backward (1.92); 3 MiB travel, 0.18 ms, 0.03 % of
the tower's time. Both are slower than predicted, alike: attention over 4,096 patches and what is bound by memory.
"""

import numpy as np
import torch
import torch.distributed as dist

from automodel_c.models.qwen3_5.config import VisionConfig
from automodel_c.models.qwen3_5.frames import see
from automodel_c.models.qwen3_5.share import Share
from automodel_c.models.qwen3_5.step import Media
from automodel_c.models.qwen3_5.vision import VisionModel
from automodel_c.parallel import ContextParallel, wire
from automodel_c.parallel.exchange import exchange
from automodel_c.parallel.frame_plan import FrameSharding, plan_frames
from benchmarks.parallel.pairs import main, seconds

REAL = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "out_hidden_size": 3072}
IMAGES = [(1, 64, 64), (1, 32, 64), (4, 32, 32), (1, 48, 32)]  # 1,024, 512, 1,024 and 384 tokens
SHARDED, REPLICATED = FrameSharding(enabled=True), FrameSharding(enabled=False)
TEXT = 50  # tokens before each image


class Pack:
    """Documents of text and an image each, with random pixels, for the tower of `sizes`."""

    def __init__(self, cp, sizes, tokens, device):
        config = VisionConfig(**sizes)
        merge, grids, places, ends = config.spatial_merge_size, [], [], [0]
        while True:
            t, h, w = IMAGES[len(grids) % len(IMAGES)]
            made = t * h * w // merge**2
            if ends[-1] + TEXT + made > tokens:
                break
            places.append(np.arange(made) + ends[-1] + TEXT)
            ends.append(ends[-1] + TEXT + made)
            grids.append((t, h, w))
        self.plan = cp.plan(cu_seqlens=ends, tokens=tokens)
        of_each = np.zeros(tokens, np.int64)
        of_each[: ends[-1]] = np.repeat(ends[1:], np.diff(ends))
        self.share = Share(of_each, self.plan)
        rows = sum(t * h * w for t, h, w in grids)
        generator = torch.Generator(device).manual_seed(3)
        pixels = torch.randn(rows, config.patch_width, generator=generator, device=device, dtype=torch.bfloat16)
        self.media = Media(pixels, np.array(grids), np.concatenate(places), merge)
        torch.manual_seed(0)
        with torch.device(device):
            self.tower = VisionModel(config).to(torch.bfloat16)
        self.tower.recompute = True
        self.device = device
        self.dout = torch.randn(len(self.seen(SHARDED)), config.out_hidden_size, device=device, dtype=torch.bfloat16)

    @torch.no_grad()
    def seen(self, sharding):
        return see(self.tower, self.media, self.share, sharding, self.device)[0]

    def both(self, sharding):
        self.tower.zero_grad(set_to_none=True)
        seen = see(self.tower, self.media, self.share, sharding, self.device)[0]
        seen.backward(self.dout)
        return seen.detach(), [p.grad for p in self.tower.parameters()]

    def travel(self):
        """A function that moves the tokens alone."""
        frames = plan_frames(
            [tuple(g) for g in self.media.grids.tolist()], self.plan.ranks, self.plan.rank, merge=self.media.merge,
            alpha=SHARDED.alpha(self.tower), min_local_patch_rows=SHARDED.min_local_patch_rows,
        )  # fmt: skip
        made = torch.empty(frames.tokens[self.plan.rank], self.dout.shape[1], device=self.device, dtype=torch.bfloat16)
        moves = self.share.token_moves(self.media.places, frames.tokens)
        route = self.plan.route(moves, len(made), len(self.dout), "vision tokens")
        return lambda: exchange(made, route, self.plan.group)

    def check(self):
        """AssertionError where the two ways differ; MiB that a rank sent."""
        before = wire.sent
        mine = self.both(SHARDED)
        sent = (wire.sent - before) / 2**20
        whole = self.both(REPLICATED)
        for tensors in (mine[1], whole[1]):
            for grad in tensors:
                dist.all_reduce(grad)
        for a, b in zip([mine[0], *mine[1]], [whole[0], *whole[1]], strict=True):
            error = float((a.float() - b.float()).norm() / b.float().norm())
            assert error < 1e-2, f"relative error {error}"
        return sent


def rows(sizes=REAL, tokens=122_880, device="cuda", time=seconds):
    pack = Pack(ContextParallel(dist.group.WORLD), sizes, tokens, torch.device(device))
    sent, travel = pack.check(), pack.travel()
    calls = {
        "replicated_forward": lambda: pack.seen(REPLICATED), "sharded_forward": lambda: pack.seen(SHARDED),
        "replicated_both": lambda: pack.both(REPLICATED), "sharded_both": lambda: pack.both(SHARDED),
    }  # fmt: skip
    found = time(calls, rounds=3) | time({"exchange": travel}, rounds=15)
    yield {
        "what": "tower over frames", "tokens": tokens, "images": len(pack.media.grids), "patches": len(
        pack.media.pixel_values), **{f"{name}_ms": s * 1e3 for name, s in found.items()}, "sent_MiB": sent,
        "forward_speedup": found["replicated_forward"] / found["sharded_forward"],
        "both_speedup": found["replicated_both"] / found["sharded_both"],
        "exchange_share": found["exchange"] / found["sharded_forward"],
    }  # fmt: skip


if __name__ == "__main__":
    main("frames_cuda", rows)
