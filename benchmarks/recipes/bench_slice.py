"""Four layers of the real 122B decoder trained for a step, beside transformers with its best parts, on one GPU.

    python -m benchmarks.recipes.bench_slice            every variant; the digits of a row go to JSON
    python -m benchmarks.recipes.bench_slice --tiny     small sizes on the CPU, to exercise the code
    python -m benchmarks.recipes.bench_slice --left benchmarks/results/h200/slice.json     beyond the floor, by kind

Three layers of gated delta net and one of attention, 32 of 256 experts (one rank's share at ep 8), hidden 3072, bf16,
full activation checkpointing; FSDP2 on one rank holds fp32 masters, gradients reduce in fp32, AdamW has fp32 moments.
Without the head the loss is a random projection of the hidden states, with it cross-entropy at 248,320. A step is
forward, backward, optimizer; its time is the median of CUDA events, tokens / s follow. In none of ours may the host
wait for the device or a copy go to it: exit status 1. Variants run one after the other, ours first and again at the end
(`self`), since two models with their masters do not fit beside each other.

Gate, before any time: loss and gradients of a narrower model in the same weights, packed, by the error rule; truth is
transformers in fp32 one document at a time, its bf16 the plain twin. There every token takes every expert: rounded to
bf16, a near tie of two experts falls either way, and the rule would compare two models.

Work counted, as by the peers' scripts: 6 flops a token and active weight, attention 3.5 times its forward; nothing for
what is made again. The floor is that work at 790 TFLOP/s.
"""

import argparse
import contextlib
import gc
import importlib
import inspect
import itertools
import json
import os
import re
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as theirs
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig

from automodel_c import Pack, ops
from automodel_c.models.parallelize import parallelize_qwen3_5
from automodel_c.models.qwen3_5 import config as configs
from automodel_c.models.qwen3_5.experts import Experts
from automodel_c.models.qwen3_5.initialise import initialise
from automodel_c.models.qwen3_5.model import Qwen3_5
from automodel_c.models.qwen3_5.step import Step
from automodel_c.optim import FusedAdamW
from benchmarks.harness import write_gpu_rows
from benchmarks.ops.bench_attention_cuda import heavy_tailed
from tests.numerics import assert_as_good_as

FLOPS = 790e12  # what dense bf16 products reach on an H200
PACKAGES = ("transformers", "fla-core", "flash-attn-3", "causal-conv1d", "liger-kernel")
JSON = Path(__file__).parents[1] / "results/h200/slice.json"
ROPE = {
    "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10],
    "mrope_interleaved": True,
}  # fmt: skip
REAL = {
    "hidden_size": 3072, "num_hidden_layers": 4, "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 256,
    "linear_num_key_heads": 16, "linear_num_value_heads": 64, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "moe_intermediate_size": 1024, "shared_expert_intermediate_size": 1024, "num_experts": 32,
    "num_experts_per_tok": 8, "rope_parameters": ROPE,
}  # fmt: skip
NARROW = REAL | {
    "hidden_size": 512, "num_attention_heads": 8, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
    "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256, "num_experts": 8, "num_experts_per_tok": 8,
}  # fmt: skip
TINY = NARROW | {
    "hidden_size": 64, "num_attention_heads": 4, "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 4,
    "rope_parameters": ROPE | {"mrope_section": [2, 1, 1]},
}  # fmt: skip
TOWER = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "num_position_embeddings": 16}
HEADLESS_VOCAB = 8192
LOSS_BYTES = 6 << 30  # what our loss may hold beyond its gradients: the peak, which is elsewhere, does not grow
GATED = ("layers.0.linear_attn.in_proj_qkv", "layers.0.linear_attn.A_log", "layers.1.mlp.experts.down_proj",
         "layers.2.mlp.gate.weight", "layers.3.self_attn.q_proj", "layers.3.input_layernorm")  # fmt: skip
