from dataclasses import asdict

import pytest
import yaml

from automodel_c.parallel.frame_plan import FrameSharding
from automodel_c.recipes.config import RecipeError, frame_sharding, load_recipe

from .conftest import DIGITS

FRAMES = "distributed.multimodal.vision.frame_sharding"


def _frames(**keys):
    return {"distributed": {"multimodal": {"vision": {"frame_sharding": keys}}}}


@pytest.fixture
def recipe(tmp_path):
    """Writes a mapping as a recipe and loads it."""

    def load(tree, *overrides):
        path = tmp_path / "some.yaml"
        path.write_text(yaml.safe_dump(tree))
        return load_recipe(path, overrides)

    return load


def test_load_recipe_digits():
    recipe = load_recipe(DIGITS)
    assert recipe.output_dir == "runs/digits"
    assert recipe.pipeline.reduce_grad_per_microbatch is True
    assert recipe.rng.seed == recipe.seed == 1234


def test_load_recipe_overrides(recipe):
    loaded = recipe(
        {"optimizer": {"lr": 0.1}},
        "optimizer.lr=1e-3",
        "checkpoint.enabled=false",
        "optimizer.betas=[0.5, 0.6]",
        "output_dir=x=y",
        "wandb=null",
    )
    assert loaded.optimizer.lr == 1e-3 and loaded.checkpoint.enabled is False
    assert loaded.optimizer.betas == [0.5, 0.6] and loaded.output_dir == "x=y"


@pytest.mark.parametrize(
    "tree, message",
    [
        ({"optimiser": {}}, "unknown key optimiser; the nearest known key is optimizer"),
        ({"distributed": {"multimodal": {"visio": {}}}}, "multimodal.visio; .* distributed.multimodal.vision"),
        ({"step_scheduler": {"max_step": 1}}, "step_scheduler.max_step; .* is step_scheduler.max_steps"),
        ({"distributed": {"multimodal": {"visio": {}}}}, "multimodal.visio; .* is distributed.multimodal.vision"),
        ({"validation_dataset": {"splitt": "x"}}, "validation_dataset.splitt; .* validation_dataset.split"),
    ],
)
def test_load_recipe_unknown_key(recipe, tree, message):
    with pytest.raises(RecipeError, match=message):
        recipe(tree)


def test_load_recipe_unknown_override(recipe):
    with pytest.raises(RecipeError, match=r"optimizer\.lrr; the nearest known key is optimizer\.lr"):
        recipe({}, "optimizer.lrr=1")


