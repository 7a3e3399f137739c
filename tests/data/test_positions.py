import pytest
import torch
from transformers import AutoConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeModel

from automodel_c.data.positions import mrope_positions

IMAGE = 9


def _ids(*runs):
    return torch.tensor([IMAGE if kind == "image" else 1 for kind, n in runs for _ in range(n)])


class _Reference:
    """transformers' own positions, without a model around them."""

    config = AutoConfig.for_model("qwen3_5_moe")
    get_vision_position_ids = Qwen3_5MoeModel.get_vision_position_ids

    def __call__(self, ids, grids):
        types = (ids == IMAGE).int()
        return Qwen3_5MoeModel.get_rope_index(self, ids[None], types[None], grids)[0][:, 0]


@pytest.mark.parametrize(
    "runs, grids",
    [
        pytest.param([("text", 5)], [], id="text"),
        pytest.param([("text", 3), ("image", 6), ("text", 2)], [[1, 4, 6]], id="image"),
        pytest.param([("image", 4), ("text", 1), ("image", 12), ("text", 1)], [[1, 4, 4], [1, 8, 6]], id="two-images"),
    ],
)
def test_mrope_positions(runs, grids):
    ids, grids = _ids(*runs), torch.tensor(grids, dtype=torch.int64).reshape(-1, 3)
    assert torch.equal(mrope_positions(ids, grids, IMAGE, 2), _Reference()(ids, grids))


@pytest.mark.parametrize(
    "runs, grids, message",
    [
        ([("image", 3)], [[1, 4, 4]], "asks for 4 image tokens at token 0"),
        ([("image", 4)], [], "more images than image_grid_thw"),
        ([("text", 4)], [[1, 4, 4]], "more images than input_ids"),
    ],
)
def test_mrope_positions_disagree(runs, grids, message):
    with pytest.raises(ValueError, match=message):
        mrope_positions(_ids(*runs), torch.tensor(grids, dtype=torch.int64).reshape(-1, 3), IMAGE, 2)
