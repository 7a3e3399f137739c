"""Float64 oracle of the reductions, from their definition."""

import torch


def reduce_parts(parts, scale):
    """parts [R, n], any floating dtype -> [n] float64: ``scale`` times the sum over the first axis."""
    out = torch.zeros(parts.shape[1], dtype=torch.float64, device=parts.device)
    for part in parts:
        out = out + part.double()
    return out * scale


def reduce_scatter(inputs, rank, scale):
    """inputs: R buffers [R * n], rank r's at index r -> [n] float64: slice ``rank`` of their scaled sum."""
    whole = reduce_parts(torch.stack(list(inputs)), scale)
    return whole.view(len(inputs), -1)[rank]
