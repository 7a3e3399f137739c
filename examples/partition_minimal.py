"""Frames over ranks, and documents of a pack: automodel_c needs NumPy alone for these."""

import itertools

import numpy as np

import automodel_c as amc

# Four large frames and many small ones over eight ranks: balance cost, not count.
patches = np.array([1024] * 4 + [112] * 400)
for alpha in (0, 3456):
    cuts = amc.frame_partition(patches, 8, alpha=alpha)
    cost = patches * (patches + alpha)
    parts = [int(cost[start:end].sum()) for start, end in itertools.pairwise(cuts)]
    print(f"alpha {alpha:4}: cuts {cuts.tolist()}, largest part {max(parts) / (sum(parts) / 8):.3f} of the mean")

# Documents out of packed ids: 0 is padding, and an id that comes back is another document.
print("documents:", amc.docs_from_ids([0, 7, 7, 0, 3, 7, 7, 7]).tolist())

pack = amc.Pack(cu_seqlens=[0, 5, 5, 9])
print(pack, "lengths", pack.lengths.tolist(), "longest", pack.max_length)
