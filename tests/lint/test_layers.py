"""Who may include or import whom."""

import ast
import re

import pytest

from tests.lint.source import C_SUFFIXES, ROOT, files, matching_lines, relative, slices

C_FILES = files("csrc", suffixes=C_SUFFIXES)
OWNERS = {  # header -> who may include it
    r"Python\.h": r"csrc/python/|csrc/\w+/\w+_py\.c$",
    r"numpy/": r"csrc/python/py_numpy\.c$",
    r"cuda\w*\.h|cooperative_groups": r"csrc/cuda/",
    r"nccl\.h": r"csrc/cuda/comm/nccl\.cu$",
    r"cublas\w*\.h": r"csrc/cuda/gemm/gemm_lt\.cu$|csrc/core/am_dl\.c$",
    r"torch/|ATen|c10/|cutlass|pybind": r"^$",
}


def includes(path):
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text(), re.M)


def headers_below(folder):
    return {p.name for p in files(folder, suffixes=(".h", ".inc", ".cuh"))}


def allowed_headers(path):
    """Our own headers that a file may include: core's, its slice's, the doorway's in *_py.c, CUDA's common ones."""
    parts = path.relative_to(ROOT / "csrc").parts
    allowed = headers_below("csrc/core")
    if parts[0] == "cuda":
        allowed |= headers_below("csrc/cuda/common") | headers_below(f"csrc/cuda/{parts[1]}")
        allowed |= headers_below(f"csrc/{parts[1]}")
    else:
        allowed |= headers_below(f"csrc/{parts[0]}")
    return allowed | (headers_below("csrc/python") if path.name.endswith("_py.c") else set())


@pytest.mark.parametrize("path", C_FILES, ids=relative)
def test_includes(path):
    ours = {p.name for p in C_FILES}
    for header in includes(path):
        for pattern, owner in OWNERS.items():
            if re.match(pattern, header):
                assert re.search(owner, relative(path)), f"{relative(path)} may not include {header}"
        name = header.rsplit("/", 1)[-1]
        assert name not in ours or name in allowed_headers(path), f"{relative(path)} may not include {header}"


def test_asm_lives_in_cuda_common():
    elsewhere = [p for p in C_FILES if "csrc/cuda/common/" not in relative(p)]
    assert not matching_lines(elsewhere, r"\basm\b|__asm__", "asm")


def test_environment_is_read_in_core():
    elsewhere = [p for p in C_FILES if "csrc/core/" not in relative(p)]
    assert not matching_lines(elsewhere, r"\bgetenv\b", "getenv")


FORBIDDEN = {  # a folder may not import any of these parts of the package
    "reference": {"_amcore", "partition", "ops", "optim", "parallel", "models", "recipes"},
    "ops": {"optim", "parallel", "models", "recipes"},
    "optim": {"parallel", "models", "recipes"},
    "parallel": {"models", "recipes"},
    "data": {"parallel", "models", "recipes"},
    "models": {"recipes"},
}
EXCEPT = {  # operators with ranks among their arguments
    "automodel_c/ops/moe.py": {"parallel.experts.moe_over_ranks"},
    "automodel_c/ops/loss.py": {"parallel.vocab.loss_over_ranks"},
}


def origin(path, node):
    """The absolute dotted name that a `from ... import` names, its leading dots resolved."""
    if not node.level:
        return node.module
    package = path.relative_to(ROOT).parent.parts
    return ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])


def imported(path):
    """Dotted names of automodel_c that a Python file imports, below the package's name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{origin(path, node)}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name.removeprefix("automodel_c.") for name in names if name.startswith("automodel_c."))


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_imports(folder):
    for path in files(f"automodel_c/{folder}", suffixes=(".py",)):
        for name in set(imported(path)) - EXCEPT.get(relative(path), set()):
            assert name.split(".")[0] not in FORBIDDEN[folder], f"{relative(path)} may not import automodel_c.{name}"


def test_relative_imports_are_seen():
    node = ast.parse("from ..recipes import schema").body[0]
    assert origin(ROOT / "automodel_c/models/gates.py", node) == "automodel_c.recipes"


def test_operators_do_not_import_each_other():
    for path in files("automodel_c/ops", suffixes=(".py",)):
        if path.name == "__init__.py":
            continue
        others = {name.split(".")[1] for name in imported(path) if name.startswith("ops.")}
        assert others & set(slices()) <= {path.stem}, f"{relative(path)} imports {others}"


def test_reference_imports_only_torch_numpy_and_the_standard_library():
    for path in files("automodel_c/reference", suffixes=(".py",)):
        text = path.read_text()
        for module in ("automodel_c._amcore", "flash_attn", "transformers", "fla"):
            assert not re.search(rf"^\s*(import|from) {re.escape(module)}\b", text, re.M), f"{relative(path)}: {module}"
