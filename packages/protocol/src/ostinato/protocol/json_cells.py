"""Cells and meta entries as strict JSON: what has a place in it, and the two things that need a tag."""

from __future__ import annotations

import math
from typing import Any

from ostinato.protocol.errors import UnserializableError

_TAG = "$"
_SPECIAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def to_json(where: str, value: Any) -> Any:
    """Bring a value into strict JSON.

    Args:
        where: what the value is, for errors.
        value: text, int, float, bool, None, list, or dict with text keys, as deep as they go.

    Returns:
        The same, with tags for NaN, infinities and dicts that hold the tag's own key.

    Raises:
        UnserializableError: any other type; nothing is converted in silence.
    """
    kind = type(value)
    if value is None or kind in (str, bool, int):
        return value
    if kind is float:
        return value if math.isfinite(value) else {_TAG: repr(value)}
    if kind is list:
        return [to_json(where, item) for item in value]
    if kind is dict:
        for key in value:
            if type(key) is not str:
                raise UnserializableError(f"{where}: a dict has the key {key!r}; only text keys can be written")
        items = {key: to_json(f"{where}, key {key!r}", item) for key, item in value.items()}
        return {_TAG: "dict", "of": items} if _TAG in items else items
    raise UnserializableError(
        f"{where}: {kind.__module__}.{kind.__qualname__} has no form without pickle; text, numbers, booleans, None, "
        "lists and dicts with text keys have: convert it (.tolist(), .item(), list(...)), make it a column, or drop it"
    )


def from_json(value: Any) -> Any:
    """Undo `to_json`."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if isinstance(value, dict):
        if value.get(_TAG) == "dict":
            return {key: from_json(item) for key, item in value["of"].items()}
        if _TAG in value:
            return _SPECIAL[value[_TAG]]
        return {key: from_json(item) for key, item in value.items()}
    return value
