"""transformers alone says what is on an image, with the model that the walk trained.

python examples/own_images/ask.py own_images/images/held_out_000.png [question] [model folder]
"""

import sys
from pathlib import Path

import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

name = sys.argv[1]
question = sys.argv[2] if len(sys.argv) > 2 else "What is this?"
folder = sys.argv[3] if len(sys.argv) > 3 else "runs/own_images/hf"
if not Path(folder).is_dir():
    sys.exit(f"{folder} is not there: automodel-c train examples/own_images/recipe.yaml writes it")

model = AutoModelForImageTextToText.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder)
images = AutoImageProcessor.from_pretrained(folder)  # AutoProcessor would ask for torchvision, to read clips

with Image.open(name) as picture:
    pixels = images([picture.convert("RGB")], return_tensors="pt")
turn = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}
text = tokenizer.apply_chat_template([turn], tokenize=False, add_generation_prompt=True)
count = int(pixels["image_grid_thw"].prod()) // images.merge_size**2  # tokens that the image takes
ids = tokenizer(text.replace("<|image_pad|>", "<|image_pad|>" * count), return_tensors="pt")["input_ids"]
is_image = (ids == model.config.image_token_id).int()
options = {"attention_mask": torch.ones_like(ids), "mm_token_type_ids": is_image, "max_new_tokens": 8}
whole = model.generate(input_ids=ids, do_sample=False, **options, **pixels)
print(tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=True))
