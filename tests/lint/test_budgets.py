"""A reader has an hour: files of at most 800 lines, functions of about a screen."""

import ast

import pytest

from tests.lint.source import C_SUFFIXES, c_functions, files, relative

SOFT, HARD = 400, 800
C_FUNCTION, KERNEL, PYTHON_FUNCTION = 60, 200, 60
FOLDERS = ("csrc", "automodel_c", "tests", "benchmarks", "examples", "tools", "setup.py")
SOURCES = [p for p in files(*FOLDERS, suffixes=(*C_SUFFIXES, ".py", ".pyi")) if "generated" not in p.name]
C_FILES = files("csrc", suffixes=C_SUFFIXES)


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_file_length(path, capsys):
    length = len(path.read_text().splitlines())
    if length > SOFT:
        with capsys.disabled():
            print(f"\n{relative(path)} has {length} lines, {SOFT} are a good limit")
    assert length <= HARD


@pytest.mark.parametrize("path", C_FILES, ids=relative)
def test_c_function_length(path):
    lines = path.read_text().splitlines()
    for name, first, length, kernel in c_functions(path):
        limit = KERNEL if kernel else C_FUNCTION
        allowed = "lint: allow length" in lines[max(0, first - 2)]
        assert length <= limit or allowed, f"{relative(path)}:{first}: {name} has {length} lines, {limit} are the limit"


def test_c_functions_are_found():
    path = next(p for p in C_FILES if p.name == "am_pool.c")
    found = {name: length for name, _, length, _ in c_functions(path)}
    assert {"worker", "am_parallel_for", "run_chunks"} <= set(found) and 5 < found["am_parallel_for"] < 60


@pytest.mark.parametrize("path", files("automodel_c", suffixes=(".py",)), ids=relative)
def test_public_python_function_length(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("_"):
            continue
        body = node.body[1:] if ast.get_docstring(node) else node.body
        length = node.end_lineno - body[0].lineno + 1 if body else 0
        assert length <= PYTHON_FUNCTION, f"{relative(path)}:{node.lineno}: {node.name} has {length} lines"
