"""Multimodal rotary positions of one conversation."""

import torch


def mrope_positions(input_ids, image_grid_thw, image_token_id, merge_size):
    """Axis positions (time, height, width) of every token.

    input_ids: int64 [L]; each image is a run of t*(h/merge)*(w/merge) tokens equal to image_token_id.
    image_grid_thw: int64 [n, 3] in patches, in order of appearance. Returns int64 [3, L].
    Text advances all axes by one; an image holds one position in time, counts its rows and columns, and
    advances by the longer side of its merged grid. ValueError when runs and grids disagree.
    """
    length = input_ids.numel()
    positions = torch.empty(3, length, dtype=torch.int64)
    is_image = (input_ids == image_token_id).tolist()
    grids = iter(image_grid_thw.tolist())
    at = now = 0
    while at < length:
        if not is_image[at]:
            positions[:, at] = now
            at, now = at + 1, now + 1
            continue
        grid = _image_grid(next(grids, None), merge_size)
        size = grid.shape[1]
        if at + size > length or not all(is_image[at:at + size]):
            raise ValueError(f"mrope_positions: image_grid_thw asks for {size} image tokens at token {at}, found fewer")
        positions[:, at:at + size] = grid + now
        at, now = at + size, now + int(grid.max()) + 1
    if next(grids, None) is not None:
        raise ValueError("mrope_positions: image_grid_thw names more images than input_ids holds")
    return positions


def _image_grid(thw, merge_size):
    if thw is None:
        raise ValueError("mrope_positions: input_ids holds more images than image_grid_thw names")
    t, h, w = thw
    rows = torch.arange(h // merge_size)
    columns = torch.arange(w // merge_size)
    row, column = torch.meshgrid(rows, columns, indexing="ij")
    one = torch.stack([torch.zeros_like(row), row, column]).reshape(3, -1)
    return one.repeat(1, t)
