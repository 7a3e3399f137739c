"""Multimodal rotary positions of one conversation, or of every document of a pack."""

import numpy as np
import torch

TEXT, IMAGE, VIDEO = range(3)


def media_types(input_ids, image_token_id, video_token_id=None):
    """TEXT, IMAGE or VIDEO of every token, from its id: int64 of input_ids' shape (mm_token_type_ids)."""
    types = (input_ids == image_token_id).to(torch.int64) * IMAGE
    return types if video_token_id is None else types.masked_fill(input_ids == video_token_id, VIDEO)


def mrope_positions(
    input_ids, image_grid_thw, image_token_id, merge_size, *, video_grid_thw=None, video_token_id=None,
    mm_token_type_ids=None, docs=None,
):  # fmt: skip
    """Axis positions (time, height, width) of every token: int64 [3, L], on the host.

    input_ids: int64 [L]; an image is a run of t*(h/merge)*(w/merge) tokens equal to image_token_id, each of the t
    frames of a video a run of (h/merge)*(w/merge) equal to video_token_id. image_grid_thw, video_grid_thw: int64
    [n, 3] in patches, in order of appearance. mm_token_type_ids: int [L], 0 text, 1 image, 2 video, decides where it
    is given. docs: int64 [N, 2], start and end of each document, None for a single one; positions begin at 0 in each.
    Text advances all axes by one; a frame holds one position in time, counts its rows and columns, and
    advances by the longer side of its merged grid. ValueError when runs and grids disagree.
    """
    if mm_token_type_ids is None:
        types = media_types(input_ids, image_token_id, video_token_id)
    elif mm_token_type_ids.shape == input_ids.shape:
        types = mm_token_type_ids
    else:
        raise ValueError(
            f"mrope_positions: mm_token_type_ids has shape {list(mm_token_type_ids.shape)},"
            f" input_ids has {list(input_ids.shape)}"
        )
    docs = np.array([[0, types.numel()]]) if docs is None else docs
    grids = [[] if grid is None else torch.as_tensor(grid).cpu().numpy() for grid in (image_grid_thw, video_grid_thw)]
    return torch.from_numpy(pack_positions(types.cpu().numpy(), docs, *grids, merge_size, "mrope_positions"))


def pack_positions(types, docs, image_grids, video_grids, merge_size, name):
    """Axis positions int64 [3, T] of a pack, from 0 in every document; 0 in padding. NumPy on the host.

    types: [T], TEXT, IMAGE or VIDEO of each token. docs: int64 [N, 2], start and end of each document. image_grids,
    video_grids: [n, 3] frames, rows and columns in patches, in order of appearance. A video's frames are images of
    their own, which text may part. Media may follow each other without text between.
    ValueError, naming the function `name`, when grids and runs of tokens disagree or a run leaves its document.
    """
    types = np.asarray(types)
    doc = np.full(len(types), -1)
    for index, (start, end) in enumerate(docs):
        doc[start:end] = index
    step = (types == TEXT).astype(np.int64)
    offsets = np.zeros((3, len(types)), dtype=np.int64)
    for kind, word, grids in ((IMAGE, "image", image_grids), (VIDEO, "video", video_grids)):
        grids = np.asarray(grids, dtype=np.int64).reshape(-1, 3)
        sizes = grids // np.array([1, merge_size, merge_size])
        if kind == VIDEO:
            sizes = np.repeat(sizes, sizes[:, 0], axis=0)
            sizes[:, 0] = 1
        tokens = np.flatnonzero((types == kind) & (doc >= 0))
        _place(step, offsets, tokens, doc, sizes, name, word)
    before = step.cumsum() - step
    for start, end in docs:
        offsets[:, start:end] += before[start:end] - before[start : start + 1]
    return offsets


def _place(step, offsets, tokens, doc, sizes, name, word):
    """Writes the offsets inside each grid of `sizes` [n, 3], and how far the text after it has moved on."""
    areas = sizes.prod(1)
    if (areas < 1).any():
        raise ValueError(f"{name}: {word}_grid_thw holds a grid without a whole token")
    ends = areas.cumsum()
    fit = int((ends <= len(tokens)).sum())
    if fit < len(areas):
        first = ends[fit] - areas[fit]
        if first == len(tokens):
            raise ValueError(f"{name}: {word}_grid_thw names more {word}s than input_ids holds")
        _raise_short(name, word, areas[fit], tokens[first])
    if areas.sum() < len(tokens):
        raise ValueError(f"{name}: input_ids holds more {word}s than {word}_grid_thw names")
    first, last = tokens[ends - areas], tokens[ends - 1]
    broken = np.flatnonzero((last - first + 1 != areas) | (doc[first] != doc[last]))
    if len(broken):
        _raise_short(name, word, areas[broken[0]], first[broken[0]])
    at = np.arange(len(tokens)) - (ends - areas).repeat(areas)
    _, rows, columns = sizes.repeat(areas, axis=0).T
    offsets[1, tokens] = at // columns % rows
    offsets[2, tokens] = at % columns
    step[last] = sizes[:, 1:].max(1, initial=0)


def _raise_short(name, word, area, token):
    raise ValueError(f"{name}: {word}_grid_thw asks for {area} {word} tokens at token {token}, found fewer")
