"""What a rank does in the tests of the model under context parallelism, the models, and the packs they are run on."""

import functools
import time

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from automodel_c.models import qwen3_5
from automodel_c.models.qwen3_5.config import FULL
from automodel_c.models.qwen3_5.step import Batch
from automodel_c.parallel import ContextParallel, sum_gradients, wire
from automodel_c.parallel.frame_plan import FrameSharding, plan_frames
from tests.models import packs
from tests.parallel.context_worker import groups
from tests.patch import models
from tests.ranks import here

SHARDED = {"enabled": True, "min_tokens": 0, "min_frames": 0, "min_local_patch_rows": 0}
CLIPS = [
    packs.document(9, ("image", 4, 8), 3, ("video", 3, 4, 8), 4, ("image", 6, 6), 2, seed=21),
    packs.document(3, ("video", 2, 4, 4), 30, seed=22),
]
PACKS = {
    "mixed": packs.pack(packs.PACKS["mixed"]),
    "gaps": packs.pack(packs.PACKS["mixed"], padding=3),
    "text": packs.pack(packs.PACKS["text"]),
    "clips": packs.pack(CLIPS),
    "padding": packs.pack([packs.document(2, ("image", 2, 4), 5, seed=23)], padding=24),
    "tiny": packs.pack([packs.document(3, ("image", 2, 2), 1, seed=24)]),
    "labels at the end": packs.pack(CLIPS),
}
PACKS["labels at the end"]["labels"][:-9] = -100
DOCUMENTS = {
    "mixed": packs.PACKS["mixed"], "gaps": packs.PACKS["mixed"], "text": packs.PACKS["text"], "clips": CLIPS,
    "padding": [packs.document(2, ("image", 2, 4), 5, seed=23)],
    "tiny": [packs.document(3, ("image", 2, 2), 1, seed=24)], "labels at the end": [],
}  # fmt: skip
for one in CLIPS:
    DOCUMENTS["labels at the end"].append({**one, "labels": one["labels"].clone()})
DOCUMENTS["labels at the end"][0]["labels"][:] = -100
DOCUMENTS["labels at the end"][1]["labels"][:-9] = -100
# family, depths of prediction, options of load, frozen tower
MODELS = {
    "experts": ("qwen3_5_moe", 2, {"aux_loss": "per_layer", "frame_sharding": SHARDED}, False),
    "dense": ("qwen3_5", 1, {"activation_checkpointing": True}, False),
    "frozen": ("qwen3_5_moe", 0, {"aux_loss": "transformers", "frame_sharding": SHARDED}, True),
}
MORE = {  # and keys of the text's configuration
    "key heads": ("qwen3_5", 1, {}, False, {"num_key_value_heads": 4}),
    "experts of key heads": ("qwen3_5_moe", 2, {"aux_loss": "per_layer"}, False, {"num_key_value_heads": 4}),
}


@functools.cache
def build(name, seed, group=None, **options):
    """A model of MODELS or MORE with random weights, the same in every process."""
    family, depths, more, frozen, *text = (MODELS | MORE)[name]
    mapping = models.config(family, **(text[0] if text else {})).to_dict()
    mapping["text_config"] |= {"mtp_num_hidden_layers": depths, "router_aux_loss_coef": 0.5}
    torch.manual_seed(seed)
    cp = None if group is None else ContextParallel(groups(group))
    model = packs.well_conditioned(qwen3_5.load(mapping, cp=cp, **more | options))
    with torch.no_grad():
        for key, p in model.named_parameters():
            if p.ndim == 1 and not key.endswith(("A_log", "dt_bias")):
                p.add_(torch.randn(p.shape) * 0.1)
    model.model.visual.requires_grad_(not frozen)
    return model.to(here())


def part(name, seed, pack, **options):
    """({"loss": ..., parameter: gradient}, metrics): this rank's parts."""
    model = build(name, seed, "world", **options)
    model.zero_grad(set_to_none=True)
    loss, metrics = model(PACKS[pack])
    loss.backward()
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())
    return {"loss": loss.detach(), **packs.gradients(model)}, metrics


def parts(cases):
    return [part(*case) for case in cases]


