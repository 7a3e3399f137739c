"""Unknown names are errors that name the nearest known one."""

import difflib


def check_known(key, known, where="", error=ValueError):
    """Raises `error` when `key` is not in `known`; `where` is the dotted prefix for the message."""
    if key in known:
        return
    near = difflib.get_close_matches(key, list(known), n=1, cutoff=0.0)
    hint = f"; the nearest known key is {where}{near[0]}" if near else ""
    raise error(f"unknown key {where}{key}{hint}")
