"""Writes docs/api.md from docstrings and docs/recipe_keys.md from recipes/schema.py.

python tools/gen_docs.py writes both; with --check it says whether they are fresh (exit status 1: they are not).
"""

import ast
import dataclasses
import importlib
import inspect
import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
MODULES = ("automodel_c", "automodel_c.ops", "automodel_c.optim", "automodel_c.parallel", "automodel_c.models.qwen3_5")
MORE = {"automodel_c": ("patch_transformers",)}  # names that are imported at first use
MADE = "<!-- written by tools/gen_docs.py: make api -->\n"


def api():
    """The page of public names: signatures and docstrings, module by module."""
    parts = [
        MADE,
        "# Public names\n",
        "What is not on this page may change without notice. Guides: [README.md](README.md).\n",
    ]
    for name in MODULES:
        module = importlib.import_module(name)
        parts += [f"## {name}\n", inspect.getdoc(module) + "\n"]
        for public in sorted((*module.__all__, *MORE.get(name, ())), key=str.lower):
            parts += _entry(f"{name}.{public}".removeprefix("automodel_c."), getattr(module, public))
    return "\n".join(parts)


def _entry(path, value):
    if inspect.ismodule(value):
        names = [n for n, f in vars(value).items() if inspect.isroutine(f) and f.__module__ == value.__name__]
        functions = [(n, getattr(value, n)) for n in names if not n.startswith("_") and getattr(value, n).__doc__]
        return [f"### {path}\n", _text(value), *(x for n, f in functions for x in _entry(f"{path}.{n}", f))]
    if not callable(value):
        ours = type(value).__module__.startswith("automodel_c")
        return [f"### {path}\n", _text(type(value)) if ours else f"{', '.join(f'`{x}`' for x in value)}\n"]
    parts = [f"### {path}\n", f"```text\n{path.rpartition('.')[2]}{_signature(value)}\n```\n", _text(value)]
    if inspect.isclass(value):
        methods = [(n, f) for n, f in vars(value).items() if inspect.isfunction(f) and f.__doc__ and n[0] != "_"]
        parts += [f"**.{n}**`{_signature(f)}`\n\n{_text(f)}" for n, f in methods]
    return parts


def _signature(value):
    try:
        text = str(inspect.signature(value))
    except (TypeError, ValueError):
        return "(...)"
    return text.replace("(self, ", "(").replace("(self)", "()")


def _text(value):
    return f"```text\n{inspect.getdoc(value)}\n```\n"


def recipe_keys():
    """A table of each section of a recipe: key, type, default, and what the comment beside it says."""
    from automodel_c.recipes import schema

    source = Path(schema.__file__).read_text(encoding="utf-8")
    parts = [
        MADE,
        "# Every key of a recipe\n",
        "Beside each: its type, its default, and what it means. [recipes.md](recipes.md) is the guide.\n",
    ]
    parts.append("A key of which only some values are carried out refuses any other, with what to say instead.\n")
    for where, cls in _sections(schema.Recipe, ""):
        parts += [f"## {where.rstrip('.') or 'at the top'}\n", "| key | type | default | |", "|---|---|---|---|"]
        comments = _comments(source, cls.__name__)
        for field in dataclasses.fields(cls):
            if not _section_of(field):
                cells = (
                    f"`{where}{field.name}`",
                    f"`{_type(field)}`",
                    f"`{_default(field)}`",
                    _meaning(field, comments),
                )
                parts.append("| " + " | ".join(x.replace("|", "\\|") for x in cells) + " |")
        parts.append("")
    return "\n".join(parts)


def _sections(cls, where):
    yield where, cls
    for field in dataclasses.fields(cls):
        if _section_of(field) and field.name != "validation_dataset":
            yield from _sections(_section_of(field), f"{where}{field.name}.")


def _section_of(field):
    made = field.default_factory
    return made if dataclasses.is_dataclass(made) else None


def _type(field):
    plain = isinstance(field.type, type)
    return field.type.__name__ if plain else str(field.type).replace("automodel_c.recipes.schema.", "")


def _default(field):
    value = field.default_factory() if field.default is dataclasses.MISSING else field.default
    return json.dumps(value)


def _meaning(field, comments):
    accepted = field.metadata.get("accepted")
    only = "" if accepted is None else "only " + " or ".join(f"`{json.dumps(a)}`" for a in accepted)
    return "; ".join(x for x in (only, comments.get(field.name, "").replace("<", "&lt;")) if x)


def _comments(source, name):
    """{field: its comment} of a dataclass."""
    lines = source.splitlines()
    body = next(n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == name).body
    fields = [n for n in body if isinstance(n, ast.AnnAssign)]
    ends = {n.target.id: " ".join(lines[n.lineno - 1 : n.end_lineno]) for n in fields}
    return {key: text.partition("  # ")[2].strip() for key, text in ends.items() if "  # " in text}


PAGES = {"api.md": api, "recipe_keys.md": recipe_keys}


def main(words):
    stale = 0
    for name, make in PAGES.items():
        path, text = ROOT / "docs" / name, make().rstrip() + "\n"
        if "--check" not in words:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            print(f"docs/{name} is stale: make api")
            stale = 1
    return stale


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
