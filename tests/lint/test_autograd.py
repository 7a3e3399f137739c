"""backward returns one gradient for every argument of forward."""

import ast
import textwrap

import pytest

from tests.lint.source import files, relative


def wrong_backwards(text):
    """'class, returned, wanted' for each autograd.Function whose backward returns another number of values."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith("Function") for base in node.bases):
            methods = {m.name: m for m in node.body if isinstance(m, ast.FunctionDef)}
            if {"forward", "backward"} <= set(methods):
                yield from _compare(node.name, methods)


def _compare(name, methods):
    arguments = methods["forward"].args
    if arguments.vararg:
        return
    count = len(arguments.posonlyargs) + len(arguments.args)
    wanted = count if "setup_context" in methods else count - 1
    for node in ast.walk(methods["backward"]):
        if not isinstance(node, ast.Return) or node.value is None:
            continue
        if isinstance(node.value, ast.Tuple):
            if any(isinstance(value, ast.Starred) for value in node.value.elts):
                continue
            returned = len(node.value.elts)
        elif isinstance(node.value, ast.Constant):
            returned = 1
        else:
            continue  # a name or a call: the gradient checks see its length
        if returned != wanted:
            yield name, returned, wanted


@pytest.mark.parametrize("path", files("automodel_c", suffixes=(".py",)), ids=relative)
def test_backward_returns_as_many_as_forward_takes(path):
    assert not list(wrong_backwards(path.read_text()))


def test_the_lint_sees_a_missing_gradient():
    text = """
    class Bad(torch.autograd.Function):
        def forward(ctx, x, scale): return x
        def backward(ctx, grad): return grad, None, None

    class Good(Function):
        def forward(x, scale): return x
        def setup_context(ctx, inputs, output): pass
        def backward(ctx, grad): return grad, None
    """
    assert list(wrong_backwards(textwrap.dedent(text))) == [("Bad", 3, 2)]
