"""The leak list: every method of the extension, called rightly and in every way that fails.

A new method adds its calls here; tests/lint/test_bindings.py fails until it does.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from tests.core.producers import Producer


@dataclass(frozen=True)
class Call:
    """`make()` gives (args, kwargs) once; the call is then repeated. `raises` is its exception, None when it works."""

    method: str
    label: str
    make: Callable
    raises: type | None = None
    slow: int = 1  # a call that costs the producer milliseconds is repeated so many times less

    def __str__(self):
        return f"{self.method}-{self.label}"


def ok(method, label, make):
    return Call(method, label, make)


def read_only(n):
    x = np.zeros(n, np.float32)
    x.flags.writeable = False
    return x


INDEX_FORMS = {
    "list": (lambda: [0, 1, 1, 2], None),
    "tuple": (lambda: (0, 1, 1, 2), None),
    "numpy": (lambda: np.array([0, 1, 1, 2]), None),
    "tensor": (lambda: torch.tensor([0, 1, 1, 2], dtype=torch.int32), None),
    "capsule": (lambda: Producer([0, 1, 1, 2]), None),
    "old-capsule": (lambda: Producer([0, 1, 1, 2], versioned=False, style="bare"), None),
    "empty": (lambda: torch.tensor([], dtype=torch.int64), None),
    "float-item": (lambda: [0, 1.5], TypeError),
    "huge-item": (lambda: [0, 2**64], ValueError),
    "float": (lambda: torch.tensor([1.0]), TypeError),
    "swapped": (lambda: np.zeros(3, ">i8"), TypeError),
    "two-axes": (lambda: np.zeros((2, 2), np.int64), ValueError),
    "negative-stride": (lambda: np.arange(3)[::-1], ValueError),
    "no-tensor": (lambda: 7, TypeError),
    "meta": (lambda: torch.zeros(3, dtype=torch.int64, device="meta"), ValueError),
    "capsule-negative-stride": (lambda: Producer(strides=(-1,)), ValueError),
    "capsule-used": (lambda: Producer(name=b"used_dltensor"), TypeError),
    "capsule-major": (lambda: Producer(version=(2, 0)), BufferError),
    "capsule-broadcast": (lambda: Producer(shape=(2**57,), strides=(0,)), MemoryError),
}


def index_calls(method, good_labels):
    for label, (make, raises) in INDEX_FORMS.items():
        if label in good_labels or (raises is not None and (label != "meta" or method == "index_array")):
            yield Call(method, label, lambda make=make: ((make(),), {}), raises, slow=50 if label == "meta" else 1)
    yield Call(method, "missing", lambda: ((), {}), TypeError)
    yield Call(method, "unexpected", lambda: (([1],), {"other": 1}), TypeError)
    yield Call(method, "twice", lambda: (([1], [1]), {}), TypeError)


def partition(label, patches, world, raises=None, **options):
    keywords = {"alpha": 0, "bisect": False, **options}
    return Call(
        "frame_partition", label, lambda: ((patches() if callable(patches) else patches, world), keywords), raises
    )


def frames():
    yield partition("minimax", [3, 4, 5], 2)
    yield partition("bisect", lambda: torch.tensor([3, 4, 5]), 2, bisect=True)
    yield partition("none", [3], 2)
    yield partition("world", [3], 0, ValueError)
    yield partition("world-kind", lambda: Producer(), "2", TypeError)
    yield partition("world-huge", [3], 2**70, ValueError)
    yield partition("negative", [3, -1], 1, ValueError)
    yield partition("overflow", [2**62, 2**62], 1, ValueError)
    yield partition("alpha", [3], 1, ValueError, alpha=-1)
    yield partition("bisect-kind", [3], 1, TypeError, bisect=1)
    yield partition("unexpected", [3], 1, TypeError, other=3)


def lists(n=2, tensors=2, dtype=torch.float32):
    return [torch.zeros(n, dtype=dtype) for _ in range(tensors)]


NUMBERS = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.0}


def adam(label, raises=None, tensors=2, **changes):
    """A call of adam_step with some of its arguments replaced by what `changes` makes."""

    def make():
        arguments = {
            "params": lists(tensors=tensors),
            "exp_avgs": lists(tensors=tensors),
            "exp_avg_sqs": lists(tensors=tensors),
            "steps": lists(1, tensors),
            "grads": lists(tensors=tensors),
            **NUMBERS,
        }
        arguments.update({name: value() if callable(value) else value for name, value in changes.items()})
        return (), {name: value for name, value in arguments.items() if value is not Ellipsis}

    return Call("adam_step", label, make, raises)


def adam_calls():
    yield adam("plain")
    yield adam("many", tensors=100)
    yield adam("empty", tensors=0)
    yield adam("groups", group_sizes=[1, 1], **{name: [value] * 2 for name, value in NUMBERS.items()})
    yield adam("numpy", params=lambda: [np.zeros(2, np.float32), Producer([1, 2], numpy_dtype=np.float32)])
    yield adam("missing", TypeError, lr=...)
    yield adam("unexpected", TypeError, other=1)
    yield adam("not-a-list", TypeError, params=lambda: torch.zeros(2))
    yield adam("not-a-tensor", TypeError, grads=lambda: [torch.zeros(2), 3])
    yield adam("taken-then-bad", TypeError, grads=lambda: [Producer([1, 2], numpy_dtype=np.float32), 3])
    yield adam("read-only", ValueError, params=lambda: [read_only(2), read_only(2)])
    yield adam("read-only-capsule", ValueError, params=lambda: [Producer([1], numpy_dtype=np.float32, flags=1)] * 2)
    yield adam("count", ValueError, grads=lambda: lists(tensors=1))
    yield adam("shape", ValueError, grads=lambda: lists(3))
    yield adam("dtype", TypeError, grads=lambda: lists(dtype=torch.int32))
    yield adam("shared", ValueError, params=lambda: [torch.zeros(2)] * 2)
    yield adam("shared-many", ValueError, tensors=100, params=lambda: [torch.zeros(2)] * 100)
    yield adam("number", ValueError, lr=-1.0)
    yield adam("number-kind", TypeError, lr="1")
    yield adam("number-huge", ValueError, lr=10**400)
    yield adam("numbers-count", ValueError, lr=[0.1, 0.2])
    yield adam("groups-bad", ValueError, group_sizes=[5])
    yield adam("groups-kind", TypeError, group_sizes=3)


def one(dtype=torch.float64, n=1):
    return torch.ones(n, dtype=dtype)


def clip_calls():
    yield ok("grad_sumsq", "plain", lambda: ((one(), one(n=1024), lists()), {}))
    yield Call("grad_sumsq", "dtype", lambda: ((one(torch.float32), one(n=1024), lists()), {}), TypeError)
    yield Call("grad_sumsq", "shape", lambda: ((one(), one(n=3), lists()), {}), ValueError)
    yield Call("grad_sumsq", "kind", lambda: ((one(), one(n=1024), 3), {}), TypeError)
    yield ok("scale_", "plain", lambda: ((lists(), one()), {}))
    yield Call("scale_", "dtype", lambda: ((lists(dtype=torch.int32), one()), {}), TypeError)
    yield Call("scale_", "missing", lambda: ((lists(),), {}), TypeError)


def reduce_parts(label, raises=None, out=lambda: torch.zeros(3), parts=lambda: torch.ones(2, 3), **scale):
    return Call("comm_reduce_parts", label, lambda: ((out(), parts()), scale or {"scale": 1.0}), raises)


def comm_calls():
    yield reduce_parts("plain")
    yield reduce_parts("numpy", out=lambda: np.zeros(3, np.float32))
    yield reduce_parts("shape", ValueError, out=lambda: torch.zeros(4))
    yield reduce_parts("dtype", TypeError, out=lambda: torch.zeros(3, dtype=torch.int32))
    yield reduce_parts("read-only", ValueError, out=lambda: read_only(3))
    yield reduce_parts("scale", ValueError, scale=float("nan"))
    yield reduce_parts("scale-huge", ValueError, scale=10**400)
    yield reduce_parts("missing", TypeError, other=1.0)
    yield from nccl_calls()


def nccl_calls():
    """Without NCCL, or a GPU, or a communicator: each of these fails."""
    yield Call("comm_id", "argument", lambda: ((3,), {}), TypeError)
    settings = {"rank": 0, "ranks": 2, "device": 0}
    for label, id, changes, error in (
        ("short", "0a", {}, ValueError),
        ("letters", "g" * 256, {}, ValueError),
        ("rank", "0a" * 128, {"rank": 2}, ValueError),
        ("device", "0a" * 128, {"device": -1}, ValueError),
        ("kind", 7, {}, TypeError),
    ):
        yield Call("comm_open", label, lambda id=id, changes=changes: ((id,), settings | changes), error)
    yield Call("comm_state", "kind", lambda: (("1",), {}), TypeError)
    yield Call("comm_close", "kind", lambda: ((1,), {"abort": 0}), TypeError)
    for label, sent, bytes_, error in (
        ("cpu", torch.zeros(4), [0, 16], NotImplementedError),
        ("sizes", torch.zeros(4), [0, 12], ValueError),
        ("strided", torch.zeros(4, 2)[:, 0], [0, 16], ValueError),
    ):
        options = {"comm": 1, "send_bytes": bytes_, "receive_bytes": [0, 16]}
        yield Call("comm_exchange", label, lambda s=sent, o=options: ((torch.zeros(4), s), o), error)
    yield Call("comm_window", "chunk", lambda: ((1,), {"chunk": 100}), ValueError)
    yield Call("comm_attach", "letters", lambda: ((1,), {"handles": "ab"}), ValueError)
    for label, sent, error in (
        ("cpu", torch.zeros(2, 4), NotImplementedError),
        ("axes", torch.zeros(8), ValueError),
        ("dtype", torch.zeros(2, 4, dtype=torch.float64), TypeError),
    ):
        yield Call("comm_sum", label, lambda s=sent: ((torch.zeros(4), s), {"comm": 1, "scale": 1.0}), error)
    yield Call("comm_join", "cpu", lambda: ((torch.zeros(4),), {"comm": 1}), NotImplementedError)


def attention(method, label, raises=None, **changes):
    """A call of an attention method with some of its arguments replaced by what `changes` makes."""

    def make():
        names = {
            "attention_workspace": ("q", "k", "v"),
            "attention_row": ("q", "k", "v"),
            "attention_forward": ("out", "lse", "workspace", "q", "k", "v"),
            "attention_backward": ("dq", "dk", "dv", "workspace", "dout", "q", "k", "v", "out", "lse"),
        }[method]
        tensors = {
            name: torch.zeros(5, 1 if name in ("k", "v", "dk", "dv") else 2, 16)
            for name in names
            if name != "workspace"
        }
        arguments = {**tensors, "docs": [0, 2, 2, 5], "causal": True}
        if method in ("attention_workspace", "attention_row"):
            arguments["backward"] = False
        else:
            arguments |= {"lse": torch.zeros(5, 2), "workspace": torch.zeros(1 << 21, dtype=torch.uint8), "scale": 1.0}
        arguments.update({name: value() if callable(value) else value for name, value in changes.items()})
        return (), {name: value for name, value in arguments.items() if value is not Ellipsis}

    runs = raises is None and method in ("attention_forward", "attention_backward")
    return Call(method, label, make, raises, slow=20 if runs else 1)


def attention_calls():
    for method in ("attention_workspace", "attention_row", "attention_forward", "attention_backward"):
        yield attention(method, "plain")
        yield attention(method, "keys", docs_k=[0, 1, 1, 5])
        yield attention(method, "missing", TypeError, docs=...)
        yield attention(method, "unexpected", TypeError, other=1)
        yield attention(method, "not-a-tensor", TypeError, v=3)
        yield attention(method, "docs-kind", TypeError, docs=lambda: torch.zeros(2))
        yield attention(method, "docs-order", ValueError, docs=[0, 3, 2, 5])
        yield attention(method, "docs-count", ValueError, docs_k=[0, 5])
        yield attention(method, "dtype", TypeError, q=lambda: torch.zeros(5, 2, 16, dtype=torch.float16))
        yield attention(method, "head-dim", NotImplementedError, q=lambda: torch.zeros(5, 2, 17))
        yield attention(method, "stride", ValueError, k=lambda: torch.zeros(5, 1, 32)[..., ::2])
    for method in ("attention_forward", "attention_backward"):
        yield attention(method, "low", lse_low=lambda: torch.zeros(5, 2))
        yield attention(method, "small", ValueError, workspace=lambda: torch.zeros(3, dtype=torch.uint8))
        yield attention(method, "lse", TypeError, lse=lambda: torch.zeros(5, 2, dtype=torch.float64))
    yield attention("attention_forward", "read-only", ValueError, out=lambda: read_only(5))


def gdn(method, label, raises=None, **changes):
    """A call of a gated_delta_rule method with some of its arguments replaced by what `changes` makes."""

    def make():
        names = {
            "gated_delta_rule_workspace": "q v",
            "gated_delta_rule_row": "q k v",
            "gated_delta_rule_forward": "o workspace q k v g beta",
            "gated_delta_rule_backward": "dq dk dv dg dbeta workspace dout q k v g beta",
        }[method].split()
        arguments = {name: torch.zeros(5, 1 if name in ("q", "k", "dq", "dk") else 2, 8) for name in names}
        arguments |= {name: torch.zeros(5, 2) for name in ("g", "beta", "dg", "dbeta") if name in names}
        arguments["docs"] = [0, 2, 2, 5]
        if method in ("gated_delta_rule_workspace", "gated_delta_rule_row"):
            arguments["backward"] = False
        else:
            arguments |= {"workspace": torch.zeros(1 << 21, dtype=torch.uint8), "scale": 1.0, "l2norm": True}
        arguments.update({name: value() if callable(value) else value for name, value in changes.items()})
        return (), {name: value for name, value in arguments.items() if value is not Ellipsis}

    runs = raises is None and method in ("gated_delta_rule_forward", "gated_delta_rule_backward")
    return Call(method, label, make, raises, slow=20 if runs else 1)


def gdn_calls():
    for method in (
        "gated_delta_rule_workspace", "gated_delta_rule_row", "gated_delta_rule_forward", "gated_delta_rule_backward",
    ):  # fmt: skip
        yield gdn(method, "plain")
        yield gdn(method, "missing", TypeError, docs=...)
        yield gdn(method, "unexpected", TypeError, other=1)
        yield gdn(method, "not-a-tensor", TypeError, v=3)
        yield gdn(method, "docs-kind", TypeError, docs=lambda: torch.zeros(2))
        yield gdn(method, "docs-order", ValueError, docs=[0, 3, 2, 5])
        yield gdn(method, "dtype", TypeError, q=lambda: torch.zeros(5, 1, 8, dtype=torch.float16))
        yield gdn(method, "dim", NotImplementedError, q=lambda: torch.zeros(5, 1, 9))
        yield gdn(method, "stride", ValueError, v=lambda: torch.zeros(5, 2, 16)[..., ::2])
    state, wrong = lambda: torch.zeros(2, 2, 8, 8), lambda: torch.zeros(1, 2, 8, 8)
    for method, last in (("gated_delta_rule_forward", "final"), ("gated_delta_rule_backward", "dinitial")):
        yield gdn(method, "states", initial=state, **{last: state})
        yield gdn(method, "documents", ValueError, initial=wrong)
        yield gdn(method, "small", ValueError, workspace=lambda: torch.zeros(3, dtype=torch.uint8))
        yield gdn(method, "gate", TypeError, g=lambda: torch.zeros(5, 2, dtype=torch.bfloat16))
    yield gdn("gated_delta_rule_forward", "output", ValueError, o=lambda: torch.zeros(()))
    yield gdn(
        "gated_delta_rule_forward", "output-dtype", TypeError, o=lambda: torch.zeros(5, 2, 8, dtype=torch.bfloat16)
    )
    yield gdn("gated_delta_rule_forward", "read-only", ValueError, o=lambda: read_only(5))


def numbers(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


def variants(method, arguments, keywords, wrong):
    """The right call, and one failing call for each (label, exception, position or keyword, value) of `wrong`."""

    def make(at=None, value=None):
        args = [argument() if callable(argument) else argument for argument in arguments]
        kwargs = {name: given() if callable(given) else given for name, given in keywords.items()}
        if at is not None:
            (args if isinstance(at, int) else kwargs)[at] = value() if callable(value) else value
        return tuple(args), kwargs

    yield ok(method, "plain", make)
    for label, raises, at, value in wrong:
        yield Call(method, label, lambda at=at, value=value: make(at, value), raises)


def integers(*values):
    return lambda: torch.tensor(values, dtype=torch.int64)


def loss_calls():
    m, scalar = lambda: numbers(2, 4), lambda: numbers()
    settings = {"chunk_len": 32, "ignore_index": -100}
    scratch = lambda: numbers(2, dtype=torch.float64)  # noqa: E731
    wrong = [
        ("dtype", TypeError, 2, lambda: numbers(2, 4, dtype=torch.float64)),
        ("label", ValueError, 3, integers(0, 4)),
        ("count", ValueError, 4, integers(-1)),
        ("chunk", ValueError, "chunk_len", 0),
    ]
    good = [m, integers(1, -100), None]
    kept = ("stats", ValueError, 5, lambda: numbers(2, 3))
    yield from variants("cross_entropy_forward", [scalar, scratch, *good, None], settings, [*wrong, kept])
    yield from variants("cross_entropy_backward", [m, scalar, *good, None], settings, [*wrong, kept])
    pair = integers(0, 1)
    yield from variants(
        "linear_cross_entropy_rows",
        [pair, pair, lambda: numbers(2, 3), lambda: numbers(4, 3), integers(1, -100), None],
        {"vocab": 4, "ignore_index": -100},
        [
            ("shape", ValueError, 3, m),
            ("words", ValueError, "vocab", 3),
            ("label", ValueError, 4, integers(0, 4)),
            ("dtype", TypeError, 4, lambda: numbers(2)),
        ],
    )
    yield from variants(
        "linear_cross_entropy_targets",
        [pair, lambda: torch.zeros((), dtype=torch.int64), lambda: numbers(2, 3), lambda: numbers(4, 3), pair, None],
        {"vocab": 4, "ignore_index": -100},
        [("label", ValueError, 4, integers(0, 4)), ("count", ValueError, 1, scalar)],
    )
    stats = lambda: numbers(3, 2)  # noqa: E731
    yield from variants("linear_cross_entropy_chunk", [stats, m, pair], {"first": 0}, [("shape", ValueError, 0, m)])
    yield from variants(
        "linear_cross_entropy_join", [stats, lambda: numbers(2, 3, 2)], {}, [("parts", ValueError, 1, stats)]
    )
    yield from variants("linear_cross_entropy_loss", [scalar, stats, pair, None], {"n": 2}, [("n", ValueError, "n", 3)])
    yield from variants(
        "linear_cross_entropy_grad", [m, scalar, m, stats, pair, None], {"first": 0}, [("dtype", TypeError, 1, pair)]
    )
    room = lambda: torch.empty(1 << 23, dtype=torch.uint8)  # noqa: E731
    yield from variants("linear_cross_entropy_product_workspace", [m], {}, [("dtype", TypeError, 0, pair)])
    yield from variants(
        "linear_cross_entropy_product", [lambda: numbers(2, 2), room, m, lambda: m().t()], {"add": False},
        [("shape", ValueError, 3, m), ("room", ValueError, 1, lambda: torch.empty(9, dtype=torch.uint8))],
    )  # fmt: skip
    yield from variants("linear_cross_entropy_scatter", [m, m, pair], {}, [("rows", ValueError, 2, integers(1, 1))])
    yield from variants("linear_cross_entropy_mask", [m, m, pair], {}, [("targets", ValueError, 2, integers(1))])


def exchange_calls():
    settings = {"tokens": 4, "ranks": 2, "heads": 4, "kv_heads": 2, "prices": [1.0, 1.0, 1.0, 1.0]}
    settings |= {"scheme": "heads", "causal": True}
    wrong = [
        ("docs", ValueError, 0, integers(0, 9)),
        ("owners", ValueError, 1, integers(0, 5)),
        ("prices", ValueError, "prices", [1.0]),
        ("heads", ValueError, "heads", 3),
        ("scheme", ValueError, "scheme", "ring"),
        ("kind", TypeError, "causal", 1),
    ]
    yield from variants("exchange_plan", [integers(0, 1, 1, 4), integers(0, 1)], settings, wrong)
    x = lambda: numbers(2, 4)  # noqa: E731
    wrong = [
        ("shape", ValueError, 1, lambda: numbers(2, 5)),
        ("dtype", TypeError, 1, integers(1)),
        ("move", ValueError, 3, integers(2, 0, 1)),
    ]
    moves = integers(0, 1, 1)
    copy_wrong = [(label, error, at if at == 1 else 2, value) for label, error, at, value in wrong]
    yield from variants("exchange_copy", [x, x, moves], {"reverse": False, "runs": False}, copy_wrong)
    sum_settings = {"own_after": 0, "reverse": True, "runs": False}
    yield from variants("exchange_sum", [x, x, x, moves, moves], sum_settings, wrong)
    table_settings = {"rows_x": 2, "rows_out": 2, "reverse": False, "runs": False}
    table_wrong = [("move", ValueError, 0, integers(2, 0, 1)), ("kind", TypeError, "runs", 0)]
    yield from variants("exchange_table", [moves], table_settings, table_wrong)
    index_settings = table_settings | {"own_after": 0, "rows_own": 2}
    index_wrong = [("own", ValueError, 1, integers(2, 0, 1)), ("kind", TypeError, "rows_own", "2")]
    yield from variants("exchange_index", [moves, moves], index_settings, index_wrong)
    table = lambda: torch.tensor([[0, 0, 1, 1, 1, 0, 0], [1, 0, 0, 0, 0, 0, 0]])  # noqa: E731
    by_wrong = [("shape", ValueError, 1, lambda: numbers(2, 5)), ("table", ValueError, 2, integers(1))]
    yield from variants("exchange_copy_by", [x, x, table], {"rows": 1}, by_wrong)
    by_wrong = [("dtype", TypeError, 1, integers(1)), ("index", ValueError, 3, integers(1))]
    yield from variants("exchange_sum_by", [x, x, x, integers(3, 4, 4, 0)], {}, by_wrong)


def conv_calls():
    x, weight, state = lambda: numbers(3, 4), lambda: numbers(4, 2), lambda: numbers(2, 4, 1)
    bias, partials = lambda: numbers(4), lambda: numbers(1, 3, 4, dtype=torch.float64)
    docs, rest = [0, 1, 1, 3], {"silu": True}
    beside = lambda: torch.tensor(docs)  # noqa: E731
    wrong = lambda at: [  # noqa: E731
        ("shape", ValueError, at, lambda: numbers(5, 2)),
        ("dtype", TypeError, at, integers(1)),
        ("width", NotImplementedError, at, lambda: numbers(4, 9)),
        ("state", ValueError, at + 2, lambda: numbers(1, 4, 1)),
        ("docs", ValueError, at + 3, [0, 4]),
        ("docs-kind", TypeError, at + 3, lambda: numbers(2)),
        ("device-docs", ValueError, at + 4, integers(2)),
        ("device-docs-dtype", TypeError, at + 4, lambda: numbers(4)),
    ]
    yield from variants("causal_conv1d_forward", [x, state, x, weight, bias, state, docs, beside], rest, wrong(3))
    yield from variants(
        "causal_conv1d_backward",
        [x, weight, bias, state, partials, x, state, x, weight, bias, state, docs, beside],
        rest,
        [*wrong(8), ("partials", ValueError, 4, lambda: numbers(1, 3, 4))],
    )


def gate_calls():
    x, vector, sums = lambda: numbers(2, 4), lambda: numbers(4), lambda: numbers(1, 2, 4, dtype=torch.float64)
    wrong = lambda at: [("shape", ValueError, at, lambda: numbers(2, 5)), ("dtype", TypeError, at, integers(1))]  # noqa: E731
    yield from variants("gdn_gate_forward", [x, x, x, x, vector, vector], {}, wrong(3))
    yield from variants("gdn_gate_backward", [x, x, vector, vector, sums, x, x, x, x, vector, vector], {}, wrong(8))


def norm_calls():
    x, w, r = lambda: numbers(2, 4), lambda: numbers(4), lambda: numbers(2)
    one_sum, two_sums = (lambda n=n: numbers(1, n, 4, dtype=torch.float64) for n in (1, 2))
    shape = lambda at: [("shape", ValueError, at, lambda: numbers(2, 5)), ("dtype", TypeError, at, integers(1))]  # noqa: E731
    rms = {"eps": 1e-6, "zero_centered": True}
    yield from variants("rms_norm_forward", [x, r, x, w], rms, [*shape(3), ("eps", ValueError, "eps", -1.0)])
    yield from variants("rms_norm_backward", [x, w, one_sum, x, x, w, r], {"zero_centered": True}, shape(3))
    yield from variants("gated_rms_norm_forward", [x, r, x, x, w], {"eps": 1e-6}, shape(3))
    yield from variants("gated_rms_norm_backward", [x, x, w, one_sum, x, x, x, w, r], {}, shape(4))
    yield from variants("layer_norm_forward", [x, r, r, x, w, w], {"eps": 1e-6}, shape(5))
    yield from variants("layer_norm_backward", [x, w, w, two_sums, x, x, w, r, r], {}, shape(4))


def rope_calls():
    q = lambda: numbers(2, 1, 8)  # noqa: E731
    wrong = [
        ("shape", ValueError, 4, integers(0, 1, 2)),
        ("dtype", TypeError, 4, lambda: numbers(2)),
        ("theta", ValueError, "theta", 0.0),
    ]
    settings = {"theta": 1e4, "inverse": False}
    good = [q, q, q, q, integers(0, 1)]
    yield from variants("vision_rope", good, settings, wrong)
    text = {**settings, "rotary_dim": 8, "section": [2, 1, 1]}
    yield from variants("mrope", good, text, [*wrong, ("section", ValueError, "section", [1, 2])])
    w, rstd, sums = lambda: numbers(8), lambda: numbers(2, 2), lambda: numbers(1, 2, 8, dtype=torch.float64)
    text = {"theta": 1e4, "rotary_dim": 8, "section": [2, 1, 1], "zero_centered": True}
    wrong = [("shape", ValueError, 5, lambda: numbers(7)), ("section", ValueError, "section", [1, 2])]
    forward = [q, q, rstd, q, q, w, w, integers(0, 1)]
    yield from variants(
        "qk_norm_mrope_forward", forward, {**text, "eps": 1e-6}, [*wrong, ("eps", ValueError, "eps", -1.0)]
    )
    backward = [q, q, w, w, sums, q, q, q, q, w, w, rstd, integers(0, 1)]
    wrong = [("shape", ValueError, 5, lambda: numbers(2, 2, 8)), ("section", ValueError, "section", [1, 2])]
    yield from variants("qk_norm_mrope_backward", backward, text, wrong)


def mlp_calls():
    x = lambda: numbers(2, 4)  # noqa: E731
    wrong = [("shape", ValueError, 1, lambda: numbers(2, 5)), ("dtype", TypeError, 1, integers(1))]
    for name in ("swiglu", "sigmoid_gate"):
        yield from variants(f"{name}_forward", [x, x, x], {}, wrong)
        yield from variants(f"{name}_backward", [x, x, x, x, x], {}, wrong)
    yield from variants("gelu_forward", [x, x], {"tanh": True}, wrong)
    yield from variants("gelu_backward", [x, x, x], {"tanh": False}, wrong)


def moe_halves(f, inputs, kept):
    hidden, router, gate_up, down, padding = inputs
    logits, chosen, weights = kept
    choice = lambda value: lambda: torch.full((3, 1), value, dtype=torch.int32)  # noqa: E731
    scratch, top_k = lambda: torch.zeros(1 << 20, dtype=torch.uint8), {"top_k": 1}
    wrong = [("chosen", ValueError, 5, choice(2)), ("dtype", TypeError, 3, f(2, 6, 4, dtype=torch.bfloat16))]
    rows = [hidden, gate_up, down, choice(-1), weights]
    yield from variants("moe_experts_forward", [f(3, 4), scratch, *rows], top_k, wrong)
    gradients = {**top_k, "dhidden": f(3, 4), "dweights": f(3, 1), "ddown": f(2, 4, 3)}
    yield from variants("moe_experts_backward", [scratch, f(3, 4), *rows, f(3, 6)], gradients, wrong)
    added = {**gradients, "accumulate": True}
    yield from variants("moe_experts_backward", [scratch, f(3, 4), *rows, f(3, 6)], added, [])
    wrong = [("counts", NotImplementedError, "counts", [1, 2]), ("adds", TypeError, "accumulate", 1)]
    yield from variants("moe_experts_backward", [scratch, f(3, 4), *rows, f(3, 6)], gradients, wrong)
    counts = [integers(0, 0), f(2), lambda: torch.tensor(0)]
    outputs = [logits, chosen, weights, *counts, scratch]
    wrong = [("top_k", ValueError, "top_k", 3), ("shape", ValueError, 8, f(2, 5))]
    yield from variants("moe_route_forward", [*outputs, hidden, router, padding], top_k, wrong)
    wrong = [("chosen", ValueError, 4, choice(2)), ("dweights", TypeError, 6, choice(0))]
    gradients = {**top_k, "dhidden": f(3, 4), "drouter": f(2, 4)}
    yield from variants("moe_route_backward", [scratch, hidden, router, *kept, weights, padding], gradients, wrong)


def moe_calls():
    f = lambda *shape, dtype=torch.float32: lambda: numbers(*shape, dtype=dtype)  # noqa: E731
    inputs = [f(3, 4), f(2, 4), f(2, 6, 4), f(2, 4, 3), lambda: torch.tensor([False, True, False])]
    wrong = [("top_k", ValueError, "top_k", 3), ("padding", TypeError, -1, f(3))]
    settings = {"top_k": 1, "backward": False}
    shape = lambda at: ("shape", ValueError, at, f(2, 4, 5))  # noqa: E731
    for name in ("moe_workspace", "moe_row"):
        yield from variants(name, inputs, settings, [*wrong, shape(3)])
    kept = [f(3, 2), f(3, 1, dtype=torch.int32), f(3, 1)]
    scratch = lambda: torch.zeros(1 << 16, dtype=torch.uint8)  # noqa: E731
    outputs = [f(3, 4), integers(0, 0), f(2), lambda: torch.tensor(0), *kept, scratch]
    small = lambda at: ("small", ValueError, at, lambda: torch.zeros(9, dtype=torch.uint8))  # noqa: E731
    top_k = {"top_k": 1}
    yield from variants("moe_forward", [*outputs, *inputs], top_k, [*wrong, shape(11), small(7)])
    yield from variants("moe_forward", [lambda: None, *outputs[1:], *inputs], top_k, [small(7)])
    gradients = [lambda: torch.zeros(1 << 20, dtype=torch.uint8), f(3, 4), *inputs[:4], *kept, f(3, 6), inputs[4]]
    wrong = [shape(5), small(0), ("chosen", ValueError, 7, lambda: torch.full((3, 1), 2, dtype=torch.int32))]
    yield from variants("moe_backward", gradients, {**top_k, "dhidden": f(3, 4), "drouter": f(2, 4)}, wrong)
    yield from moe_halves(f, inputs, kept)
    x = f(3, 4)
    wrong = [("shape", ValueError, 2, f(3, 5)), ("dtype", TypeError, 2, integers(1))]
    yield from variants("shared_expert_forward", [x, x, x, f(3)], {}, wrong)
    yield from variants("shared_expert_backward", [x, f(3), x, x, f(3)], {}, wrong)


CALLS = [
    ok("build_info", "plain", lambda: ((), {})),
    ok("set_isa", "scalar", lambda: (("scalar",), {})),
    Call("set_isa", "unknown", lambda: (("sse",), {}), ValueError),
    Call("set_isa", "kind", lambda: ((3,), {}), TypeError),
    ok("set_num_threads", "two", lambda: ((2,), {})),
    Call("set_num_threads", "zero", lambda: ((0,), {}), ValueError),
    Call("set_num_threads", "huge", lambda: ((2**70,), {}), ValueError),
    Call("set_num_threads", "kind", lambda: ((2.0,), {}), TypeError),
    *index_calls("index_array", {"list", "tuple", "numpy", "tensor", "capsule", "old-capsule", "empty"}),
    *index_calls("docs_from_ids", {"list", "tensor", "capsule", "empty"}),
    *index_calls("docs_from_offsets", {"list", "tensor"}),
    Call("docs_from_offsets", "empty", lambda: (([],), {}), ValueError),
    Call("docs_from_offsets", "decreasing", lambda: (([0, 3, 2],), {}), ValueError),
    *frames(),
    *adam_calls(),
    *attention_calls(),
    *clip_calls(),
    *comm_calls(),
    *conv_calls(),
    *exchange_calls(),
    *gate_calls(),
    *gdn_calls(),
    *loss_calls(),
    *norm_calls(),
    *rope_calls(),
    *mlp_calls(),
    *moe_calls(),
]
