"""One conversation into token ids, shifted labels, positions and patches."""

import torch

from .clips import check_clip_part
from .positions import media_types, mrope_positions

IGNORE_INDEX = -100


def encode_conversation(messages, images, processor, clips=()):
    """Tokenizes a conversation; only what the assistant says is a label.

    messages: a list of {"role", "content"}, content a string or a list of {"type": "image"}, {"type": "video"} and
    {"type": "text", "text"} parts. images: PIL images in order of appearance. processor: models.processor.Processor.
    clips: clips.Clip objects in order of appearance.
    Returns a dict of input_ids int64 [L], labels int64 [L] (shifted: labels[i] is the token after input_ids[i], or
    -100), position_ids int64 [3, L], mm_token_type_ids int64 [L] (0 text, 1 image, 2 video), pixel_values and
    pixel_values_videos fp32 [patches, width], image_grid_thw and video_grid_thw int64 [n, 3].
    ValueError when the number of images or clips differs from the parts of the messages, and as check_messages.
    """
    _check_media(messages, images, clips)
    pixel_values, image_grid = processor.patches(images)
    pixel_values_videos, video_grid = processor.video_patches(clips)
    ids, is_label = _tokens(messages, processor)
    expanded = {
        processor.image_token_id: [processor.image_tokens(grid) for grid in image_grid.tolist()],
        processor.video_token_id: [
            processor.video_tokens(grid, clip.seconds) for grid, clip in zip(video_grid.tolist(), clips, strict=True)
        ],
    }
    ids, is_label = _expand_media(ids, is_label, expanded, processor)
    labels = torch.where(is_label, ids, IGNORE_INDEX)[1:]
    ids = ids[:-1]
    types = media_types(ids, processor.image_token_id, processor.video_token_id)
    positions = mrope_positions(
        ids, image_grid, processor.image_token_id, processor.merge_size, video_grid_thw=video_grid,
        mm_token_type_ids=types,
    )  # fmt: skip
    return {
        "input_ids": ids,
        "labels": labels,
        "position_ids": positions,
        "mm_token_type_ids": types,
        "pixel_values": pixel_values,
        "image_grid_thw": image_grid,
        "pixel_values_videos": pixel_values_videos,
        "video_grid_thw": video_grid,
    }


def conversation_size(messages, images, processor, clips=()):
    """(tokens, patches) of what `encode_conversation` makes of a conversation, from the sizes of its media alone.

    images: (height, width) of each. clips: (frames, height, width, seconds) of each, as clips.clip_shape tells.
    """
    _check_media(messages, images, clips)
    grids = [processor.image_grid(*size) for size in images]
    clip_grids = [processor.video_grid(*clip[:3]) for clip in clips]
    expanded = {
        processor.image_token_id: [len(processor.image_tokens(grid)) for grid in grids],
        processor.video_token_id: [
            len(processor.video_tokens(grid, clip[3])) for grid, clip in zip(clip_grids, clips, strict=True)
        ],
    }
    ids, _ = _tokens(messages, processor)
    _check_placeholders(ids, expanded, processor)
    tokens = len(ids) + sum(sum(lengths) - len(lengths) for lengths in expanded.values())
    return tokens - 1, sum(t * h * w for t, h, w in grids + clip_grids)


def check_messages(messages):
    """ValueError, TypeError or KeyError where `messages` is no conversation of texts, images and videos that somebody
    answers.

    A chat template would leave out in silence what it does not know.
    """
    for message in messages:
        content = message["content"]
        if not isinstance(message.get("role"), str):
            raise ValueError("a message without a role")
        for part in [] if isinstance(content, str) else content:
            if part["type"] not in ("image", "video", "text"):
                raise ValueError(f"a part of type {part['type']!r}: only image, video and text are read")
            if part["type"] == "video":
                check_clip_part(part)
            if part["type"] == "text" and not isinstance(part.get("text"), str):
                raise ValueError("a text part without text")
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        raise ValueError("messages hold no assistant turn")
    if answers[0] == 0:
        raise ValueError("messages hold nothing before the first assistant turn")


def media_parts(messages, kind):
    """The parts of `messages` of type `kind`, "image" or "video", in order."""
    return [
        part
        for message in messages
        if not isinstance(message["content"], str)
        for part in message["content"]
        if part["type"] == kind
    ]


def _check_media(messages, images, clips):
    check_messages(messages)
    _check_count("images", "image", messages, images)
    _check_count("clips", "video", messages, clips)


def _check_count(name, kind, messages, given):
    parts = len(media_parts(messages, kind))
    if parts != len(given):
        raise ValueError(f"encode_conversation: {name} has {len(given)} elements, messages have {parts} {kind} parts")


def _tokens(messages, processor):
    """Ids and whether each is a label, two lists; one placeholder stands for an image or a video."""
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    ids, is_label = [], []
    for turn in answers:
        prompt = processor.render(messages[:turn], generation_prompt=True)
        whole = processor.render(messages[: turn + 1])
        if whole[: len(prompt)] != prompt or prompt[: len(ids)] != ids:
            raise ValueError(f"encode_conversation: the chat template changes turn {turn}'s prompt once it is answered")
        end = _end_of_turn(whole, len(prompt), processor.eos_token_id)
        is_label += [False] * (len(prompt) - len(ids)) + [i < end for i in range(len(prompt), len(whole))]
        ids = whole
    return ids, is_label


def _end_of_turn(ids, start, eos_token_id):
    """One past the end-of-turn token; what a template writes after it is no part of the answer."""
    for at in range(len(ids) - 1, start - 1, -1):
        if ids[at] == eos_token_id:
            return at + 1
    return len(ids)


def _check_placeholders(ids, expanded, processor):
    for token, name in ((processor.image_token_id, "image"), (processor.video_token_id, "video")):
        found, given = ids.count(token), len(expanded[token])
        if found != given:
            raise ValueError(f"encode_conversation: the text holds {found} {name} placeholders, {name}s are {given}")


def _expand_media(ids, is_label, expanded, processor):
    """(ids int64 [L], is_label bool [L]) with each placeholder replaced: `expanded` has, for the placeholder of a kind,
    the tokens of each medium in order."""
    _check_placeholders(ids, expanded, processor)
    media = {token: iter(tokens) for token, tokens in expanded.items()}
    whole, whole_is_label = [], []
    for token, labelled in zip(ids, is_label, strict=True):
        run = next(media[token]) if token in media else [token]
        whole += run
        whole_is_label += [labelled] * len(run)
    return torch.tensor(whole), torch.tensor(whole_is_label)
