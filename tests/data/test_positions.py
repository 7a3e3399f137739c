import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeModel

from automodel_c.data.positions import IMAGE as IMAGE_TYPE
from automodel_c.data.positions import TEXT, VIDEO, mrope_positions, pack_positions

IMAGE = 9


def _ids(*runs):
    return torch.tensor([IMAGE if kind == "image" else 1 for kind, n in runs for _ in range(n)])


class _Reference:
    """transformers' own positions, without a model around them."""

    config = AutoConfig.for_model("qwen3_5_moe")
    get_vision_position_ids = Qwen3_5MoeModel.get_vision_position_ids

    def __call__(self, ids, grids):
        return self.of_types((ids == IMAGE).int(), grids)

    def of_types(self, types, grids, video_grids=None):
        ids = torch.zeros(1, len(types), dtype=torch.int64)
        return Qwen3_5MoeModel.get_rope_index(self, ids, types[None], grids, video_grids)[0][:, 0]


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


def test_published_examples():
    types = [0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0]
    found = pack_positions(types, np.array([[0, 11]]), [[1, 4, 6]], [], 2, "test").tolist()
    assert found == [
        [0, 1, 2, 3, 3, 3, 3, 3, 3, 6, 7],
        [0, 1, 2, 3, 3, 3, 4, 4, 4, 6, 7],
        [0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7],
    ]
    types = [0, 2, 2, 0, 2, 2, 0]
    found = pack_positions(types, np.array([[0, 7]]), [], [[2, 2, 4]], 2, "test").tolist()
    assert found == [[0, 1, 1, 3, 4, 4, 6], [0, 1, 1, 3, 4, 4, 6], [0, 1, 2, 3, 4, 5, 6]]


_SIDE = st.integers(1, 3).map(lambda n: 2 * n)
_MEDIA = st.one_of(
    st.tuples(st.just("text"), st.integers(0, 4)),
    st.tuples(st.just("image"), _SIDE, _SIDE),
    st.tuples(st.just("video"), st.integers(1, 3), _SIDE, _SIDE),
)


def _lay_out(parts):
    """(types, image grids, video grids) of a document; a text token before each image and each frame."""
    types, grids = [], {"image": [], "video": []}
    for kind, *sizes in parts:
        if kind == "text":
            types += [TEXT] * sizes[0]
            continue
        t, h, w = [1, *sizes][-3:]
        grids[kind].append([t, h, w])
        for _ in range(t):
            types += [TEXT] + [IMAGE_TYPE if kind == "image" else VIDEO] * (h * w // 4)
    return types, grids["image"], grids["video"]


@given(st.lists(st.lists(_MEDIA, max_size=4), max_size=4), st.integers(0, 2))
def test_documents_of_a_pack_are_transformers_each(documents, padding):
    types, docs, images, videos, expected = [], [], [], [], []
    for parts in documents:
        own, own_images, own_videos = _lay_out(parts)
        docs.append([len(types), len(types) + len(own)])
        types += own + [IMAGE_TYPE] * padding  # which is no image there
        images, videos = images + own_images, videos + own_videos
        if own:
            grids = [torch.tensor(g, dtype=torch.int64).reshape(-1, 3) for g in (own_images, own_videos)]
            expected.append(_Reference().of_types(torch.tensor(own), *grids))
        expected.append(torch.zeros(3, padding, dtype=torch.int64))
    found = pack_positions(types, np.array(docs).reshape(-1, 2), images, videos, 2, "test")
    assert torch.equal(torch.from_numpy(found), torch.cat([torch.zeros(3, 0, dtype=torch.int64), *expected], 1))


def test_media_may_follow_each_other():
    apart = pack_positions([1, 0, 1, 0], np.array([[0, 4]]), [[1, 2, 2]] * 2, [], 2, "test")
    assert apart[0].tolist() == [0, 1, 2, 3]
    found = pack_positions([1, 1, 1, 0], np.array([[0, 4]]), [[1, 2, 4], [1, 2, 2]], [], 2, "test")
    assert found.tolist() == [[0, 0, 2, 3], [0, 0, 2, 3], [0, 1, 2, 3]]


@pytest.mark.parametrize(
    "docs, grids, message",
    [
        ([[0, 2], [2, 6]], [[1, 4, 4]], "image_grid_thw asks for 4 image tokens at token 1, found fewer"),
        ([[0, 6]], [[1, 2, 2], [1, 2, 4]], "input_ids holds more images than image_grid_thw names"),
        ([[0, 6]], [[1, 4, 4], [1, 2, 2]], "image_grid_thw names more images than input_ids holds"),
        ([[0, 6]], [[1, 0, 4]], "image_grid_thw holds a grid without a whole token"),
    ],
)
def test_a_pack_whose_media_disagree(docs, grids, message):
    with pytest.raises(ValueError, match=f"test: {message}"):
        pack_positions([0, 1, 1, 1, 1, 0], np.array(docs), grids, [], 2, "test")
