"""Tokenizer, image and video processor, from configuration or from a directory."""

import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoImageProcessor, AutoTokenizer, Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

from ..data.positions import IMAGE
from .video_processor import video_processor_for

IMAGE_TOKEN, VIDEO_TOKEN = "<|image_pad|>", "<|video_pad|>"
VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"
SPECIAL_TOKENS = {  # token -> the key of Qwen3_5MoeConfig that holds its id
    "<|endoftext|>": None,
    "<|im_start|>": None,
    "<|im_end|>": None,
    VISION_START: "vision_start_token_id",
    VISION_END: "vision_end_token_id",
    IMAGE_TOKEN: "image_token_id",
    VIDEO_TOKEN: "video_token_id",
}
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\n' }}
{%- if message.content is string -%}
{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}
{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif part.type == 'video' -%}
{{ '<|vision_start|><|video_pad|><|vision_end|>' }}
{%- else -%}
{{ part.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{ '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\n' }}
{%- endif -%}
"""


class Processor:
    """What data needs to know of a model: its tokenizer, its patches, its special ids."""

    def __init__(self, tokenizer, image_processor, video_processor=None):
        self.tokenizer = tokenizer
        self.image_processor = image_processor
        self.video_processor = video_processor or video_processor_for(image_processor)
        self.merge_size = image_processor.merge_size
        self.image_token_id = tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
        self.video_token_id = tokenizer.convert_tokens_to_ids(VIDEO_TOKEN)
        self.vision_start_id = tokenizer.convert_tokens_to_ids(VISION_START)
        self.vision_end_id = tokenizer.convert_tokens_to_ids(VISION_END)
        self.eos_token_id = tokenizer.eos_token_id
        self.pad_token_id = tokenizer.pad_token_id
        self._time_ids = {}

    def render(self, messages, *, generation_prompt=False):
        """Token ids (a list) of messages through the chat template, one placeholder token an image or video."""
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation_prompt)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def patches(self, images):
        """PIL images -> (pixel_values fp32 [patches, C*T*P*P], image_grid_thw int64 [n, 3])."""
        if not images:
            p = self.image_processor
            return torch.empty(0, 3 * p.temporal_patch_size * p.patch_size**2), torch.empty(0, 3, dtype=torch.int64)
        made = self.image_processor(images, return_tensors="pt")
        return made["pixel_values"].float(), made["image_grid_thw"]

    def video_patches(self, clips):
        """data.clips.Clip objects -> (pixel_values_videos fp32 [patches, C*T*P*P], video_grid_thw int64 [n, 3])."""
        return self.video_processor([clip.frames for clip in clips])

    def image_grid(self, height, width):
        """[1, h, w] patches of an image of so many pixels."""
        p = self.image_processor
        bounds = {"min_pixels": p.size["shortest_edge"], "max_pixels": p.size["longest_edge"]}
        rows, columns = height, width
        if p.do_resize:
            rows, columns = smart_resize(height, width, factor=p.patch_size * p.merge_size, **bounds)
        return [1, rows // p.patch_size, columns // p.patch_size]

    def video_grid(self, frames, height, width):
        """[t, h, w] patches of so many seen frames."""
        p = self.video_processor
        rows, columns = p.frame_size(frames, height, width)
        return [-(-frames // p.temporal_patch_size), rows // p.patch_size, columns // p.patch_size]

    def image_tokens(self, grid):
        """Token ids (a list) that an image's placeholder stands for."""
        t, h, w = grid
        return [self.image_token_id] * (t * h * w // self.merge_size**2)

    def video_tokens(self, grid, seconds):
        """Token ids (a list) that a video's placeholder stands for: of each temporal patch its time, then a run of
        video tokens between a vision start and end of its own, as transformers' processor writes them."""
        t, h, w = grid
        if len(seconds) != t:
            raise ValueError(f"video_tokens: seconds has {len(seconds)} elements, the grid has {t} temporal patches")
        run = [self.vision_start_id, *[self.video_token_id] * (h * w // self.merge_size**2), self.vision_end_id]
        return [token for second in seconds for token in (*self._time_tokens(f"{second:.1f}"), *run)]

    def _time_tokens(self, second):
        if second not in self._time_ids:
            text = f"<{second} seconds>"
            self._time_ids[second] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return self._time_ids[second]

    def dummy_sample(self):
        """A sample of one black image of the least size and no label."""
        merge = self.merge_size
        width = self.patches([])[0].shape[1]
        no_pixels, no_grid = self.video_patches([])
        return {
            "input_ids": torch.tensor([self.image_token_id]),
            "labels": torch.tensor([-100]),
            "position_ids": torch.zeros(3, 1, dtype=torch.int64),
            "pixel_values": torch.zeros(merge * merge, width),
            "image_grid_thw": torch.tensor([[1, merge, merge]]),
            "pixel_values_videos": no_pixels,
            "video_grid_thw": no_grid,
            "mm_token_type_ids": torch.tensor([IMAGE]),
        }

    def save_pretrained(self, folder):
        """Writes the files that AutoTokenizer, AutoImageProcessor and AutoVideoProcessor read."""
        self.tokenizer.save_pretrained(folder)
        self.image_processor.save_pretrained(folder)
        self.video_processor.save_pretrained(folder)


def load_processor(folder, *, min_pixels=None, max_pixels=None, video=None):
    """The Processor of a model directory; min_pixels and max_pixels bound an image's area. video: a mapping of keys of
    VideoProcessor that overrule the directory's."""
    here = {"local_files_only": True, "trust_remote_code": False}  # without the last, somebody at a terminal is asked
    tokenizer = AutoTokenizer.from_pretrained(folder, **here)
    bounds = {k: v for k, v in (("min_pixels", min_pixels), ("max_pixels", max_pixels)) if v is not None}
    image_processor = AutoImageProcessor.from_pretrained(folder, backend="pil", **here, **bounds)
    return Processor(tokenizer, image_processor, video_processor_for(image_processor, folder, **(video or {})))


def build_processor(vision_config, *, words=(), min_pixels=None, max_pixels=None, video=None):
    """A byte-level Processor made from configuration alone.

    vision_config: a mapping with patch_size, temporal_patch_size, spatial_merge_size. words: strings that become
    one token each where the pre-tokenizer leaves them whole (a leading blank is part of a word). The ids of the
    special tokens follow the bytes and the words; see special_token_ids. video: a mapping of keys of VideoProcessor.
    """
    vocab = {letter: i for i, letter in enumerate(sorted(ByteLevel.alphabet()))}
    merges = []
    for word in words or ():
        _add_word(_as_bytes(word), vocab, merges)
    for token in SPECIAL_TOKENS:
        vocab[token] = len(vocab)
    tokenizer = Qwen3_5Tokenizer(
        vocab=vocab,
        merges=merges,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=list(SPECIAL_TOKENS),
        chat_template=CHAT_TEMPLATE,
    )
    bounds = {k: v for k, v in (("min_pixels", min_pixels), ("max_pixels", max_pixels)) if v is not None}
    image_processor = Qwen2VLImageProcessorPil(
        patch_size=vision_config["patch_size"],
        temporal_patch_size=vision_config["temporal_patch_size"],
        merge_size=vision_config["spatial_merge_size"],
        **bounds,
    )
    return Processor(tokenizer, image_processor, video_processor_for(image_processor, **(video or {})))


def special_token_ids(processor):
    """The ids that a model configuration must hold, by its keys."""
    ids = processor.tokenizer.convert_tokens_to_ids
    return {key: ids(token) for token, key in SPECIAL_TOKENS.items() if key is not None}


def _as_bytes(word):
    """A word in the byte-level alphabet."""
    return "".join(piece for piece, _ in ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(word))


def _add_word(word, vocab, merges):
    head = word[0]
    for letter in word[1:]:
        if head + letter not in vocab:
            vocab[head + letter] = len(vocab)
            merges.append((head, letter))
        head += letter
