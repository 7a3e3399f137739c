"""Writes docs/api.md from docstrings and docs/recipe_keys.md from recipes/schema.py.

python tools/gen_docs.py writes both; with --check it says whether they are fresh (exit status 1: they are not).
"""

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
    from automodel_c.recipes.keys import walk_keys

    parts = [
        MADE,
        "# Every key of a recipe\n",
        "Beside each: its type, its default, and what it means. [recipes.md](recipes.md) is the guide.\n",
    ]
    parts.append("A key of which only some values are carried out refuses any other, with what to say instead.\n")
    sections = {}
    for where, field, _, comment in walk_keys():
        cells = f"`{where}{field.name}`", f"`{_type(field)}`", f"`{_default(field)}`", _meaning(field, comment)
        sections.setdefault(where, []).append("| " + " | ".join(x.replace("|", "\\|") for x in cells) + " |")
    absent = [f"`{f.name}`" for f in dataclasses.fields(schema.Recipe) if f"{f.name}." in sections and not f.default]
    parts.append(f"A section is there with its defaults where a recipe leaves it out; not so {' and '.join(absent)}.\n")
    for where, rows in sections.items():
        parts += [f"## {where.rstrip('.') or 'at the top'}\n", "| key | type | default | |", "|---|---|---|---|"]
        parts += [*rows, ""]
    return "\n".join(parts)


def _type(field):
    plain = isinstance(field.type, type)
    return field.type.__name__ if plain else str(field.type).replace("automodel_c.recipes.schema.", "")


def _default(field):
    value = field.default_factory() if field.default is dataclasses.MISSING else field.default
    return json.dumps(value)


def _meaning(field, comment):
    accepted = field.metadata.get("accepted")
    only = "" if accepted is None else "only " + " or ".join(f"`{json.dumps(a)}`" for a in accepted)
    return "; ".join(x for x in (only, (comment or "").replace("<", "&lt;")) if x)


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
