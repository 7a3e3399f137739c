"""Weights are read from safetensors; a pickle in a model directory is not, and its code does not run."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from automodel_c.models import qwen3_5
from automodel_c.models.build import _transformers, directory_config
from automodel_c.recipes.schema import Model
from tests.models import packs


def test_a_directory_of_pickles(tmp_path):
    folder = tmp_path / "model"
    packs.checkpoint(folder, "qwen3_5")
    state = {}
    for path in folder.glob("*.safetensors"):
        state |= load_file(path)
        path.unlink()
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    torch.save(state, folder / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        _transformers(folder, AutoConfig.from_pretrained(folder), "sdpa")
    with pytest.raises(ValueError, match=r"holds no \*\.safetensors"):
        qwen3_5.load(folder)


def test_a_configuration_with_code(tmp_path):
    """At a terminal transformers would ask whether it may."""
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}, "text_config": {}})
    )
    (tmp_path / "own.py").write_text("raise SystemExit('it ran')\n")
    with pytest.raises(ValueError, match="trust_remote_code"):
        directory_config(tmp_path, Model())