@pytest.mark.parametrize(
    "tree, message",
    [
        ({"step_scheduler": {"max_steps": "many"}}, "step_scheduler.max_steps: expected int, found 'many'"),
        ({"step_scheduler": {"max_steps": True}}, "step_scheduler.max_steps: expected int, found True"),
        ({"step_scheduler": {"max_steps": 0}}, "step_scheduler.max_steps: expected at least 1, found 0"),
        ({"optimizer": {"lr": "fast"}}, "optimizer.lr: expected float, found 'fast'"),
        ({"optimizer": {"betas": [0.9]}}, "optimizer.betas: expected two numbers"),
        ({"optimizer": 3}, "optimizer: expected a mapping of keys, found 3"),
        ({"optimizer": {"lr": float("inf")}}, "optimizer.lr: expected a finite number, found inf"),
        ({"optimizer": {"eps": float("nan")}}, "optimizer.eps: expected at least 0, found nan"),
        ({"lr_scheduler": {"max_lr": -1}}, "lr_scheduler.max_lr: expected at least 0, found -1"),
        ({"lr_scheduler": {"lr_warmup_steps": -1}}, "lr_scheduler.lr_warmup_steps: expected at least 0, found -1"),
        ({"lr_scheduler": {"lr_decay_steps": 0}}, "lr_scheduler.lr_decay_steps: expected at least 1, found 0"),
        ({"clip_grad_norm": {"max_norm": -1}}, "clip_grad_norm.max_norm: expected at least 0, found -1"),
        ({"clip_grad_norm": {"max_norm": float("nan")}}, "clip_grad_norm.max_norm: expected at least 0, found nan"),
        ({"checkpoint": {"max_recent_checkpoints": 0}}, "max_recent_checkpoints: expected at least 1, found 0"),
        ({"dataset": {"limit": -5}}, "dataset.limit: expected at least 1, found -5"),
        ({"validation_dataset": {"limit": 0}}, "validation_dataset.limit: expected at least 1, found 0"),
        ({"dataloader": {"num_workers": -1}}, "dataloader.num_workers: expected at least 0, found -1"),
        ({"dist_env": {"timeout_minutes": float("inf")}}, "dist_env.timeout_minutes: expected a finite number"),
        ({"dist_env": {"backend": "glow"}}, "dist_env.backend: expected gloo, nccl or .*, found 'glow'"),
        ({"seed": -1}, "seed: expected at least 0, found -1"),
        ({"rng": {"seed": 2**32}}, "rng.seed: expected less than 4294967296, found 4294967296"),
        ({"processor": {"words": ["a", ""]}}, "processor.words: a word is empty"),
        ({"optimizer": {"_target_": "torch.optim.SGD"}}, "optimizer._target_: unknown name 'torch.optim.SGD'"),
        (
            {"processor": {"video_processor": {"max_frames": 0}}},
            "video_processor.max_frames: expected at least 1, found 0",
        ),
        ({"processor": {"video_processor": {"fps": 0}}}, "video_processor.fps: expected at least 0.001, found 0.0"),
        (
            {"processor": {"video_processor": {"size": {"longest": 1}}}},
            "size.longest; .* processor.video_processor.size.longest_edge",
        ),
        ({"processor": {"video_processor": {"_target_": "list"}}}, "video_processor._target_: unknown name 'list'"),
        ({"dataset": {"_target_": "make_digit_dataset"}}, "the nearest known one is 'make_digits_dataset'"),
        ({"distributed": {"cp_size": 0}}, "distributed.cp_size: expected at least 1, found 0"),
        ({"distributed": {"ep_size": 0}}, "distributed.ep_size: expected at least 1, found 0"),
        (
            {"distributed": {"ep_size": 2}, "model": {"operators": "patched"}},
            "^distributed.ep_size=2 needs model.operators: automodel_c$",
        ),
        ({"distributed": {"dp_size": 0}}, "distributed.dp_size: expected at least 1, found 0"),
        (
            {"distributed": {"cp_size": 2}, "model": {"operators": "patched"}},
            "^distributed.cp_size=2 needs model.operators: automodel_c$",
        ),
        (
            {"distributed": {"cp_size": 2}, "model": {"operators": "transformers"}},
            "^distributed.cp_size=2 needs model.operators: automodel_c$",
        ),
        (_frames(enabled="yes"), f"^{FRAMES}.enabled: expected bool, found 'yes'$"),
        (_frames(min_token=1), f"^unknown key {FRAMES}.min_token; the nearest known key is {FRAMES}.min_tokens$"),
        (_frames(min_tokens=-1), f"^{FRAMES}.min_tokens is -1: it must be a non-negative integer$"),
        (_frames(min_frames=1.5), f"^{FRAMES}.min_frames: expected int, found 1.5$"),
        (_frames(cost_alpha="AUTO"), f"^{FRAMES}.cost_alpha is 'AUTO': it must be a non-negative integer or .auto.$"),
        (_frames(mesh_dims=["tp"]), rf"^{FRAMES}.mesh_dims is \['tp'\], \[cp\] or \[cp, tp\] is needed$"),
        (
            _frames(enabled=True, mesh_dims=["cp", "tp"]),
            rf"^{FRAMES}.mesh_dims=\['cp', 'tp'\] needs freeze_config.freeze_vision_tower: ",
        ),
        (
            {**_frames(enabled=True), "model": {"operators": "patched"}},
            f"^{FRAMES}.enabled needs model.operators: automodel_c$",
        ),
        (
            {"packed_sequence": {"enabled": True, "pack_size": 8}, "model": {"operators": "transformers"}},
            "^packed_sequence.enabled needs model.operators: automodel_c or patched$",
        ),
    ],
)
def test_load_recipe_bad_value(recipe, tree, message):
    with pytest.raises(RecipeError, match=message):
        recipe(tree)