def bits(name, pack, other):
    """Whether recomputation, and another forward before backward, change a bit; and the bytes on the wire.

    Returns (what the plan says a forward sends, [(sent in forward, sent and received in backward), ...]): plain,
    recomputed, recomputed with the other forward in between.
    """
    sent, results = [], []
    for recompute, between in ((False, False), (True, False), (True, True)):
        model = build(name, 0, "world", activation_checkpointing=recompute)
        model.zero_grad(set_to_none=True)
        before = wire.sent
        loss, _ = model(PACKS[pack])
        forward = wire.sent - before
        later = model(PACKS[other])[0] if between else None
        before = wire.sent + wire.received
        loss.backward()
        sent.append((forward, wire.sent + wire.received - before))
        results.append({"loss": loss.detach(), **packs.gradients(model)})
        if between:
            later.backward()
    for found in results[1:]:
        for key, value in results[0].items():
            assert torch.equal(found[key], value), key
    return planned(model, PACKS[pack]), sent


def planned(model, batch):
    """Bytes that this rank sends in one forward."""
    text, prediction = model.config.text, 0 if model.mtp is None else len(model.mtp.layers)
    share = Batch(batch, model.config, "cpu", model.cp, prediction).share
    plan, full = share.plan, sum(kind == FULL for kind in text.layer_types)
    shape = text.num_attention_heads, text.num_key_value_heads, text.head_dim
    keys, values = text.linear_num_key_heads * text.linear_key_head_dim, text.linear_num_value_heads
    channels = 2 * keys + values * text.linear_value_head_dim
    states = plan.straddles.states(text.linear_key_head_dim, text.linear_value_head_dim).traffic(values)
    halo = plan.straddles.halo(text.linear_conv_kernel_dim).traffic(channels, torch.float32)
    attention = plan.attention(*shape, torch.float32).traffic()
    total = (full + prediction) * attention["sent"] + (len(text.layer_types) - full) * (states["sent"] + halo["sent"])
    loads = (plan.ranks - 1) * len(text.layer_types) * text.num_experts * 8 if model.aux_loss else 0
    return int(total[plan.rank]) + loads + _tokens_sent(model, share, batch) * text.hidden_size * 4


def _tokens_sent(model, share, batch):
    if not model.frame_sharding.enabled:
        return 0
    rank, merge = share.plan.rank, model.config.vision.spatial_merge_size
    places = torch.cat([torch.nonzero(batch["input_ids"] == token)[:, 0] for token in (packs.IMAGE, packs.VIDEO)])
    grids = torch.cat([batch[key] for key in ("image_grid_thw", "video_grid_thw")]).tolist()
    made = plan_frames(grids, share.plan.ranks, rank, merge=merge, alpha=96).tokens
    begin, sent = sum(made[:rank]), 0
    for other in range(share.plan.ranks):
        if other != rank:
            rows = _embedded_by(other, share, batch)
            sent += sum(int(place) in rows for place in places[begin : begin + made[rank]])
    return sent


def _embedded_by(rank, share, batch):
    """The rows that a rank embeds: its own, and those that its tokens' predictions look at."""
    local, ends = share.plan.local, batch["cu_seqlens"].tolist()[1:]
    rows = set(range(rank * local, (rank + 1) * local))
    for row in sorted(rows & set(range(ends[-1]))):
        end = next(end for end in ends if row < end)
        rows |= {min(row + k, end - 1) for k in range(1, share.depths + 1)}
    return rows


def evaluate(name, pack, rows):
    model = build(name, 0, "world")
    with torch.no_grad():
        return model.logits({k: v for k, v in PACKS[pack].items() if k != "labels"}, rows)


def one_token_too_few(name, pack, rank):
    model = build(name, 99, "world")
    if dist.get_rank() == rank:
        whole = model.model.visual.forward
        model.model.visual.forward = lambda *args, **kwargs: whole(*args, **kwargs)[:-1]
    model(PACKS[pack])


def refused():
    """The message for a tower that trains, shared with ranks of tensor parallelism."""
    model = build("experts", 98, "world")
    model.frame_sharding = FrameSharding.from_mapping(SHARDED | {"mesh_dims": ["cp", "tp"]})
    try:
        model(PACKS["clips"])
    except ValueError as error:
        model.model.visual.requires_grad_(False)
        model(PACKS["clips"])
        return str(error)


