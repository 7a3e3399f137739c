import json

import pytest
import torch
from PIL import Image

from automodel_c.data.chat import ChatDataset


@pytest.fixture
def written(tmp_path):
    """Eight conversations, each with an image of its own grey."""
    lines = []
    for i in range(8):
        Image.new("L", (32, 32), 30 * i).save(tmp_path / f"{i}.png")
        content = [{"type": "image", "image": f"{i}.png"}, {"type": "text", "text": "?"}]
        lines.append(
            json.dumps({"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": str(i)}]})
        )
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path / "a.jsonl"


def _greys(dataset):
    return [float(dataset[i]["pixel_values"][0, 0]) for i in range(len(dataset))]


def test_every_line(written, processor):
    dataset = ChatDataset(written, processor)
    assert len(dataset) == 8 and _greys(dataset) == sorted(_greys(dataset))
    assert len(ChatDataset(written, processor, limit=3)) == 3


@pytest.fixture
def with_clips(written):
    """The eight images, and four conversations about two of them one after another."""
    lines = []
    for i in range(4):
        names = [f"{i}.png"] * 2 + [f"{i + 4}.png"] * 2
        content = [{"type": "video", "video": names, "fps": 2}, {"type": "text", "text": "?"}]
        messages = [{"role": "user", "content": content}, {"role": "assistant", "content": f"{i}{i + 4}"}]
        lines.append(json.dumps({"messages": messages}))
    with open(written, "a") as file:
        file.write("\n".join(lines) + "\n")
    return written


def test_of_videos(with_clips, processor):
    dataset = ChatDataset(with_clips, processor)
    greys = {i: dataset[i]["pixel_values"][0] for i in range(8)}
    for i in range(4):
        sample = dataset[8 + i]
        assert sample["video_grid_thw"].tolist() == [[2, 4, 4]] and len(sample["image_grid_thw"]) == 0
        first, second = sample["pixel_values_videos"].reshape(2, 16, -1)
        assert torch.equal(first[0], greys[i]) and torch.equal(second[0], greys[i + 4]), "a frame is as an image"


def test_shuffle_deals_videos_among_videos(with_clips, processor):
    plain = ChatDataset(with_clips, processor)
    dealt = ChatDataset(with_clips, processor, shuffle_images=True, seed=3)
    videos = [[data._conversation(i)[2] for i in range(len(data))] for data in (plain, dealt)]
    clips = [[part["video"] for parts in whose for part in parts] for whose in videos]
    assert clips[0] != clips[1] and sorted(clips[0]) == sorted(clips[1])
    assert [[len(parts) for parts in whose] for whose in videos] == [[0] * 8 + [1] * 4] * 2


def test_cache(written, processor):
    dataset = ChatDataset(written, processor, cache=True)
    assert dataset[2] is dataset[2]


def test_shuffle_images(written, processor):
    plain = ChatDataset(written, processor)
    dealt = ChatDataset(written, processor, shuffle_images=True, seed=1)
    again = ChatDataset(written, processor, shuffle_images=True, seed=1)
    assert _greys(dealt) == _greys(again) != _greys(plain)
    assert sorted(_greys(dealt)) == _greys(plain), "every image is dealt once"
    assert all(torch.equal(dealt[i]["labels"], plain[i]["labels"]) for i in range(8)), "answers stay"


@pytest.mark.parametrize("line", ["{", "{}", '{"messages": [{}]}', '{"messages": 3}'])
def test_bad_line(written, processor, line):
    with open(written, "a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match="line 9: not a conversation"):
        ChatDataset(written, processor)


def _turn(role, content):
    return {"role": role, "content": content}


@pytest.mark.parametrize(
    "messages, words",
    [
        ([_turn("user", [{"type": "audio", "audio": "a.wav"}]), _turn("assistant", "5")], "a part of type 'audio'"),
        ([_turn("user", [{"type": "video"}]), _turn("assistant", "5")], "a video part without a file name"),
        (
            [_turn("user", [{"type": "video", "video": "a.mp4", "start": 3}]), _turn("assistant", "5")],
            "a video part with 'start'",
        ),
        ([_turn("user", [{"type": "image_url", "image_url": "0.png"}]), _turn("assistant", "5")], "type 'image_url'"),
        ([_turn("user", [{"type": "text", "txt": "?"}]), _turn("assistant", "5")], "a text part without text"),
        ([_turn("user", [{"type": "image"}]), _turn("assistant", "5")], "an image part without a file name"),
        (
            [_turn("user", [{"type": "image", "image": 5}]), _turn("assistant", "5")],
            "an image part without a file name",
        ),
        ([{"content": "?"}, _turn("assistant", "5")], "a message without a role"),
        ([_turn(5, "?"), _turn("assistant", "5")], "a message without a role"),
        ([_turn("user", "?")], "no assistant turn"),
        ([], "no assistant turn"),
        ([_turn("assistant", "5")], "nothing before the first assistant turn"),
    ],
)
def test_says_what_is_wrong_with_a_line(written, processor, messages, words):
    """Nothing is left out in silence, and nothing waits for the step that reads the line."""
    with open(written, "a") as file:
        file.write(json.dumps({"messages": messages}) + "\n")
    with pytest.raises(ValueError, match=f"line 9: not a conversation .*{words}"):
        ChatDataset(written, processor)
