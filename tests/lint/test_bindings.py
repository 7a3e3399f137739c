"""Every method of the extension is in its table, in the stub with the same arguments, and in the leak list."""

import ast
import re

from automodel_c import _amcore
from tests.leaks.calls import CALLS
from tests.lint.source import ROOT, files

METHODS = {name for name in dir(_amcore) if not name.startswith("_")}
STUB = ast.parse((ROOT / "automodel_c/_amcore.pyi").read_text())


def stub_signature(function):
    """'(a, b, *, c)' without types; a default shows as the name alone."""
    args = function.args
    names = [a.arg for a in args.posonlyargs + args.args]
    return names + ([f"${a.arg}" for a in args.kwonlyargs])


def text_signature(method):
    names, keyword_only = [], ""
    for part in method.__text_signature__.strip("()").split(","):
        name = part.strip().split("=")[0]
        if name == "*":
            keyword_only = "$"
        elif name and name not in ("/", "$module"):
            names.append(keyword_only + name)
    return names


def test_tables_stub_and_module_name_the_same_methods():
    listed = set()
    for path in files("csrc", suffixes=(".c",)):
        if path.name.endswith("_py.c") or path.name == "module.c":
            listed |= set(re.findall(r'AM_PY_METHOD\(\s*(\w+),|^\s*\{"(\w+)", \w+, METH', path.read_text(), re.M))
    assert {first or second for first, second in listed} - {"pyname"} == METHODS
    assert {node.name for node in STUB.body if isinstance(node, ast.FunctionDef)} == METHODS


def test_stub_and_docstrings_have_the_same_arguments():
    for node in STUB.body:
        if isinstance(node, ast.FunctionDef):
            method = getattr(_amcore, node.name)
            assert [n.lstrip("$") for n in stub_signature(node)] == [n.lstrip("$") for n in text_signature(method)]


def test_leak_list_covers_every_method():
    assert {call.method for call in CALLS} == METHODS
    failing = {call.method for call in CALLS if call.raises is not None}
    assert failing == METHODS - {"build_info"}
