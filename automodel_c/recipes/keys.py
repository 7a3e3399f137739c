"""Every recipe key with its type, default and comment, as in schema.py: what `automodel-c train --keys` prints."""

import dataclasses
import inspect
import json
import re
import types
import typing

from ..keys import check_known
from . import schema


def describe_keys(prefix=""):
    """Lines `key: type = default  # comment` of all keys below the dotted `prefix`, "" for all.

    ValueError names the nearest key where there is none of that name.
    """
    found = {where + field.name: _describe(field, *more) for where, field, *more in walk_keys()}
    if prefix and not any(key == prefix or key.startswith(prefix + ".") for key in found):
        check_known(prefix, {part for key in found for part in _ends(key)})
    lines = [(key, text) for key, text in found.items() if not prefix or (key + ".").startswith(prefix + ".")]
    return [f"{key}: {text}" for key, text in lines]


def _ends(key):
    parts = key.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


def walk_keys(cls=schema.Recipe, where=""):
    """(dotted section with its last dot, field, what its type may be, comment or None) of every key, in order.

    A section that a recipe may leave out (`Wandb | None`) is walked too.
    """
    hints, comments = typing.get_type_hints(cls), _comments(cls)
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        section = next((option for option in options if dataclasses.is_dataclass(option)), None)
        if section is not None:
            yield from walk_keys(section, f"{where}{field.name}.")
        else:
            yield where, field, options, comments.get(field.name)


def _describe(field, options, comment):
    default = field.default_factory() if field.default is dataclasses.MISSING else field.default
    names = [_name(option) for option in options if option is not type(None)]
    text = f"{' or '.join(names)} = {_yaml(default)}"
    accepted = field.metadata.get("accepted")
    if accepted is not None:
        comment = f"only {' or '.join(map(_yaml, accepted))} so far" + (f"; {comment}" if comment else "")
    return f"{text}  # {comment}" if comment else text


def _name(option):
    if typing.get_origin(option) is list:
        return f"list of {_name(typing.get_args(option)[0])}"
    return "any" if option is typing.Any else option.__name__


def _yaml(value):
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def _comments(cls):
    """The comments that stand behind the fields, with null for None, as YAML has it."""
    found = re.findall(r"^    (\w+): [^#\n]*?#\s*(.+)$", inspect.getsource(cls), re.M)
    return {name: re.sub(r"\bNone\b", "null", text) for name, text in found}
