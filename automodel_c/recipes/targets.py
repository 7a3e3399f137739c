"""The names that a recipe's `_target_` keys may hold. Names are looked up here, never imported by string."""

import difflib

_MODEL_CLASSES = (
    "NeMoAutoModelForImageTextToText",
    "nemo_automodel.NeMoAutoModelForImageTextToText",
    "AutoModelForImageTextToText",
    "transformers.AutoModelForImageTextToText",
)
_VIDEO_PROCESSORS = (  # models.video_processor stands for all of them
    "AutoVideoProcessor.from_pretrained",
    "Qwen3VLVideoProcessor",
    "Qwen3VLVideoProcessor.from_pretrained",
)

TARGETS = {
    "rng": {"StatefulRNG": "ranked", "nemo_automodel.components.training.rng.StatefulRNG": "ranked"},
    "model": {f"{name}.{how}": how for name in _MODEL_CLASSES for how in ("from_pretrained", "from_config")},
    "processor": {
        "build_processor": "build",
        "AutoProcessor.from_pretrained": "from_pretrained",
        "transformers.AutoProcessor.from_pretrained": "from_pretrained",
    },
    "video_processor": {f"{prefix}{name}": "video" for name in _VIDEO_PROCESSORS for prefix in ("", "transformers.")},
    "loss_fn": {
        "MaskedCrossEntropy": "masked",
        "nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy": "masked",
        "FusedLinearCrossEntropy": "fused_linear",
        "nemo_automodel.components.loss.linear_ce.FusedLinearCrossEntropy": "fused_linear",
    },
    "dataset": {"make_chat_jsonl_dataset": "chat", "make_digits_dataset": "digits"},
    "dataloader": {
        "StatefulDataLoader": "stateful",
        "torchdata.stateful_dataloader.StatefulDataLoader": "stateful",
    },
    "optimizer": {
        "FusedAdamW": "fused_adamw",
        "automodel_c.optim.FusedAdamW": "fused_adamw",
        "torch.optim.AdamW": "fused_adamw",
        "transformer_engine.pytorch.optimizers.FusedAdam": "fused_adamw",
        "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam": "fused_adamw",
    },
    "mp_policy": {
        "MixedPrecisionPolicy": "fsdp2",
        "torch.distributed.fsdp.MixedPrecisionPolicy": "fsdp2",
    },
    "recipe": {
        "FinetuneRecipeForVLM": "finetune_vlm",
        "nemo_automodel.recipes.vlm.finetune.FinetuneRecipeForVLM": "finetune_vlm",
    },
}

# names of NeMo Automodel that a recipe may know and this package does not carry out yet
NOT_YET = {
    "loss_fn": {
        "ChunkedCrossEntropy",
        "nemo_automodel.components.loss.chunked_ce.ChunkedCrossEntropy",
    },
    "dataset": {
        f"{prefix}make_{name}_dataset"
        for prefix in ("", "nemo_automodel.components.datasets.vlm.datasets.")
        for name in ("cord_v2", "medpix", "rdr")
    },
}
INSTEAD = {  # what to say in their place
    "loss_fn": "{key}=FusedLinearCrossEntropy",
    "dataset": "{key}=make_chat_jsonl_dataset, and {section}.path_or_dataset=<a JSONL, Parquet or Arrow file, or their"
    " folder>",
}


def wrong_targets(recipe, error):
    """A list of exceptions: `error` for each `_target_` (or `recipe`) that is in no table, naming the key and the
    nearest name, and NotImplementedError for each in NOT_YET, saying what to do."""
    sections = [
        ("recipe", "recipe", recipe.recipe),
        ("rng", "rng._target_", recipe.rng._target_),
        ("model", "model._target_", recipe.model._target_),
        ("processor", "processor._target_", recipe.processor._target_),
        ("video_processor", "processor.video_processor._target_", recipe.processor.video_processor._target_),
        ("loss_fn", "loss_fn._target_", recipe.loss_fn._target_),
        ("dataset", "dataset._target_", recipe.dataset._target_),
        ("dataloader", "dataloader._target_", recipe.dataloader._target_),
        ("optimizer", "optimizer._target_", recipe.optimizer._target_),
        ("mp_policy", "distributed.mp_policy._target_", recipe.distributed.mp_policy._target_),
    ]
    if recipe.validation_dataset is not None:
        sections.append(("dataset", "validation_dataset._target_", recipe.validation_dataset._target_))
    wrong = []
    for section, key, name in sections:
        known = TARGETS[section]
        if name in NOT_YET.get(section, ()):
            instead = INSTEAD[section].format(key=key, section=key.partition(".")[0])
            shown = " or ".join(map(repr, known))
            wrong.append(NotImplementedError(f"{key}={name!r} is not supported yet; only {shown} is: say {instead}"))
        elif name not in known:
            near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)[0]
            wrong.append(error(f"{key}: unknown name {name!r}; the nearest known one is {near!r}"))
    return wrong


def resolve(section, name):
    """What the name `name` means in `section`; `wrong_targets` finds nothing wrong with the name."""
    return TARGETS[section][name]
