"""Tiny random Qwen3.5 models, dense and with experts, and packs of documents for them."""

import copy

import torch
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from automodel_c.data.positions import mrope_positions

IMAGE, VIDEO = 90, 91
VOCAB = 96


def config(family="qwen3_5_moe", *, head_dim=16, vision_heads=2, **text):
    """A model of two gated-delta layers and two of full attention, and a tower of two blocks."""
    sizes = {
        "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 4, "full_attention_interval": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": head_dim, "intermediate_size": 48,
        "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 16,
        "max_position_embeddings": 512, "initializer_range": 0.1,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    }  # fmt: skip
    if family == "qwen3_5_moe":
        sizes |= {
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": vision_heads, "patch_size": 4,
        "num_position_embeddings": 16, "out_hidden_size": 32, "initializer_range": 0.1,
    }  # fmt: skip
    return AutoConfig.for_model(
        family, text_config=sizes | text, vision_config=vision, image_token_id=IMAGE, video_token_id=VIDEO,
        vision_start_token_id=92, vision_end_token_id=93,
    )  # fmt: skip


def build(family="qwen3_5_moe", *, seed=0, text_only=False, **options):
    """A model in training mode, equal for equal arguments; norms and biases are random too."""
    torch.manual_seed(seed)
    cfg = config(family, **options)
    auto, cfg = (AutoModelForCausalLM, cfg.text_config) if text_only else (AutoModelForImageTextToText, cfg)
    model = auto.from_config(cfg, experts_implementation="eager")
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 1 and not name.endswith(("A_log", "dt_bias")):
                p.add_(torch.randn(p.shape) * 0.1)
    return model.train()


class Exact(TorchFunctionMode):
    """float64 stays float64 where transformers' code goes to float32."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        first = args[0] if args else kwargs.get("input")
        if isinstance(first, torch.Tensor) and first.dtype == torch.float64:
            if func is torch.Tensor.float:
                return first
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in kwargs.items()}
            if func is torch.Tensor.matmul:
                args = tuple(a.double() for a in args)  # positions, which transformers 5.12 and 5.16 make float32
        return func(*args, **kwargs)


def in_float64(model):
    """A copy in float64, its rotary frequencies too; run it under Exact()."""
    twin = copy.deepcopy(model).double()
    for m in twin.modules():
        if hasattr(m, "inv_freq"):
            theta, n = getattr(m, "theta", None) or m.config.rope_parameters["rope_theta"], len(m.inv_freq)
            m.inv_freq = theta ** -(torch.arange(n, dtype=torch.float64) / n)
    return twin


def document(length, *, grids=(), videos=(), seed=0):
    """A document of `length` text tokens with images of (h, w) patches after the second, then videos of (t, h, w): dict
    of input_ids, labels [L], position_ids [3, L], pixel_values, image_grid_thw, pixel_values_videos, video_grid_thw.
    Two tokens of text stand before each frame of a video."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(0, 80, (length,), generator=generator)
    ids = [text[:2]]
    ids += [torch.full((h * w // 4,), IMAGE) for h, w in grids]
    for t, h, w in videos:
        ids += [torch.tensor([81, 82] + [VIDEO] * (h * w // 4))] * t
    ids = torch.cat([*ids, text[2:]])
    labels = torch.where((ids == IMAGE) | (ids == VIDEO), -100, ids)
    labels[: len(ids) // 3] = -100
    image_grid = torch.tensor([[1, h, w] for h, w in grids], dtype=torch.int64).reshape(-1, 3)
    video_grid = torch.tensor(videos, dtype=torch.int64).reshape(-1, 3)
    patches = [int(grid.prod(1).sum()) for grid in (image_grid, video_grid)]
    return {
        "input_ids": ids,
        "labels": labels,
        "position_ids": mrope_positions(ids, image_grid, IMAGE, 2, video_grid_thw=video_grid, video_token_id=VIDEO),
        "pixel_values": torch.randn(patches[0], 3 * 2 * 16, generator=generator),
        "image_grid_thw": image_grid,
        "pixel_values_videos": torch.randn(patches[1], 3 * 2 * 16, generator=generator),
        "video_grid_thw": video_grid,
    }


def pack(documents):
    """The documents end to end, as a batch of one row."""
    joined = {key: torch.cat([d[key] for d in documents], -1) for key in ("input_ids", "labels", "position_ids")}
    batch = {
        "input_ids": joined["input_ids"][None],
        "labels": joined["labels"][None],
        "position_ids": joined["position_ids"][:, None],
    }
    for keys in (("pixel_values", "image_grid_thw"), ("pixel_values_videos", "video_grid_thw")):
        media = {key: torch.cat([d[key] for d in documents]) for key in keys}
        batch |= media if len(media[keys[1]]) else {}
    return batch


def uneven():
    """Documents shorter and longer than a chunk of 64, equal lengths, one token, one and two images."""
    return [
        document(9, grids=[(4, 4)], seed=1),
        document(70, seed=2),
        document(3, grids=[(2, 4), (4, 4)], seed=3),
        document(9, seed=4),
        document(1, seed=5),
        document(9, seed=6),
    ]


def with_videos():
    """Documents with a video, with a video of other frames after an image, with two of each, and with neither."""
    return [
        document(9, videos=[(2, 4, 4)], seed=1),
        document(30, seed=2),
        document(5, grids=[(2, 4)], videos=[(3, 4, 2)], seed=3),
        document(7, grids=[(4, 4), (2, 2)], videos=[(1, 2, 2), (2, 2, 6)], seed=4),
        document(4, grids=[(2, 6)], seed=5),
    ]


def run(model, batch, **more):
    """{"loss": ..., parameter name: gradient} of one backward."""
    model.zero_grad(set_to_none=True)
    dtype = next(model.parameters()).dtype
    batch = {**batch, **{key: x.to(dtype) for key, x in batch.items() if key.startswith("pixel_values")}}
    loss = model(**batch, **more).loss if "_amcore_report" in vars(model) else _plain_loss(model, batch, **more)
    loss.backward()
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    return {"loss": loss.detach(), **grads}


def _plain_loss(model, batch, num_items_in_batch=None, **more):
    """transformers' own; multimodal models of 5.12 and 5.16 do not hand the count to their loss function."""
    if num_items_in_batch is None:
        return model(**batch, **more).loss
    logits = model(**{k: v for k, v in batch.items() if k != "labels"}, **more).logits
    return model.loss_function(
        logits=logits, labels=batch["labels"], vocab_size=VOCAB, num_items_in_batch=num_items_in_batch
    )


def run_each(model, documents):
    """As `run` on every document alone: losses and gradients summed, all divided by the labels of all documents."""
    count = sum(int((d["labels"][1:] != -100).sum()) for d in documents)
    total = {}
    for d in documents:
        found = run(model, pack([d]), num_items_in_batch=torch.tensor(count))
        total = {name: total.get(name, 0) + value for name, value in found.items()}
    return total