@pytest.mark.parametrize(
    "override",
    ["lr", "=3", "a.b=[1", "seed=2024-13-45", f"seed={'1' * 5000}", "seed=" + "[" * 3000],
    ids=lambda o: o[:12],
)
def test_load_recipe_bad_override(recipe, override):
    with pytest.raises(RecipeError, match="override"):
        recipe({}, override)


@pytest.mark.parametrize(
    "text, message",
    [
        (b"- 1\n", "a mapping of keys"),
        (b"a: [\n", "is not YAML"),
        (b"seed: !!python/object/apply:os.getpid []\n", "is not YAML"),  # nor is what would run code
        (None, "No such file"),
        (b"seed: \xff\n", "is not YAML"),
        (b"seed: 2024-13-45\n", "is not YAML"),
        (b"seed: " + b"[" * 3000, "is not YAML"),
    ],
    ids=range(7),
)
def test_load_recipe_bad_file(tmp_path, text, message):
    if text is not None:
        (tmp_path / "r.yaml").write_bytes(text)
    with pytest.raises(RecipeError, match=message):
        load_recipe(tmp_path / "r.yaml")


@pytest.mark.parametrize(
    "key, value",
    [
        ("distributed.moe.lm_head_precision", "float32"),
        ("checkpoint.best_metric_key", "accuracy"),
        ("checkpoint.model_save_format", "torch_save"),
        ("packed_sequence.attn_implementation", "flash_attention_2"),
        ("optimizer.exp_avg_dtype", "bfloat16"),
        ("dataloader.drop_last", "false"),
        ("loss_fn._target_", "ChunkedCrossEntropy"),
    ],
)
def test_load_recipe_not_supported(recipe, key, value):
    with pytest.raises(NotImplementedError, match=f"{key}=.* is not supported yet; only"):
        recipe({}, f"{key}={value}")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("distributed.strategy", "ddp"),
        ("distributed.activation_checkpointing", "partly"),
        ("distributed.activation_checkpointing_scope", "audio"),
        ("lr_scheduler.wsd_decay_steps", "0"),
        ("distributed.ep_size", "nothing"),
    ],
)
def test_load_recipe_bad_choice(recipe, key, value):
    with pytest.raises(RecipeError, match=rf"{key}: expected .*, found "):
        recipe({}, f"{key}={value}")


def test_load_recipe_none_is_null(recipe):
    assert recipe({"distributed": {"dp_size": "none", "reshard_after_forward": "none"}}).distributed.dp_size is None


def test_load_recipe_video_processor(recipe):
    section = {
        "_target_": "transformers.AutoVideoProcessor.from_pretrained",
        "size": {"shortest_edge": 1024, "longest_edge": 524288},
        "fps": 2,
        "max_frames": 8,
    }
    loaded = recipe({"processor": {"video_processor": section}}).processor.video_processor
    assert asdict(loaded) == {**section, "min_frames": None}
    assert asdict(recipe({"processor": {"video_processor": None}}).processor.video_processor)["fps"] is None


def test_load_recipe_context_parallel(recipe):
    """The defaults are FrameSharding's; ranks that share a tower with tensor parallelism may freeze it."""
    assert frame_sharding(recipe({}).distributed) == {**asdict(FrameSharding()), "mesh_dims": ["cp"]}
    given = {"enabled": True, "mesh_dims": ["cp", "tp"], "min_tokens": 0, "cost_alpha": 7}
    loaded = recipe({**_frames(**given), "freeze_config": {"freeze_vision_tower": True}}, "distributed.cp_size=32")
    assert loaded.distributed.cp_size == 32
    assert frame_sharding(loaded.distributed) == {**asdict(FrameSharding()), **given}
    given = {"enabled": True, "mesh_dims": ["cp"], "min_tokens": 0, "cost_alpha": "auto"}
    loaded = recipe(_frames(**given), "distributed.cp_size=32")
    assert frame_sharding(loaded.distributed) == {**asdict(FrameSharding()), **given}


