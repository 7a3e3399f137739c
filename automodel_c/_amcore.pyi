"""The C extension, as Python sees it. Tensors: any DLPack producer or NumPy array; one device a call.

Errors of every function: ValueError (a value, a shape, a device), TypeError (a dtype, a kind of object),
NotImplementedError (no such kernel), MemoryError, RuntimeError (the device said no). Inputs are checked before
anything is written.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tensor = Any  # has __dlpack__, or is a NumPy array
Index = Sequence[int] | Tensor  # host integers, int32 or int64

def build_info() -> dict[str, Any]: ...
def set_isa(name: str) -> None: ...
def set_num_threads(n: int) -> None: ...

# partition
def index_array(index: Index) -> NDArray[np.int64]: ...
def frame_partition(patches: Index, world: int, *, alpha: int, bisect: bool) -> NDArray[np.int64] | None: ...
def docs_from_ids(doc_ids: Index) -> NDArray[np.int64]: ...
def docs_from_offsets(cu_seqlens: Index) -> NDArray[np.int64]: ...
