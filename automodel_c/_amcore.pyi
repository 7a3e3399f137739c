"""The C extension, as Python sees it. Tensors: any DLPack producer or NumPy array; one device a call.

Errors of every function: ValueError (a value, a shape, a device), TypeError (a dtype, a kind of object),
NotImplementedError (no such kernel), MemoryError, RuntimeError (the device said no), BufferError (a major version of
DLPack other than 1). Inputs are checked before anything is written.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tensor = Any  # has __dlpack__, or is a NumPy array
Index = Sequence[int] | Tensor  # host integers, int32 or int64
Tensors = list[Tensor] | tuple[Tensor, ...]
Numbers = float | Sequence[float]  # one number, or one for each parameter group

def build_info() -> dict[str, Any]: ...
def set_isa(name: str) -> None: ...
def set_num_threads(n: int) -> None: ...

# partition
def index_array(index: Index) -> NDArray[np.int64]: ...
def frame_partition(patches: Index, world: int, *, alpha: int, bisect: bool) -> NDArray[np.int64] | None: ...
def docs_from_ids(doc_ids: Index) -> NDArray[np.int64]: ...
def docs_from_offsets(cu_seqlens: Index) -> NDArray[np.int64]: ...

# adam: in place; every check comes before the first write
def adam_step(
    params: Tensors,  # float32 or bfloat16, dense; one without elements may stand anywhere
    exp_avgs: Tensors,  # float32 or bfloat16; shape and strides of the parameter, as all below
    exp_avg_sqs: Tensors,  # dtype of exp_avgs
    steps: Tensors,  # float32 or int64, one element each
    grads: Tensors,  # float32 or bfloat16
    *,
    masters: Tensors | None = None,  # float32 masters or int16 remainders of bfloat16; without elements: none
    group_sizes: Index | None = None,  # tensors of each parameter group, in order; None: one group
    lr: Numbers,
    beta1: Numbers,
    beta2: Numbers,
    eps: Numbers,
    weight_decay: Numbers,
    lr_tensors: Tensors | None = None,  # float32 [1] for each group, in place of lr; without elements: lr
    found_inf: Tensor | None = None,  # float32 [1]; not 0: nothing is written
    grad_scale: Tensor | None = None,  # float32 [1]; gradients are divided by it
) -> None: ...
def grad_sumsq(
    sumsq: Tensor,  # float64 [1], written
    parts: Tensor,  # float64 [1024], written: scratch
    grads: Tensors,  # float32 or bfloat16, dense
) -> None: ...
def scale_(
    tensors: Tensors,  # float32 or bfloat16, dense, written
    factor: Tensor,  # float64 [1]; exactly 1: nothing is written
) -> None: ...

# comm
def comm_reduce_parts(out: Tensor, parts: Tensor, *, scale: float) -> None: ...
def comm_id() -> str: ...
def comm_open(id: str, *, rank: int, ranks: int, device: int) -> int: ...
def comm_state(comm: int) -> tuple[bool, bool]: ...
def comm_exchange(
    arriving: Tensor,  # any dtype, contiguous, written; on CUDA
    sent: Tensor,
    *,
    comm: int,
    send_bytes: Index,  # [ranks]
    receive_bytes: Index,
    joined: bool = False,
) -> None: ...
def comm_window(comm: int, *, chunk: int) -> str: ...
def comm_attach(comm: int, *, handles: str) -> None: ...
def comm_sum(out: Tensor, sent: Tensor, *, comm: int, scale: float) -> None: ...
def comm_join(arriving: Tensor, *, comm: int) -> None: ...
def comm_close(comm: int, *, abort: bool) -> None: ...

# attention
def attention_workspace(
    q: Tensor, k: Tensor, v: Tensor, docs: Index, docs_k: Index | None = None, *, causal: bool, backward: bool
) -> int: ...
def attention_row(
    q: Tensor, k: Tensor, v: Tensor, docs: Index, docs_k: Index | None = None, *, causal: bool, backward: bool
) -> str: ...
def attention_forward(
    out: Tensor,
    lse: Tensor,
    workspace: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    docs: Index,
    docs_k: Index | None = None,
    lse_low: Tensor | None = None,
    device_docs: Tensor | None = None,  # int64 [3 N] or [5 N]: docs, docs_k, the order of work; needed on CUDA
    *,
    scale: float,
    causal: bool,
) -> None: ...
def attention_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    workspace: Tensor,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    docs: Index,
    docs_k: Index | None = None,
    lse_low: Tensor | None = None,
    device_docs: Tensor | None = None,  # int64 [3 N] or [5 N]: docs, docs_k, the order of work; needed on CUDA
    *,
    scale: float,
    causal: bool,
) -> None: ...

# exchange
def exchange_plan(
    docs: Index,
    owners: Index,
    *,
    tokens: int,
    ranks: int,
    heads: int,
    kv_heads: int,
    prices: Sequence[float],
    scheme: str,
    causal: bool,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], tuple[tuple[float, float, int], ...], int]: ...
def exchange_copy(out: Tensor, x: Tensor, moves: Index, *, reverse: bool, runs: bool) -> None: ...
def exchange_sum(
    out: Tensor,
    x: Tensor,
    own: Tensor,
    moves: Index,
    own_moves: Index,
    *,
    own_after: int,
    reverse: bool,
    runs: bool,
) -> None: ...
def exchange_table(moves: Index, *, rows_x: int, rows_out: int, reverse: bool, runs: bool) -> NDArray[np.int64]: ...
def exchange_index(
    moves: Index,
    own_moves: Index,
    *,
    own_after: int,
    rows_x: int,
    rows_own: int,
    rows_out: int,
    reverse: bool,
    runs: bool,
) -> NDArray[np.int64]: ...
def exchange_copy_by(out: Tensor, x: Tensor, table: Tensor, *, rows: int) -> None: ...
def exchange_sum_by(out: Tensor, x: Tensor, own: Tensor, index: Tensor) -> None: ...

# conv
def causal_conv1d_forward(
    y: Tensor,
    final_state: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    docs: Index,
    device_docs: Tensor | None = None,
    *,
    silu: bool,
) -> None: ...
def causal_conv1d_backward(
    dx: Tensor,
    dweight: Tensor | None,
    dbias: Tensor | None,
    dstate: Tensor | None,
    partials: Tensor,
    dy: Tensor,
    dfinal: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    docs: Index,
    device_docs: Tensor | None = None,
    *,
    silu: bool,
) -> None: ...

# gate
def gdn_gate_forward(g: Tensor, beta: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> None: ...
def gdn_gate_backward(
    da: Tensor,
    db: Tensor,
    dA_log: Tensor,
    ddt_bias: Tensor,
    partials: Tensor,
    dg: Tensor,
    dbeta: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
) -> None: ...

# gdn
def gated_delta_rule_workspace(q: Tensor, v: Tensor, docs: Index, *, backward: bool) -> int: ...
def gated_delta_rule_row(q: Tensor, k: Tensor, v: Tensor, docs: Index, *, backward: bool) -> str: ...
def gated_delta_rule_forward(
    o: Tensor,
    workspace: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    docs: Index,
    initial: Tensor | None = None,
    final: Tensor | None = None,
    states: Tensor | None = None,
    device_docs: Tensor | None = None,  # int64 [3 N]: docs, the order of work; needed on CUDA
    *,
    scale: float,
    l2norm: bool,
    part: int = 0,  # 1: what comes early, 2: the rest
) -> None: ...
def gated_delta_rule_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dg: Tensor,
    dbeta: Tensor,
    workspace: Tensor,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    docs: Index,
    initial: Tensor | None = None,
    states: Tensor | None = None,
    dfinal: Tensor | None = None,
    dinitial: Tensor | None = None,
    device_docs: Tensor | None = None,  # int64 [3 N]: docs, the order of work; needed on CUDA
    *,
    scale: float,
    l2norm: bool,
    part: int = 0,  # 1: dinitial alone
) -> None: ...

# loss
def cross_entropy_forward(
    loss: Tensor,
    row_loss: Tensor,
    logits: Tensor,
    labels: Tensor,
    num_label_tokens: Tensor | None = None,
    stats: Tensor | None = None,
    count: Tensor | None = None,
    *,
    chunk_len: int,
    ignore_index: int,
) -> None: ...
def cross_entropy_backward(
    dlogits: Tensor,
    dloss: Tensor,
    logits: Tensor,
    labels: Tensor,
    num_label_tokens: Tensor | None = None,
    stats: Tensor | None = None,
    *,
    chunk_len: int,
    ignore_index: int,
) -> None: ...
def linear_cross_entropy_rows(
    rows: Tensor,
    targets: Tensor,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    num_label_tokens: Tensor | None = None,
    *,
    vocab: int,
    ignore_index: int,
) -> int: ...
def linear_cross_entropy_targets(
    targets: Tensor,
    count: Tensor,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    num_label_tokens: Tensor | None = None,
    *,
    vocab: int,
    ignore_index: int,
) -> None: ...
def linear_cross_entropy_chunk(stats: Tensor, logits: Tensor, targets: Tensor, *, first: int) -> None: ...
def linear_cross_entropy_join(stats: Tensor, parts: Tensor) -> None: ...
def linear_cross_entropy_loss(
    loss: Tensor, stats: Tensor, targets: Tensor, num_label_tokens: Tensor | None = None, *, n: int
) -> None: ...
def linear_cross_entropy_grad(
    dlogits: Tensor,
    dloss: Tensor,
    logits: Tensor,
    stats: Tensor,
    targets: Tensor,
    num_label_tokens: Tensor | None = None,
    *,
    first: int,
) -> None: ...
def linear_cross_entropy_product_workspace(left: Tensor) -> int: ...
def linear_cross_entropy_product(out: Tensor, workspace: Tensor, left: Tensor, right: Tensor, *, add: bool) -> None: ...
def linear_cross_entropy_scatter(dhidden: Tensor, sum: Tensor, rows: Tensor) -> None: ...
def linear_cross_entropy_mask(out: Tensor, rows: Tensor, targets: Tensor) -> None: ...

# mlp
def swiglu_forward(y: Tensor, gate: Tensor, up: Tensor) -> None: ...
def swiglu_backward(dgate: Tensor, dup: Tensor, dy: Tensor, gate: Tensor, up: Tensor) -> None: ...
def sigmoid_gate_forward(y: Tensor, x: Tensor, gate: Tensor) -> None: ...
def sigmoid_gate_backward(dx: Tensor, dgate: Tensor, dy: Tensor, x: Tensor, gate: Tensor) -> None: ...
def gelu_forward(y: Tensor, x: Tensor, *, tanh: bool) -> None: ...
def gelu_backward(dx: Tensor, dy: Tensor, x: Tensor, *, tanh: bool) -> None: ...

# moe
def moe_workspace(
    hidden: Tensor,
    router_weight: Tensor | None = None,
    gate_up: Tensor | None = None,
    down: Tensor | None = None,
    padding: Tensor | None = None,
    *,
    top_k: int,
    backward: bool,
    counts: Index | None = None,
) -> int: ...
def moe_row(
    hidden: Tensor,
    router_weight: Tensor | None = None,
    gate_up: Tensor | None = None,
    down: Tensor | None = None,
    padding: Tensor | None = None,
    *,
    top_k: int,
    backward: bool,
    counts: Index | None = None,
) -> str: ...
def moe_forward(
    out: Tensor | None,
    load: Tensor,
    prob_sum: Tensor,
    real_rows: Tensor,
    logits: Tensor,
    chosen: Tensor,
    weights: Tensor,
    workspace: Tensor,
    hidden: Tensor,
    router_weight: Tensor,
    gate_up: Tensor,
    down: Tensor,
    padding: Tensor | None = None,
    products: Tensor | None = None,
    *,
    top_k: int,
    counts: Index | None = None,
) -> None: ...
def moe_backward(
    workspace: Tensor,
    dout: Tensor,
    hidden: Tensor,
    router_weight: Tensor,
    gate_up: Tensor,
    down: Tensor,
    logits: Tensor,
    chosen: Tensor,
    weights: Tensor,
    products: Tensor,
    padding: Tensor | None = None,
    dprob_sum: Tensor | None = None,
    dhidden: Tensor | None = None,
    drouter: Tensor | None = None,
    dgate_up: Tensor | None = None,
    ddown: Tensor | None = None,
    *,
    top_k: int,
    accumulate: bool = False,
    counts: Index | None = None,
) -> None: ...
def moe_route_forward(
    logits: Tensor,
    chosen: Tensor,
    weights: Tensor,
    load: Tensor,
    prob_sum: Tensor,
    real_rows: Tensor,
    workspace: Tensor,
    hidden: Tensor,
    router_weight: Tensor,
    padding: Tensor | None = None,
    *,
    top_k: int,
) -> None: ...
def moe_route_backward(
    workspace: Tensor,
    hidden: Tensor,
    router_weight: Tensor,
    logits: Tensor,
    chosen: Tensor,
    weights: Tensor,
    dweights: Tensor,
    padding: Tensor | None = None,
    dprob_sum: Tensor | None = None,
    dhidden: Tensor | None = None,
    drouter: Tensor | None = None,
    *,
    top_k: int,
) -> None: ...
def moe_experts_forward(
    out: Tensor | None,
    workspace: Tensor,
    hidden: Tensor,
    gate_up: Tensor,
    down: Tensor,
    chosen: Tensor,
    weights: Tensor,
    products: Tensor | None = None,
    *,
    top_k: int,
    counts: Index | None = None,
) -> None: ...
def moe_experts_backward(
    workspace: Tensor,
    dout: Tensor,
    hidden: Tensor,
    gate_up: Tensor,
    down: Tensor,
    chosen: Tensor,
    weights: Tensor,
    products: Tensor,
    dhidden: Tensor | None = None,
    dweights: Tensor | None = None,
    dgate_up: Tensor | None = None,
    ddown: Tensor | None = None,
    *,
    top_k: int,
    accumulate: bool = False,
    counts: Index | None = None,
) -> None: ...
def shared_expert_forward(out: Tensor, routed: Tensor, shared: Tensor, gate: Tensor) -> None: ...
def shared_expert_backward(dshared: Tensor, dgate: Tensor, dout: Tensor, shared: Tensor, gate: Tensor) -> None: ...

# norm
def rms_norm_forward(
    y: Tensor,
    rstd: Tensor,
    x: Tensor,
    weight: Tensor,
    *,
    sum: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float,
    zero_centered: bool,
) -> None: ...
def rms_norm_backward(
    dx: Tensor,
    dweight: Tensor | None,
    partials: Tensor,
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    *,
    dsum: Tensor | None = None,
    zero_centered: bool,
) -> None: ...
def gated_rms_norm_forward(y: Tensor, rstd: Tensor, x: Tensor, z: Tensor, weight: Tensor, *, eps: float) -> None: ...
def gated_rms_norm_backward(
    dx: Tensor,
    dz: Tensor,
    dweight: Tensor | None,
    partials: Tensor,
    dy: Tensor,
    x: Tensor,
    z: Tensor,
    weight: Tensor,
    rstd: Tensor,
) -> None: ...
def layer_norm_forward(
    y: Tensor, mean: Tensor, rstd: Tensor, x: Tensor, weight: Tensor, bias: Tensor, *, eps: float
) -> None: ...
def layer_norm_backward(
    dx: Tensor,
    dweight: Tensor | None,
    dbias: Tensor | None,
    partials: Tensor,
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
) -> None: ...

# rope
def mrope(
    q_out: Tensor,
    k_out: Tensor,
    q: Tensor,
    k: Tensor,
    position_ids: Tensor,
    *,
    rotary_dim: int,
    theta: float,
    section: Index,
    inverse: bool,
) -> None: ...
def qk_norm_mrope_forward(
    q_out: Tensor,
    k_out: Tensor,
    rstd: Tensor,
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    position_ids: Tensor,
    *,
    rotary_dim: int,
    theta: float,
    section: Index,
    eps: float,
    zero_centered: bool,
) -> None: ...
def qk_norm_mrope_backward(
    dq: Tensor,
    dk: Tensor,
    dq_weight: Tensor | None,
    dk_weight: Tensor | None,
    partials: Tensor,
    dq_out: Tensor,
    dk_out: Tensor,
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    rstd: Tensor,
    position_ids: Tensor,
    *,
    rotary_dim: int,
    theta: float,
    section: Index,
    zero_centered: bool,
) -> None: ...
def vision_rope(
    q_out: Tensor, k_out: Tensor, q: Tensor, k: Tensor, position_ids: Tensor, *, theta: float, inverse: bool
) -> None: ...
