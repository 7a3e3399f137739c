"""The model of a checkpoint as a Hugging Face directory: what `automodel-c export` runs."""

from pathlib import Path

from ..models.build import build_model, materialise
from ..models.export import export_hf
from ..models.parallelize import parallelize_qwen3_5
from .checkpoint import checkpoints_of, load_model, sound_folder
from .runtime import seed_model, start_ranks
from .targets import resolve


def export(recipe, folder):
    """Writes the model of the step folder that `recipe.checkpoint.restore_from` is or points to, made by a run of
    `recipe`, to `folder`.

    recipe: schema.Recipe. Any number of ranks may have written the checkpoint, any number may read it, whatever the
    recipe says of dp, cp, tp, pp and ep; rank 0 writes.
    ValueError when restore_from is no whole checkpoint, or not one of this recipe's model.
    """
    section = recipe.distributed
    section.dp_size = None
    section.cp_size = section.tp_size = section.pp_size = section.ep_size = 1
    with start_ranks(recipe) as runtime:
        seed_model(recipe)
        model, processor = build_model(
            recipe.model,
            recipe.processor,
            resolve("model", recipe.model._target_),
            resolve("processor", recipe.processor._target_),
        )
        model = materialise(parallelize_qwen3_5(model, runtime.mesh), runtime.device, weights=False)
        load_model(sound_folder(recipe.checkpoint.restore_from, checkpoints_of(recipe)), model)
        export_hf(model, processor, Path(folder))
