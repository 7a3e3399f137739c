import numpy as np
import pytest
import torch
from PIL import Image

from automodel_c.data.clips import Clip
from automodel_c.data.encode import encode_conversation

IMAGE = {"type": "image", "image": "x.png"}
VIDEO = {"type": "video", "video": "x.gif"}


def _user(*parts):
    return {"role": "user", "content": [p if isinstance(p, dict) else {"type": "text", "text": p} for p in parts]}


def _answer(text):
    return {"role": "assistant", "content": text}


def _image(side=32):
    return Image.new("RGB", (side, side), "white")


def _clip(groups=2, grey=0):
    return Clip(np.full((2 * groups, 32, 32, 3), grey, np.uint8), [0.25 + i for i in range(groups)])


def _labelled_text(sample, processor):
    kept = sample["labels"][sample["labels"] != -100].tolist()
    return processor.tokenizer.decode(kept)


def test_encode_conversation_labels_the_answer(processor):
    sample = encode_conversation([_user(IMAGE, "Which digit?"), _answer("7")], [_image()], processor)
    assert _labelled_text(sample, processor) == "7<|im_end|>"
    ids, labels = sample["input_ids"], sample["labels"]
    assert ids.shape == labels.shape
    places = (labels != -100).nonzero().flatten().tolist()
    assert places[1] == places[0] + 1 and ids[places[1]] == labels[places[0]], "labels are the next token"


def test_encode_conversation_labels_every_turn(processor):
    messages = [_user(IMAGE, "a?"), _answer("one"), _user("and b?"), _answer("two")]
    sample = encode_conversation(messages, [_image()], processor)
    assert _labelled_text(sample, processor) == "one<|im_end|>two<|im_end|>"


@pytest.mark.parametrize("images", [0, 1, 2])
def test_encode_conversation_expands_images(processor, images):
    sample = encode_conversation([_user(*[IMAGE] * images, "?"), _answer("1")], [_image()] * images, processor)
    assert sample["image_grid_thw"].tolist() == [[1, 4, 4]] * images
    assert sample["pixel_values"].shape == (16 * images, 3 * 2 * 8 * 8)
    assert (sample["input_ids"] == processor.image_token_id).sum() == 4 * images


@pytest.mark.parametrize("parts, images", [(1, 0), (1, 2), (0, 1)])
def test_encode_conversation_image_count(processor, parts, images):
    with pytest.raises(ValueError, match=f"images has {images} elements, messages have {parts} image parts"):
        encode_conversation([_user(*[IMAGE] * parts, "?"), _answer("1")], [_image()] * images, processor)


def test_encode_conversation_placeholder_in_text(processor):
    with pytest.raises(ValueError, match="the text holds 2 image placeholders, images are 1"):
        encode_conversation([_user(IMAGE, "<|image_pad|>"), _answer("1")], [_image()], processor)


def test_encode_conversation_expands_videos(processor):
    """Every temporal patch has its time and a run of its own; media keep their order by kind."""
    messages = [_user(VIDEO, "a", IMAGE, VIDEO, "?"), _answer("1")]
    sample = encode_conversation(messages, [_image()], processor, [_clip(2, grey=9), _clip(3, grey=200)])
    assert sample["video_grid_thw"].tolist() == [[2, 4, 4], [3, 4, 4]]
    assert sample["image_grid_thw"].tolist() == [[1, 4, 4]] and sample["pixel_values"].shape[0] == 16
    pixels = sample["pixel_values_videos"]
    assert pixels.shape == (80, 3 * 2 * 8 * 8) and (pixels[:32] < 0).all() and (pixels[32:] > 0).all()
    run, image = "<|vision_start|>" + "<|video_pad|>" * 4 + "<|vision_end|>", "<|image_pad|>" * 4
    first = f"<|vision_start|><0.2 seconds>{run}<1.2 seconds>{run}<|vision_end|>"
    second = f"<|vision_start|><0.2 seconds>{run}<1.2 seconds>{run}<2.2 seconds>{run}<|vision_end|>"
    text = processor.tokenizer.decode(sample["input_ids"])
    assert f"{first}a<|vision_start|>{image}<|vision_end|>{second}?" in text
    types = sample["mm_token_type_ids"]
    assert torch.equal(types == 2, sample["input_ids"] == processor.video_token_id) and (types == 2).sum() == 20
    assert torch.equal(types == 1, sample["input_ids"] == processor.image_token_id) and (types == 1).sum() == 4
    assert _labelled_text(sample, processor) == "1<|im_end|>"
    assert sample["position_ids"].shape == (3, len(types))


@pytest.mark.parametrize("parts, clips", [(1, 0), (1, 2), (0, 1)])
def test_encode_conversation_clip_count(processor, parts, clips):
    with pytest.raises(ValueError, match=f"clips has {clips} elements, messages have {parts} video parts"):
        encode_conversation([_user(*[VIDEO] * parts, "?"), _answer("1")], [], processor, [_clip()] * clips)


def test_encode_conversation_video_placeholder_in_text(processor):
    with pytest.raises(ValueError, match="the text holds 2 video placeholders, videos are 1"):
        encode_conversation([_user(VIDEO, "<|video_pad|>"), _answer("1")], [], processor, [_clip()])


def test_encode_conversation_no_answer(processor):
    with pytest.raises(ValueError, match="no assistant turn"):
        encode_conversation([_user("?")], [], processor)