KINDS = {  # of kernels, by their names; the first that fits
    "communication": r"nccl",
    "rows that travel": r"exchange|comm_reduce",
    "attention": r"attention|flash|fmha|cudnn.*sdpa",
    "gated delta rule": r"gdn|gated_delta|chunk_|kkt|fused_gdr|recompute_w_u|solve_tril|l2norm|cumsum",
    "convolution": r"conv",
    "experts": r"moe|group|expert|Grouped|router|topk|sort|histc|index|gather|scatter",
    "norms, gates, rotary": r"norm|rope|swiglu|gate|silu|sigmoid",
    "loss": r"loss|cross_entropy|softmax",
    "optimizer": r"adam|Adam|clip",
    "products": r"gemm|nvjet|cutlass|xmma|sm90_",
}


class Slice(Qwen3_5):
    """Our decoder, with or without its head."""

    def __call__(self, x):  # `Inputs` as it is: not a batch of a recipe
        return nn.Module.__call__(self, x)

    def forward(self, x):
        hidden, _ = self.model.language_model(self.model.language_model.embed_tokens(x.ids), x.step)
        if x.projection is not None:
            return projected(hidden, x)
        return ops.linear_cross_entropy(hidden, self.lm_head.weight, x.labels, extra_bytes=LOSS_BYTES)


class Peer(nn.Module):
    """transformers' decoder, fed as its users feed it: one row, the documents told to attention and convolution."""

    def __init__(self, inner, liger, packed):
        super().__init__()
        self.inner, self.liger, self.packed = inner, liger, packed

    def forward(self, x):
        told = {"position_ids": x.starts[None]}
        if self.packed:
            told |= {"cu_seq_lens_q": x.cu, "cu_seq_lens_k": x.cu, "max_length_q": x.longest, "max_length_k": x.longest,
                     "seq_idx": x.document[None]}  # fmt: skip
        hidden = self.inner.model(input_ids=x.ids[None], use_cache=False, **told).last_hidden_state[0]
        if x.projection is not None:
            return projected(hidden, x)
        if self.liger:
            from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

            return LigerFusedLinearCrossEntropyLoss()(self.inner.lm_head.weight, hidden, x.labels)
        return nn.functional.cross_entropy(self.inner.lm_head(hidden).float(), x.labels)


def projected(hidden, x):
    values = (hidden * x.projection.to(hidden.dtype)).float().mean(-1)
    x.values = values.detach()
    return values.mean() * (100.0 * x.share)


class Inputs:
    """Random tokens in documents of `lengths`. share: of the loss of a step; values: what each token made of it."""

    share, values = 1.0, None

    def __init__(self, lengths, hidden, vocab, head, device):
        tokens, generator = sum(lengths), torch.Generator().manual_seed(0)
        self.lengths, self.tokens, self.longest = lengths, tokens, max(lengths)
        self.ids = torch.randint(0, vocab, (tokens,), generator=generator).to(device)
        self.labels = self.ids.roll(-1)
        self.starts = torch.cat([torch.arange(n) for n in lengths]).to(device)
        ends = [0, *itertools.accumulate(lengths)]
        self.cu = torch.tensor(ends, dtype=torch.int32, device=device)
        self.document = torch.repeat_interleave(
            torch.arange(len(lengths), dtype=torch.int32), torch.tensor(lengths)
        ).to(device)
        self.projection = None if head else torch.randn(tokens, hidden, generator=generator).to(device)
        pack = Pack(cu_seqlens=ends, device=device)
        self.step = Step(pack, self.starts.expand(3, -1).contiguous(), None)

    def alone(self):
        """Each document as inputs of its own, with its part of labels and projection."""
        for start, end in itertools.pairwise(self.cu.tolist()):
            one = object.__new__(Inputs)
            one.ids, one.labels, one.starts = (t[start:end] for t in (self.ids, self.labels, self.starts))
            one.projection = self.projection[start:end]
            yield (end - start) / self.tokens, one


