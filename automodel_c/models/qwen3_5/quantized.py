"""Weights kept as 8-bit floats with a scale for every block, as published FP8 checkpoints hold them.

weight [.., R, C] float8 beside scale [.., ceil(R / r), ceil(C / c)] for blocks of r x c, 128 x 128 as a rule; the value
is weight * scale. Blocks at the right and lower edge are cut.
"""

import torch

SCALE = "_scale_inv"  # behind the key of the weight
BLOCK = (128, 128)
DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


def block_size(source):
    """(rows, columns) of a block, by the quantization_config of a config.json's mapping.

    NotImplementedError for another way of quantizing.
    """
    found = source.get("quantization_config") or source.get("text_config", {}).get("quantization_config") or {}
    method = found.get("quant_method", "fp8")
    if method != "fp8":
        raise NotImplementedError(f"load: quantization_config.quant_method is {method!r}; 'fp8' is supported")
    size = found.get("weight_block_size") or BLOCK
    if len(size) != 2 or not all(isinstance(n, int) and n > 0 for n in size):
        raise ValueError(f"load: quantization_config.weight_block_size is {size!r}, two numbers above 0 are needed")
    return tuple(size)


def scale_shape(shape, block):
    """The shape of the scales of a whole weight of `shape`."""
    return (*shape[:-2], *(-(-n // b) for n, b in zip(shape[-2:], block, strict=True)))


def scale_slices(slices, block):
    """The blocks that a slice of a weight lies in."""
    edges = [slice(s.start // b, -(-s.stop // b)) for s, b in zip(slices[-2:], block, strict=True)]
    return (*slices[:-2], *edges)


def dequantise(values, scales, slices, block):
    """float32 values of a slice of a weight. scales: of the blocks that it lies in, `scale_slices`."""
    values, scales = values.float(), scales.float()
    for axis, s, b in zip((-2, -1), slices[-2:], block, strict=True):
        block_of = torch.arange(s.start, s.stop) // b - s.start // b
        scales = scales.index_select(axis, block_of.to(scales.device))
    return values * scales
