"""One conversation into token ids, shifted labels, positions and patches."""

import torch

from .positions import mrope_positions

IGNORE_INDEX = -100


def encode_conversation(messages, images, processor):
    """Tokenizes a conversation; only what the assistant says is a label.

    messages: a list of {"role", "content"}, content a string or a list of {"type": "image"} and
    {"type": "text", "text"} parts. images: PIL images in order of appearance. processor: models.processor.Processor.
    Returns a dict of input_ids int64 [L], labels int64 [L] (shifted: labels[i] is the token after input_ids[i], or
    -100), position_ids int64 [3, L], pixel_values fp32 [patches, width], image_grid_thw int64 [n, 3].
    ValueError when the number of images differs from the image parts of the messages, and as check_messages.
    """
    check_messages(messages)
    _check_images(messages, images)
    pixel_values, grid = processor.patches(images)
    ids, is_label = _tokens(messages, processor)
    ids, is_label = _expand_images(ids, is_label, grid, processor)
    labels = torch.where(is_label, ids, IGNORE_INDEX)[1:]
    ids = ids[:-1]
    return {
        "input_ids": ids,
        "labels": labels,
        "position_ids": mrope_positions(ids, grid, processor.image_token_id, processor.merge_size),
        "pixel_values": pixel_values,
        "image_grid_thw": grid,
    }


def check_messages(messages):
    """ValueError, TypeError or KeyError where `messages` is no conversation of texts and images that somebody answers.

    A chat template would leave out in silence what it does not know.
    """
    for message in messages:
        content = message["content"]
        if not isinstance(message.get("role"), str):
            raise ValueError("a message without a role")
        for part in [] if isinstance(content, str) else content:
            if part["type"] not in ("image", "text"):
                raise ValueError(f"a part of type {part['type']!r}: only image and text are read")
            if part["type"] == "text" and not isinstance(part.get("text"), str):
                raise ValueError("a text part without text")
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        raise ValueError("messages hold no assistant turn")
    if answers[0] == 0:
        raise ValueError("messages hold nothing before the first assistant turn")


def image_parts(messages):
    """The image parts of `messages`, in order."""
    return [
        part
        for message in messages
        if not isinstance(message["content"], str)
        for part in message["content"]
        if part["type"] == "image"
    ]


def _check_images(messages, images):
    parts = len(image_parts(messages))
    if parts != len(images):
        raise ValueError(f"encode_conversation: images has {len(images)} elements, messages have {parts} image parts")


def _tokens(messages, processor):
    """ids int64 [L] with one placeholder an image, is_label bool [L]."""
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
    return torch.tensor(ids), torch.tensor(is_label)


def _end_of_turn(ids, start, eos_token_id):
    """One past the end-of-turn token; what a template writes after it is no part of the answer."""
    for at in range(len(ids) - 1, start - 1, -1):
        if ids[at] == eos_token_id:
            return at + 1
    return len(ids)


def _expand_images(ids, is_label, grid, processor):
    """Repeats each image placeholder once for every merged patch of its image."""
    places = (ids == processor.image_token_id).nonzero().flatten()
    if len(places) != len(grid):
        raise ValueError(
            f"encode_conversation: the text holds {len(places)} image placeholders, images are {len(grid)}"
        )
    repeats = torch.ones_like(ids)
    repeats[places] = grid.prod(1) // processor.merge_size**2
    return ids.repeat_interleave(repeats), is_label.repeat_interleave(repeats)