def our_model(sizes, vocab, device, cp=None, ep=None, fill=True):
    """cp: ContextParallel, ep: ExpertParallel, of the ranks that share packs or experts. fill: with random weights."""
    text = {"model_type": "qwen3_5_moe_text", "vocab_size": vocab, **sizes}
    tower = TOWER | {"out_hidden_size": sizes["hidden_size"]}
    config = configs.read_config({"model_type": "qwen3_5_moe", "text_config": text, "vision_config": tower})
    with torch.device("meta"):
        model = Slice(config)
    model.cp = cp
    if ep is not None and ep.group is not None:
        model.ep = ep
        for experts in (m for m in model.modules() if isinstance(m, Experts)):
            experts.spread(ep)
    if fill:
        model.to_empty(device=device)
        torch.manual_seed(0)
        initialise(model, model)
    return model.train()


def their_model(sizes, vocab, device, attention, experts="grouped_mm", liger=False, packed=False):
    config = Qwen3_5MoeTextConfig(vocab_size=vocab, max_position_embeddings=262144, use_cache=False, **sizes)
    with torch.device(device):
        inner = theirs.Qwen3_5MoeForCausalLM._from_config(
            config, dtype=torch.float32, attn_implementation=attention, experts_implementation=experts
        )
    for name, weight in inner.named_parameters():  # a router that spreads and finite experts, whatever made them
        if name.endswith("gate.weight") or "experts." in name:
            nn.init.normal_(weight, std=0.02)
    return Peer(inner.train(), liger, packed)


