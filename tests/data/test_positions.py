import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeModel

from automodel_c.data.positions import IMAGE as IMAGE_KIND
from automodel_c.data.positions import TEXT, media_types, mrope_positions, pack_positions
from automodel_c.data.positions import VIDEO as VIDEO_KIND

IMAGE, VIDEO = 9, 8
KINDS = {"image": IMAGE, "video": VIDEO, "text": 1}


def _ids(*runs):
    return torch.tensor([KINDS[kind] for kind, n in runs for _ in range(n)])


def _grids(grids):
    return torch.tensor(grids, dtype=torch.int64).reshape(-1, 3)


class _Reference:
    """transformers' own positions, without a model around them."""

    config = AutoConfig.for_model("qwen3_5_moe")
    get_vision_position_ids = Qwen3_5MoeModel.get_vision_position_ids

    def __call__(self, ids, grids, videos=None):
        types = media_types(ids, IMAGE, VIDEO)
        return Qwen3_5MoeModel.get_rope_index(self, ids[None], types[None], grids, videos)[0][:, 0]


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


def test_mrope_positions_of_a_video():
    """The example of the published model: frames are images that text parts."""
    ids = _ids(("text", 1), ("video", 2), ("text", 1), ("video", 2), ("text", 1))
    found = mrope_positions(ids, None, IMAGE, 2, video_grid_thw=_grids([[2, 2, 4]]), video_token_id=VIDEO)
    assert found.tolist() == [[0, 1, 1, 3, 4, 4, 6], [0, 1, 1, 3, 4, 4, 6], [0, 1, 2, 3, 4, 5, 6]]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_mrope_positions_are_transformers(data):
    """Images and videos of any size in any order, text between them as in a conversation."""
    sides = st.integers(1, 4).map(lambda n: 2 * n)
    runs, images, videos = [("text", data.draw(st.integers(0, 3)))], [], []
    for kind in data.draw(st.lists(st.sampled_from(["image", "video"]), max_size=5)):
        t, h, w = data.draw(st.integers(1, 4)) if kind == "video" else 1, data.draw(sides), data.draw(sides)
        (images if kind == "image" else videos).append([t, h, w])
        for _ in range(t):
            runs += [(kind, h * w // 4), ("text", data.draw(st.integers(1, 7)))]
    ids = _ids(*runs, ("text", 1))
    expected = _Reference()(ids, _grids(images), _grids(videos))
    keys = {"video_grid_thw": _grids(videos), "video_token_id": VIDEO}
    assert torch.equal(mrope_positions(ids, _grids(images), IMAGE, 2, **keys), expected)
    types = media_types(ids, IMAGE, VIDEO)
    told = mrope_positions(torch.ones_like(ids), _grids(images), IMAGE, 2, mm_token_type_ids=types, **keys)
    assert torch.equal(told, expected), "types that are given win"


def test_mrope_positions_of_a_pack_begin_anew():
    first = _ids(("text", 2), ("image", 4), ("text", 1), ("video", 1), ("text", 3))
    second = _ids(("video", 4), ("text", 1), ("video", 4), ("text", 1), ("image", 6))
    keys = {"video_token_id": VIDEO}
    alone = [
        mrope_positions(first, _grids([[1, 4, 4]]), IMAGE, 2, video_grid_thw=_grids([[1, 2, 2]]), **keys),
        mrope_positions(second, _grids([[1, 4, 6]]), IMAGE, 2, video_grid_thw=_grids([[2, 4, 4]]), **keys),
    ]
    ids = torch.cat([first, second, _ids(("text", 3))])
    n, m = len(first), len(first) + len(second)
    found = mrope_positions(
        ids, _grids([[1, 4, 4], [1, 4, 6]]), IMAGE, 2, video_grid_thw=_grids([[1, 2, 2], [2, 4, 4]]),
        docs=[[0, n], [n, m]], **keys,
    )  # fmt: skip
    assert torch.equal(found, torch.cat([*alone, torch.zeros(3, 3, dtype=torch.int64)], 1))


@pytest.mark.parametrize(
    "runs, videos, message",
    [
        ([("video", 3)], [[1, 4, 4]], "video_grid_thw asks for 4 video tokens at token 0, found fewer"),
        ([("video", 4), ("text", 1), ("video", 3)], [[2, 4, 4]], "asks for 4 video tokens at token 5, found fewer"),
        ([("video", 4)], [], "more videos than video_grid_thw"),
        ([("text", 4)], [[1, 4, 4]], "more videos than input_ids"),
        ([("video", 2), ("text", 1), ("video", 2)], [[1, 4, 4]], "asks for 4 video tokens at token 0, found fewer"),
    ],
)
def test_mrope_positions_disagree_about_videos(runs, videos, message):
    with pytest.raises(ValueError, match=message):
        mrope_positions(_ids(*runs), None, IMAGE, 2, video_grid_thw=_grids(videos), video_token_id=VIDEO)


def test_mrope_positions_types_of_another_shape():
    with pytest.raises(ValueError, match=r"mm_token_type_ids has shape \[2\], input_ids has \[3\]"):
        mrope_positions(_ids(("text", 3)), None, IMAGE, 2, mm_token_type_ids=torch.zeros(2, dtype=torch.int64))


def test_media_types():
    assert media_types(torch.tensor([1, 7, 7, 2, 8, 3]), 7, 8).tolist() == [0, 1, 1, 0, 2, 0]
    assert media_types(torch.tensor([1, 7, 8]), 7).tolist() == [0, 1, 0]


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
            types += [TEXT] + [IMAGE_KIND if kind == "image" else VIDEO_KIND] * (h * w // 4)
    return types, grids["image"], grids["video"]


@given(st.lists(st.lists(_MEDIA, max_size=4), max_size=4), st.integers(0, 2))
def test_documents_of_a_pack_are_transformers_each(documents, padding):
    types, docs, images, videos, expected = [], [], [], [], []
    for parts in documents:
        own, own_images, own_videos = _lay_out(parts)
        docs.append([len(types), len(types) + len(own)])
        types += own + [IMAGE_KIND] * padding  # which is no image there
        images, videos = images + own_images, videos + own_videos
        if own:
            grids = [torch.tensor(g, dtype=torch.int64).reshape(-1, 3) for g in (own_images, own_videos)]
            ids = torch.tensor([1, IMAGE, VIDEO])[torch.tensor(own)]
            expected.append(_Reference()(ids, *grids))
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
