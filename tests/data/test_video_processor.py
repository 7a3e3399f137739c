"""Frames, sizes, times and patches of clips against transformers' formulas, which run without torchvision."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor, smart_resize

from automodel_c.models.processor import build_processor, load_processor
from automodel_c.models.video_processor import VideoProcessor, video_processor_for

SIZE = {"shortest_edge": 1024, "longest_edge": 524288}


def processor(**keys):
    plain = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.5] * 3, "size": SIZE}
    return VideoProcessor(**{**plain, "image_std": [0.5] * 3, **keys})


@pytest.mark.parametrize(
    ("clip", "least", "size", "tokens"),
    [
        ((8, 720, 1280), 1024, (192, 320), 240),
        ((8, 256, 256), 1024, (256, 256), 256),
        ((7, 480, 640), 1024, (224, 288), 252),
        ((2, 20, 2000), 1024, (32, 3200), 100),
        ((4, 32, 32), 131072, (192, 192), 72),
        ((2, 1080, 1920), 1024, (384, 672), 252),
    ],
)
def test_frame_size(clip, least, size, tokens):
    video = processor(size={**SIZE, "shortest_edge": least})
    assert video.frame_size(*clip) == size
    _, grid = video([np.zeros((*clip, 3), np.uint8)])
    assert int(grid.prod()) // 4 == tokens


def test_frame_size_refuses_a_line():
    with pytest.raises(ValueError, match="32x8000 has an aspect of 250, at most 200"):
        processor().frame_size(2, 20, 5000)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 40), st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 10**6), st.integers(1, 10**7))
def test_frame_size_is_transformers(pairs, height, width, least, more):
    keys = {"factor": 32, "min_pixels": least, "max_pixels": least + more}
    video = processor(size={"shortest_edge": least, "longest_edge": least + more})
    try:
        expected = smart_resize(2 * pairs, height, width, **keys)
    except ValueError:
        with pytest.raises(ValueError, match="aspect"):
            video.frame_size(2 * pairs, height, width)
        return
    assert video.frame_size(2 * pairs, height, width) == expected


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 5000), st.floats(0.5, 120), st.floats(0.1, 60), st.integers(1, 8), st.integers(8, 64))
def test_frame_indices_are_transformers_where_they_fill_a_patch(frames, raw_fps, fps, least, most):
    video = processor(min_frames=least, max_frames=most)
    metadata = SimpleNamespace(total_num_frames=frames, fps=raw_fps)
    keys = SimpleNamespace(fps=2, min_frames=least, max_frames=most)
    expected = Qwen3VLVideoProcessor.sample_frames(keys, metadata, fps=fps)
    found = video.frame_indices(frames, raw_fps, fps=fps)
    assert len(found) == len(expected) + len(expected) % 2
    if len(expected) % 2 == 0:
        assert found.tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("frames", "raw_fps", "indices"),
    [
        (30, 10.0, [0, 6, 12, 17, 23, 29]),  # three seconds at two frames
        (3, 30.0, [0, 1, 1, 2]),  # all three, and one twice
        (1, 30.0, [0, 0]),
        (1000, 1.0, [0, 143, 285, 428, 571, 714, 856, 999]),  # no more than eight
        (10, 1.0, [0, 1, 3, 4, 5, 6, 8, 9]),
        (100, 100.0, [0, 33, 66, 99]),  # no fewer than four
    ],
)
def test_frame_indices(frames, raw_fps, indices):
    assert processor(max_frames=8).frame_indices(frames, raw_fps).tolist() == indices


def test_frame_indices_refuses():
    with pytest.raises(ValueError, match="the clip has no frames"):
        processor().frame_indices(0, 2.0)
    with pytest.raises(ValueError, match="raw_fps is unknown"):
        processor().frame_indices(4, None)


@pytest.mark.parametrize("indices", [[0, 1], [0, 7, 9, 30], [0, 5, 8]])
def test_seconds_are_transformers(indices):
    expected = Qwen3VLProcessor._calculate_timestamps(None, list(indices), 24.0, 2)
    assert processor().seconds(indices, 24.0) == expected


def clip_of(rng, frames, height, width):
    return rng.integers(0, 256, (frames, height, width, 3), dtype=np.uint8)


@pytest.mark.parametrize("shape", [(4, 64, 64), (6, 70, 50), (3, 33, 95), (1, 20, 64)])
def test_pixels_are_the_image_processors(rng, shape):
    """Each frame as an image of its own: both halves of a temporal patch, bit for bit."""
    images = Qwen2VLImageProcessorPil(patch_size=16, min_pixels=1024, max_pixels=4096)
    frames = shape[0] + shape[0] % 2
    video = video_processor_for(images, size={"shortest_edge": 1024 * frames, "longest_edge": 4096 * frames})
    clip = clip_of(rng, *shape)
    pixels, grid = video([clip])
    _, h, w = grid[0].tolist()
    found = pixels.reshape(frames // 2, h * w, 3, 2, 256)
    for index in range(frames):
        frame = Image.fromarray(clip[min(index, shape[0] - 1)]).resize((w * 16, h * 16), Image.Resampling.BICUBIC)
        made = images([frame], return_tensors="pt")
        assert made["image_grid_thw"].tolist() == [[1, h, w]]
        assert torch.equal(found[index // 2, :, :, index % 2], made["pixel_values"].reshape(h * w, 3, 2, 256)[:, :, 0])


def test_patches_are_transformers(rng):
    clip = clip_of(rng, 5, 64, 96)
    pixels, grid = processor()([clip])
    frames = torch.from_numpy(clip).permute(0, 3, 1, 2)[None].double()
    frames = ((frames * (1 / 255)).float() - 0.5) / 0.5
    expected, *thw = Qwen3VLVideoProcessor.patchify(None, frames, 16, 2, 2)
    assert grid.tolist() == [thw] and torch.equal(pixels, expected[0])


def test_clips_of_different_sizes_and_none(rng):
    video = processor()
    clips = [clip_of(rng, 4, 32, 64), clip_of(rng, 2, 64, 64)]
    pixels, grid = video(clips)
    assert grid.tolist() == [[2, 2, 4], [1, 4, 4]]
    assert torch.equal(pixels, torch.cat([video([clip])[0] for clip in clips]))
    pixels, grid = video([])
    assert pixels.shape == (0, 3 * 2 * 256) and grid.shape == (0, 3)


@pytest.mark.parametrize(
    "clip", [np.zeros((0, 32, 32, 3), np.uint8), np.zeros((2, 32, 32, 3)), np.zeros((2, 32, 32), np.uint8)]
)
def test_refuses_what_is_no_clip(clip):
    with pytest.raises(ValueError, match=r"a clip is uint8 \[frames, height, width, 3\], found"):
        processor()([clip])


def test_saved_and_read_again(tmp_path):
    vision = {"patch_size": 8, "temporal_patch_size": 2, "spatial_merge_size": 2}
    built = build_processor(vision, video={"fps": 3.0, "max_frames": 8, "size": {"shortest_edge": 2048}})
    built.save_pretrained(tmp_path)
    again = load_processor(tmp_path)
    assert vars(again.video_processor) == vars(built.video_processor)
    assert again.video_processor.size == {"shortest_edge": 2048, "longest_edge": 16 * 16 * 2 * 2 * 2 * 6144}
    other = load_processor(tmp_path, video={"fps": None, "size": {"longest_edge": 9999, "shortest_edge": None}})
    assert other.video_processor.fps == 3.0
    assert other.video_processor.size == {"shortest_edge": 2048, "longest_edge": 9999}


def test_reads_what_transformers_writes(tmp_path):
    stored = {"size": {"shortest_edge": 4096, "longest_edge": 25165824}, "fps": 1, "image_mean": [0, 0, 0]}
    (tmp_path / "processor_config.json").write_text(json.dumps({"video_processor": stored}))
    video = video_processor_for(Qwen2VLImageProcessorPil(patch_size=16), tmp_path)
    assert video.size["longest_edge"] == 25165824 and video.fps == 1 and video.image_mean == [0, 0, 0]
    assert video.image_std == list(Qwen2VLImageProcessorPil.image_std), "where the file says nothing, as images"


def test_video_tokens_are_transformers():
    """The ids of the text that transformers' processor writes, its outer vision start and end included."""
    ours = build_processor({"patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2}, words=[" seconds"])
    theirs = object.__new__(Qwen3VLProcessor)
    theirs.image_token, theirs.video_token = "<|image_pad|>", "<|video_pad|>"
    theirs.vision_start_token, theirs.vision_end_token = "<|vision_start|>", "<|vision_end|>"
    theirs.video_processor = SimpleNamespace(merge_size=2, temporal_patch_size=2)
    indices, grid = [0, 13, 26, 39, 52], torch.tensor([[3, 4, 6]])
    told = {"video_grid_thw": grid, "video_metadata": [SimpleNamespace(fps=24.0, frames_indices=list(indices))]}
    messages = [{"role": "user", "content": [{"type": "video", "video": "x"}, {"type": "text", "text": "<0.3 ?"}]}]
    text = ours.tokenizer.apply_chat_template(messages, tokenize=False)
    (text,), _ = theirs.get_text_with_replacements([text], [], [theirs.replace_video_token(told, 0)])
    expected = ours.tokenizer(text, add_special_tokens=False)["input_ids"]
    run = ours.video_tokens(grid[0].tolist(), ours.video_processor.seconds(indices, 24.0))
    found = [t for token in ours.render(messages) for t in (run if token == ours.video_token_id else [token])]
    assert found == expected
    with pytest.raises(ValueError, match="seconds has 1 elements, the grid has 3 temporal patches"):
        ours.video_tokens(grid[0].tolist(), [0.5])