def sharded(model, mesh, moe_mesh=None):
    """fp32 masters in FSDP2, bf16 compute, activations made again."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if isinstance(model, Slice):
        return parallelize_qwen3_5(model, mesh, moe_mesh=moe_mesh, mp_policy=policy, activation_checkpointing=True)
    model.inner.gradient_checkpointing_enable({"use_reentrant": False})
    for unit in (*model.inner.model.layers, model):
        fully_shard(unit, mesh=mesh["dp"], mp_policy=policy)
    return model


def optimizer_of(model):
    trained = [p for p in model.parameters() if p.requires_grad]
    if isinstance(model, Slice):
        return FusedAdamW(trained, lr=1e-5)
    return torch.optim.AdamW(trained, lr=1e-5, fused=True)


def flops_of(sizes, lengths, vocab, head):
    """{kind: flops} of a step, without what is made again."""
    h, experts = sizes["hidden_size"], sizes["num_experts_per_tok"] * sizes["moe_intermediate_size"]
    keys, values = (sizes[f"linear_num_{n}_heads"] * sizes[f"linear_{n}_head_dim"] for n in ("key", "value"))
    linear = h * (2 * keys + values) + 2 * h * values + 2 * h * sizes["linear_num_value_heads"]
    heads, dim = sizes["num_attention_heads"], sizes["head_dim"]
    full = h * 3 * heads * dim + 2 * h * sizes["num_key_value_heads"] * dim
    shared = 4 * 3 * h * sizes["shared_expert_intermediate_size"]
    each = 6 * sum(lengths)
    return {
        "products": each * (3 * linear + full + shared + head * h * vocab),
        "experts": each * 4 * (h * sizes["num_experts"] + 3 * h * experts),
        "attention": 3.5 * 4 * sum(n * (n + 1) / 2 for n in lengths) * heads * dim,
    }


def left(rows):
    """Lines: of our rows, what each kind of kernel takes beyond the least its counted work could, the largest first."""
    shapes = {shape: (lengths, head) for shape, lengths, head in shapes_of(False)}
    for r in (r for r in rows if r.get("variant") == "ours" and "kinds" in r):
        lengths, head = shapes[r["shape"]]
        flops = flops_of(REAL, lengths, 248320 if head else HEADLESS_VOCAB, head)
        found = {"idle": (r["ms"]["step"] - sum(r["kinds"].values()), 0.0, 0.0)}
        for kind, ms in r["kinds"].items():
            least = flops.get(kind, 0.0) / FLOPS * 1e3
            again = least * {"attention": 1 / 3.5, "experts": 2 / 9}.get(
                kind, 1 / 3
            )  # down's products are not made again
            if kind == "products" and head:  # the head's own are not made again, the logits that are not kept are
                again -= 2 * sum(lengths) * REAL["hidden_size"] * 248320 / FLOPS * 1e3
            found[kind] = ms, least, again
        yield f"{r['shape']}: {r['ms']['step']:.1f} ms, {r['floor_ms']:.1f} of them the floor; ms beyond it by kind"
        yield f"  {'':22} {'took':>8} {'floor':>8} {'again':>8} {'left':>8}"
        for kind, (ms, least, again) in sorted(found.items(), key=lambda of: of[1][1] + of[1][2] - of[1][0]):
            yield f"  {kind:22} {ms:8.1f} {least:8.1f} {again:8.1f} {ms - least - again:8.1f}"


def one_step(model, x, optimizer, device):
    """(loss, marks before and after forward, backward and optimizer)."""
    marks = [mark(device)]
    loss = model(x)
    marks.append(mark(device))
    loss.backward()
    marks.append(mark(device))
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    marks.append(mark(device))
    return loss.detach(), marks


def time_steps(model, x, seconds, device):
    """({part: [ms]}, profile by kind, peak bytes, (first loss, last loss))."""
    optimizer = optimizer_of(model)
    parts = {"forward": [], "backward": [], "optimizer": [], "step": []}

    def step():
        return one_step(model, x, optimizer, device)

    first = step()[0].item()
    step()
    peak = 0
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    begun, made = time.perf_counter(), 0
    while made < 4 or (time.perf_counter() - begun < seconds and made < 12):
        last, marks = step()
        made += 1
        for name, (a, b) in zip(parts, ((0, 1), (1, 2), (2, 3), (0, 3)), strict=True):
            parts[name].append(between(marks[a], marks[b]))
    kinds = {}
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated()
        kinds = by_kind(step)
    return parts, kinds, peak, (first, last.item())


def mark(device):
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(a, b):
    if isinstance(a, float):
        return (b - a) * 1e3
    b.synchronize()
    return a.elapsed_time(b)


def by_kind(step):
    """Milliseconds of a step's kernels by KINDS, and those of the longest by name; how often the host waited or a copy
    went to it, by the call's name; what of communication no other kernel covers, and what nothing runs in."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as made:
        step()
    kinds, longest, waits = {}, [], {}
    for event in made.key_averages():
        if re.search(r"Synchronize|DtoH", event.key):
            waits[event.key] = event.count - (event.key == "cudaDeviceSynchronize")  # the profiler's own, at its end
        ms = event.self_device_time_total / 1e3
        kind = next((k for k, pattern in KINDS.items() if re.search(pattern, event.key)), "other")
        kinds[kind] = kinds.get(kind, 0.0) + ms
        longest.append((round(ms, 3), event.key[:120]))
    communication, others = [], []
    for event in made.events():
        on_device = event.device_type == torch.autograd.DeviceType.CUDA
        if on_device and not getattr(event, "is_user_annotation", False):
            which = communication if re.search(KINDS["communication"], event.name) else others
            which.append((event.time_range.start, event.time_range.end))
    return {
        **timeline(communication, others),
        "kinds": dict(sorted(kinds.items(), key=lambda k: -k[1])),
        "longest": sorted(longest, reverse=True)[:24],
        "waits": {key: count for key, count in waits.items() if count},
    }


def timeline(communication, others):
    """Milliseconds of intervals [(start, end)] in microseconds: communication, what of it `others` do not cover, and
    where between the first and the last there is neither."""
    every = communication + others
    if not every:
        return {}
    busy, span = covered(every), max(e for _, e in every) - min(s for s, _ in every)
    return {
        "communication_ms": covered(communication) / 1e3,
        "exposed_ms": (busy - covered(others)) / 1e3,
        "idle_ms": (span - busy) / 1e3,
    }