@pytest.mark.parametrize(
    ("overrides", "reduced"),
    [
        ((), True),
        (("distributed.defer_fsdp_grad_sync=true",), False),
        (("pipeline.reduce_grad_per_microbatch=true", "distributed.reshard_after_forward=false"), True),
        (("distributed.cp_size=2", "distributed.tp_size=2"), True),
    ],
)
def test_load_recipe_megatron_fsdp(recipe, overrides, reduced):
    loaded = recipe({}, "distributed.strategy=megatron_fsdp", *overrides)
    assert loaded.pipeline.reduce_grad_per_microbatch is reduced is not loaded.distributed.defer_fsdp_grad_sync


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.operators=transformers", "megatron_fsdp needs model.operators: automodel_c"),
        ("distributed.ep_size=4", "megatron_fsdp needs distributed.ep_size=1, found 4"),
        ("distributed.pp_size=2", "megatron_fsdp needs distributed.pp_size=1, found 2"),
        ("distributed.moe.fp32_weight_grads=true", "megatron_fsdp needs distributed.moe.fp32_weight_grads=false"),
    ],
)
def test_load_recipe_megatron_fsdp_alone(recipe, override, words):
    with pytest.raises(RecipeError, match=words):
        recipe({}, "distributed.strategy=megatron_fsdp", override)


def test_load_recipe_megatron_fsdp_contradiction(recipe):
    given = "distributed.defer_fsdp_grad_sync=true", "distributed.reshard_after_forward=true"
    with pytest.raises(RecipeError, match="reshard_after_forward=true needs"):
        recipe({}, "distributed.strategy=megatron_fsdp", *given)


def test_load_recipe_stages_without_anything_to_train(recipe):
    with pytest.raises(RecipeError, match="the later stages would have nothing to train"):
        recipe({}, "distributed.pp_size=2", "freeze_config.freeze_language_model=true")


def test_load_recipe_off_values(recipe):
    off = {
        "ci": {"recipe_owner": "x", "time": "00:10:00", "anything": 1},
        "distributed": {
            "strategy": "fsdp2",
            "tp_size": 1,
            "cp_size": 1,
            "pp_size": 1,
            "ep_size": 1,
            "dp_size": None,
            "sequence_parallel": False,
            "_target_": "FSDP2Manager",
        },
        "packed_sequence": {"pack_size": 0},
        "checkpoint": {"is_async": False},
        "optimizer": {"_target_": "torch.optim.AdamW", "master_weights": True, "master_weight_dtype": "torch.float32"},
    }
    assert asdict(recipe(off))["ci"] == off["ci"]


@pytest.mark.parametrize(
    "defer, eager, expected",
    [
        (None, None, False),
        (True, None, False),
        (False, None, True),
        (None, True, True),
        (None, False, False),
        (False, True, True),
        (True, False, False),
    ],
)
def test_load_recipe_grad_sync(recipe, defer, eager, expected):
    tree = {"distributed": {"defer_fsdp_grad_sync": defer}, "pipeline": {"reduce_grad_per_microbatch": eager}}
    loaded = recipe(tree)
    assert loaded.pipeline.reduce_grad_per_microbatch is expected
    assert loaded.distributed.defer_fsdp_grad_sync is (not expected)


@pytest.mark.parametrize("value", [True, False])
def test_load_recipe_grad_sync_disagrees(recipe, value):
    tree = {"distributed": {"defer_fsdp_grad_sync": value}, "pipeline": {"reduce_grad_per_microbatch": value}}
    with pytest.raises(RecipeError, match=r"defer_fsdp_grad_sync and .*reduce_grad_per_microbatch are both"):
        recipe(tree)