def bad_batch(rank):
    model = build("dense", 99, "world")
    batch = dict(PACKS["clips"])
    if dist.get_rank() == rank:
        batch["image_grid_thw"] = batch["image_grid_thw"][:-1]
    model(batch)


def rows_seen(pack, enabled, training):
    """How many rows of pixels this rank's tower runs in a forward."""
    model, seen = build("experts", 0, "world"), []
    whole, sharding = model.model.visual.forward, model.frame_sharding
    model.frame_sharding = FrameSharding.from_mapping(SHARDED | {"enabled": enabled})
    model.model.visual.forward = lambda pixels, **grid: seen.append(len(pixels)) or whole(pixels, **grid)
    try:
        with torch.set_grad_enabled(training):
            model(PACKS[pack]) if training else model.logits(PACKS[pack], [0])
    finally:
        model.model.visual.forward, model.frame_sharding = whole, sharding
    return seen


def raises_first(pack, case):
    """The loss before and after a forward that raises on every rank."""
    model, batch = build("experts", 0, "world"), dict(PACKS[pack])
    before, whole = model(batch)[0].item(), model.model.visual.forward
    if case == "tower":
        model.model.visual.forward = _raise
    else:
        batch["image_grid_thw"] = batch["image_grid_thw"][:-1]
    raised = False
    try:
        model(batch)
    except (KeyError, ValueError):
        raised = True
    model.model.visual.forward = whole
    return before, model(PACKS[pack])[0].item(), raised


def _without_media(batch):
    media = torch.isin(batch["input_ids"], torch.tensor([packs.IMAGE, packs.VIDEO]))
    kept = ("labels", "cu_seqlens", "position_ids")
    return {key: batch[key] for key in kept if key in batch} | {"input_ids": batch["input_ids"].masked_fill(media, 1)}


def _raise(*args, **kwargs):
    raise KeyError("the tower's own")


def _in_bf16(model):
    other = build("experts", 97, "world", dtype=torch.bfloat16)
    other.cp = model.cp
    return other


def _changed(model, batch, case):
    """(model, batch) of the odd rank."""
    if case == "documents":
        batch = {**batch, "cu_seqlens": batch["cu_seqlens"][[0, -1]]}
    elif case == "media":
        batch = _without_media(batch)
    elif case == "dtype":
        model = _in_bf16(model)
    elif case == "tower":
        model.model.visual.forward = _raise
    elif case == "sharding":
        model.frame_sharding = FrameSharding()
    elif case == "prediction":
        model.mtp = None
    elif case == "auxiliary loss":
        model.aux_loss = None
    return model, batch


def disagreements(cases, odd):
    """(message, rank that it names, seconds) of each case in a group of its own; one rank is the odd one."""
    found = []
    for case in cases:
        build.cache_clear()
        model, batch = build("experts", 97, "world"), PACKS["clips"]
        model.cp = ContextParallel(dist.new_group(list(range(dist.get_world_size()))))
        if dist.get_rank() == odd:
            model, batch = _changed(model, batch, case)
        began = time.monotonic()
        try:
            model(batch)[0].backward()
            found.append(("nothing", None, 0.0))
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            found.append((text, getattr(error, "rank", None), time.monotonic() - began))
    build.cache_clear()
    return found


def on_mesh(name, packs_of_dp, labels):
    """Gradients of a model sharded over dp 2 x cp 2 ranks, each dp rank with its own pack; and this rank's loss."""
    build.cache_clear()
    model = build(name, 0, "cp")
    dp = dist.get_group_rank(groups("dp"), dist.get_rank())
    mesh = dist.device_mesh.init_device_mesh("cpu", (4,), mesh_dim_names=("dp_cp",))
    assert model.cp.ranks == 2
    for unit in (*model.model.visual.blocks, model.model.visual, *model.model.language_model.layers, model.mtp, model):
        if unit is not None:
            fully_shard(unit, mesh=mesh)
    register_fsdp_forward_method(model, "logits")
    sum_gradients(model)
    loss, _ = model({**PACKS[packs_of_dp[dp]], "num_label_tokens": labels})
    loss.backward()
    build.cache_clear()
    grads = {key: p.grad.full_tensor() for key, p in model.named_parameters() if p.requires_grad}
    return {"loss": loss.detach(), **grads}