def covered(intervals):
    """The length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def gate(tiny, device):
    """The error rule on a pack, truth by transformers in fp32, one document at a time."""
    sizes, lengths = (TINY if tiny else NARROW), [70, 3, 129, 1] if tiny else [700, 3, 321, 1]
    x = Inputs(lengths, sizes["hidden_size"], 512, False, device)
    ours = our_model(sizes, 512, device)
    twin = their_model(sizes, 512, device, "sdpa")
    state = {k.replace("model.language_model.", "model."): v for k, v in ours.state_dict().items() if "visual" not in k}
    twin.inner.load_state_dict(state)

    def results(model, parts):
        model.zero_grad(set_to_none=True)
        loss = sum(share * model(one) for share, one in parts)
        loss.backward()
        named = {k.replace("language_model.", "").removeprefix("inner."): p.grad for k, p in model.named_parameters()}
        chosen = [next(g for k, g in named.items() if part in k) for part in GATED]
        return [loss.detach(), *(g.float() for g in chosen)]

    whole, alone = [(1.0, x)], list(x.alone())
    with plain_twin():
        truth = results(twin, alone)
        for model in (ours, twin):
            model.to(torch.bfloat16)
        naive = results(twin, alone)
    found = results(ours, whole)
    for part, a, b, c in zip(("loss", *GATED), found, naive, truth, strict=True):
        numbers = assert_as_good_as(a, b, c.double(), name=part, dtype=torch.bfloat16)
        print(f"gate {part:48s} ours {numbers['ours_fro']:.2e}  transformers {numbers['naive_fro']:.2e}", flush=True)


@contextlib.contextmanager
def plain_twin():
    """transformers in its own torch code: fla would tune every kernel for float32, anew for each length."""
    names = [n for n in ("torch_chunk_gated_delta_rule", "causal_conv1d_fn") if hasattr(theirs, n)]
    taken = {name: getattr(theirs, name) for name in names}
    for name, function in taken.items():
        setattr(theirs, name, inspect.unwrap(function))
    try:
        yield
    finally:
        for name, function in taken.items():
            setattr(theirs, name, function)


def tune_less(keep=6):
    """fla tries 25 configurations of its norms for each number of tokens; a spread of `keep` leaves time for the steps,
    and may miss the best of these small kernels. The chunk kernels try all of theirs."""
    from triton.runtime.autotuner import Autotuner

    for name in ("fla.modules.norm.l2norm", "fla.modules.norm.fused_norm_gate", "fla.modules.norm.layernorm_gated"):
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        for kernel in list(vars(module).values()):
            while kernel is not None and not isinstance(kernel, Autotuner):
                kernel = getattr(kernel, "fn", None)
            if kernel is not None and len(kernel.configs) > keep:
                kernel.configs = kernel.configs[:: -(-len(kernel.configs) // keep)]


def shapes_of(tiny):
    """(name, lengths, head) of the packs."""
    long, heavy = ([48], [24, 3, 21]) if tiny else ([16384], heavy_tailed(32768))
    larger = [24, 3, 60] if tiny else heavy_tailed(131072)
    return [
        ("16K", long, False),
        ("32K heavy", heavy, False),
        ("16K head", long, True),
        ("128K heavy", larger, False),
    ]


def variants(options):
    """(name, make, lengths, head, environment) of each row."""
    best = "sdpa" if options.tiny else "flash_attention_3"
    experts = "eager" if options.tiny else "grouped_mm"
    for shape, lengths, head in shapes_of(options.tiny):
        packed = len(lengths) > 1
        yield "ours", shape, our_model, {}, lengths, head, {}
        if shape == "128K heavy":  # for itself: that it fits
            return
        for name, flash_qla in (("transformers, FA3, FLA", "0"), ("transformers, FA3, FlashQLA", "1")):
            if packed or not options.tiny:
                more = {"attention": best, "experts": experts, "liger": head and not options.tiny, "packed": packed}
                yield name, shape, their_model, more, lengths, head, {"FLA_FLASH_QLA": flash_qla}
        if not head:
            short = lengths if options.tiny or not packed else heavy_tailed(16384)
            name = shape if short is lengths else "16K heavy"
            yield (
                "transformers, masked SDPA",
                name,
                their_model,
                {"attention": "sdpa", "experts": experts},
                short,
                head,
                {},
            )
        yield "self", shape, our_model, {}, lengths, head, {}


def main():
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.recipes.bench_slice", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--tiny", action="store_true", help="small sizes on the CPU")
    parser.add_argument("--only", nargs="+", help="variants whose name and shape hold one of these")
    parser.add_argument("--seconds", type=float, default=5.0, help="of steps a variant")
    parser.add_argument("--json", help="write here; a full run goes to benchmarks/results/h200 until a row fails")
    parser.add_argument("--commit", default="", help="what was measured, where there is no git")
    parser.add_argument("--left", metavar="FILE", help="run nothing: what a file's steps take beyond their floor")
    options = parser.parse_args()
    if options.left:
        print("\n".join(left(json.loads(Path(options.left).read_text())["rows"])))
        return
    device = torch.device("cpu" if options.tiny else "cuda")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    dist.init_process_group("gloo" if options.tiny else "nccl", rank=0, world_size=1, store=dist.HashStore())
    mesh = init_device_mesh(device.type, (1, 1), mesh_dim_names=("dp", "cp"))
    os.environ.update(FLA_FLASH_QLA="0", FLA_TILELANG="1")
    if device.type == "cuda":
        tune_less()
    gate(options.tiny, device)
    rows, whole = [], True
    for name, shape, make, how, lengths, head, environment in variants(options):
        if options.only and not any(word in f"{name} {shape}" for word in options.only):
            continue
        rows.append(row(options, mesh, device, name, shape, make, how, lengths, head, environment))
        whole = whole and "error" not in rows[-1]
        if name in ("ours", "self") and rows[-1].get("waits"):
            print(f"{shape}: the host waits, or copies come to it: {rows[-1]['waits']}", flush=True)
            whole = False
        if device.type == "cuda" and options.json:  # after each: a run may be cut off
            write_gpu_rows(options.json, rows, options.commit, PACKAGES)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if whole and not (options.json or options.only or options.tiny):
        write_gpu_rows(JSON, rows, options.commit, PACKAGES)
    dist.destroy_process_group()
    sys.exit(0 if whole else 1)


def row(options, mesh, device, name, shape, make, how, lengths, head, environment):
    os.environ.update(environment)
    sizes = TINY if options.tiny else REAL
    vocab = (512 if options.tiny else 248320) if head else (512 if options.tiny else HEADLESS_VOCAB)
    found = {"variant": name, "shape": shape, "tokens": sum(lengths), "documents": len(lengths)}
    try:
        x = Inputs(lengths, sizes["hidden_size"], vocab, head, device)
        model = sharded(make(sizes, vocab, device, **how), mesh)
        parts, kinds, peak, losses = time_steps(model, x, options.seconds, device)
    except (RuntimeError, ImportError, NotImplementedError, ValueError) as error:
        print(f"{name:30s} {shape:10s} {type(error).__name__}: {str(error).splitlines()[0][:160]}", flush=True)
        return found | {"error": f"{type(error).__name__}: {error}"}
    ms = {part: statistics.median(values) for part, values in parts.items()}
    flops = sum(flops_of(sizes, lengths, vocab, head).values())
    found |= {
        "ms": ms, "step_ms": parts["step"], "tokens_per_s": x.tokens / ms["step"] * 1e3, "peak_gib": peak / 2**30,
        "model_tflops": flops / ms["step"] / 1e9, "floor_ms": flops / FLOPS * 1e3, "losses": losses, **kinds,
    }  # fmt: skip
    words = " ".join(f"{part} {value:.1f}" for part, value in ms.items())
    rate = f"{found['tokens_per_s']:9.0f} tokens/s  {found['model_tflops']:6.1f} TFLOP/s"
    went = f"loss {losses[0]:.4g} -> {losses[1]:.4g}"
    print(f"{name:30s} {shape:10s} {rate}  peak {found['peak_gib']:.1f} GiB  {words}  {went}", flush=True)
    for kind, value in (kinds.get("kinds") or {}).items():
        print(f"    {kind:24s} {value:8.2f} ms", flush=True)
    if kinds:
        print(f"    waits and copies to the host: {kinds['waits'] or 'none'}", flush=True)
    return found


if __name__ == "__main__":
    main()
