"""transformers alone reads held-out digits with the model that `make demo` exported.

python examples/digits_answer.py [model folder] [data folder]
"""

import json
import sys
from pathlib import Path

import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

folder = sys.argv[1] if len(sys.argv) > 1 else "runs/digits_cp2/hf"
data = Path(sys.argv[2] if len(sys.argv) > 2 else ".cache/digits")

model = AutoModelForImageTextToText.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder)
images = AutoImageProcessor.from_pretrained(folder)  # AutoProcessor would ask for torchvision, to read clips


def answer(question, image):
    """What the model says to a user's turn with one image in it."""
    pixels = images([image], return_tensors="pt")
    text = tokenizer.apply_chat_template([question], tokenize=False, add_generation_prompt=True)
    count = int(pixels["image_grid_thw"].prod()) // images.merge_size**2  # tokens that the image takes
    text = text.replace("<|image_pad|>", "<|image_pad|>" * count)
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    is_image = (ids == model.config.image_token_id).int()
    whole = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        mm_token_type_ids=is_image,
        **pixels,
        max_new_tokens=4,
        do_sample=False,
    )
    return tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=True)


lines = (data / "held_out.jsonl").read_text(encoding="utf-8").splitlines()
conversations = [json.loads(line)["messages"] for line in lines]
about_images = [turns for turns in conversations if turns[0]["content"][0]["type"] == "image"]
for user, assistant in about_images[:10]:
    with Image.open(data / user["content"][0]["image"]) as picture:
        said = answer(user, picture.convert("RGB"))
    print(f"{user['content'][0]['image']}: says {said}, is {assistant['content']}")
