"""Between plain mappings and the dataclasses of a configuration.

Knows dataclasses and types, not what any key means. Every fault is collected with its dotted key, so that one run tells
all of them.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Literal, TypeVar, Union

from ostinato.ppo.errors import Problem

C = TypeVar("C")


class _WrongType(Exception):  # noqa: N818  (caught where it is raised)
    """A value is not of its field's type."""


@cache
def field_types(cls: type) -> dict[str, Any]:
    """The resolved type of every field that a user may set; fields whose metadata says `derived` are none."""
    hints = typing.get_type_hints(cls)
    entries = [entry for entry in dataclasses.fields(cls) if entry.init and not entry.metadata.get("derived")]
    return {entry.name: hints[entry.name] for entry in entries}


def leaves(cls: type, prefix: str = "") -> Iterator[tuple[str, Any, dataclasses.Field[Any], type]]:
    """Every key below a dataclass: its dotted name, type, field, and the class that declares it."""
    declared = {entry.name: entry for entry in dataclasses.fields(cls)}
    for name, annotation in field_types(cls).items():
        section = section_type(annotation)
        if section is not None:
            yield from leaves(section, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", annotation, declared[name], cls


def sections(cls: type, prefix: str = "") -> Iterator[tuple[str, type]]:
    """Every dataclass below a dataclass, itself included, with its dotted name."""
    yield prefix.rstrip("."), cls
    for name, annotation in field_types(cls).items():
        section = section_type(annotation)
        if section is not None:
            yield from sections(section, f"{prefix}{name}.")


def key_type(cls: type, key: str) -> Any:
    """The type of a dotted key: a section, a field, `Any` below a field with free keys; None: there is no such key."""
    name, dot, rest = key.partition(".")
    known = field_types(cls)
    if name not in known or not dot:
        return known.get(name)
    section = section_type(known[name])
    if section is None:
        return Any if is_mapping(known[name]) else None
    return key_type(section, rest)


def section_type(annotation: Any) -> type | None:
    """The dataclass that a field holds (also an optional one), or None for a plain value."""
    for option in _options(annotation):
        if isinstance(option, type) and dataclasses.is_dataclass(option):
            return option
    return None


def is_mapping(annotation: Any) -> bool:
    """Whether a field holds a mapping with free keys."""
    return any((typing.get_origin(option) or option) in (dict, Mapping) for option in _options(annotation))


def type_text(annotation: Any) -> str:
    """A type as a person would write it: `int`, `null or str`, `one of a, b`, `a list of str`."""
    options = _options(annotation)
    if len(options) > 1:
        rest = [type_text(option) for option in options if option is not types.NoneType]
        return " or ".join([*rest, "null"] if types.NoneType in options else rest)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return "one of " + ", ".join(str(argument) for argument in arguments)
    if origin in (list, tuple):
        return f"a list of {type_text(arguments[0])}" if arguments else "a list"
    if is_mapping(annotation):
        return "a mapping"
    if annotation is Any:
        return "anything"
    return getattr(annotation, "__name__", str(annotation))


def nearest_key(cls: type, key: str) -> str | None:
    """The real key that an unknown one most likely means, or None.

    A likeness in the same section comes first, then the same last name elsewhere, then a likeness of the whole.
    """
    known = [name for name, *_ in leaves(cls)]
    section, _, last = key.rpartition(".")
    renamed = f"{section}.{RENAMED.get(last)}"
    if renamed in known:
        return renamed
    beside = {name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == section}
    close = difflib.get_close_matches(last, beside, n=1, cutoff=0.7)
    if close:
        return beside[close[0]]
    same_last = [name for name in known if name.rpartition(".")[2] == RENAMED.get(last, last)]
    if same_last:
        return max(same_last, key=lambda name: difflib.SequenceMatcher(None, name, key).ratio())
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    if close:
        return close[0]
    by_last = {name.rpartition(".")[2]: name for name in known}
    close = difflib.get_close_matches(last, by_last, n=1, cutoff=0.8)
    return by_last[close[0]] if close else None


RENAMED = {
    "ppo_micro_batch_size": "ppo_micro_batch_size_per_gpu",
    "log_prob_micro_batch_size": "log_prob_micro_batch_size_per_gpu",
    "forward_micro_batch_size": "forward_micro_batch_size_per_gpu",
    "update_weights_bucket_bytes": "update_weights_bucket_megabytes",
    "grad_offload": "param_offload",
    "total_steps": "total_training_steps",
    "warmup_style": "lr_scheduler_type",
    "learning_rate": "lr",
    "kl_coeff": "kl_loss_coef",
    "kl_loss_coeff": "kl_loss_coef",
    "entropy_coef": "entropy_coeff",
    "max_new_tokens": "response_length",
}
"""Last names of keys that other systems use -> ours."""


def unknown(cls: type, key: str) -> Problem:
    """The fault of a key that does not exist."""
    near = nearest_key(cls, key)
    hint = f"did you mean {near}?" if near else "docs/config.md lists every key."
    return Problem(key, f"there is no such key; {hint}", also=(near,) if near else ())


def build(
    cls: type[C], values: Mapping[str, Any], problems: list[Problem], prefix: str = "", root: type | None = None
) -> C:
    """Make a dataclass from a nested mapping.

    A fault is put on `problems` and its key left at the default, so that the rest can be checked as well.

    Args:
        cls: the dataclass.
        values: field name -> value; sections are mappings. Missing fields keep their defaults.
        problems: the faults found so far; this call adds to it.
        prefix: dotted key of this section, with its dot.
        root: the dataclass of the whole configuration, where nearest keys are looked for.
    """
    known, root = field_types(cls), root or cls
    arguments: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if name not in known:
            problems += [unknown(root, leaf) for leaf in _leaf_keys(value, key)]
            continue
        section = section_type(known[name])
        if section is not None and isinstance(value, Mapping):
            arguments[name] = build(section, value, problems, f"{key}.", root)
            continue
        try:
            arguments[name] = _convert(value, known[name])
        except _WrongType:
            expected = "a section" if section else type_text(known[name])
            problems.append(Problem(key, f"expected {expected}, got {_value_text(value)}"))
    return _construct(cls, arguments, problems, prefix)


def _construct(cls: type[C], arguments: dict[str, Any], problems: list[Problem], prefix: str) -> C:
    """Call the class; where it refuses its values, find those that are to blame and leave them out."""
    try:
        return cls(**arguments)
    except (ValueError, TypeError) as refusal:
        problems.append(_refused(cls, prefix, refusal))
    plain = {name: value for name, value in arguments.items() if section_type(field_types(cls)[name]) is None}
    kept = {name: value for name, value in arguments.items() if name not in plain}
    for name, value in plain.items():
        try:
            cls(**kept, **{name: value})
        except (ValueError, TypeError) as refusal:
            problem = _refused(cls, prefix, refusal)
            if problem not in problems:
                problems.append(problem)
        else:
            kept[name] = value
    return cls(**kept)


def _refused(cls: type, prefix: str, refusal: Exception) -> Problem:
    """The fault that a dataclass found in its own values; its text begins with the key, more or less dotted."""
    text = str(refusal)
    key = getattr(refusal, "key", "")
    if key and text.startswith(f"{key}: "):
        return Problem(key, text.removeprefix(f"{key}: "))
    head, colon, rest = text.partition(": ")
    name = head.rpartition(".")[2]
    if colon and name in field_types(cls):
        return Problem(f"{prefix}{name}", rest)
    word = next((name for name in field_types(cls) if text.startswith((f"{name}=", f"{name} "))), None)
    return Problem(f"{prefix}{word}" if word else prefix.rstrip("."), text)


def to_mapping(config: Any) -> Any:
    """A dataclass as nested plain dicts and lists, only what one may set."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {name: to_mapping(getattr(config, name)) for name in field_types(type(config))}
    if isinstance(config, Mapping):
        return {str(key): to_mapping(value) for key, value in config.items()}
    if isinstance(config, list | tuple):
        return [to_mapping(value) for value in config]
    return config


def _options(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, or the type alone."""
    if typing.get_origin(annotation) in (Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def _convert(value: Any, annotation: Any) -> Any:
    """A value as its field wants it.

    Raises:
        _WrongType: it is none.
    """
    options = _options(annotation)
    if len(options) > 1:
        if value is None and types.NoneType in options:
            return None
        for option in options:
            if isinstance(option, type) and type(value) is option:
                return value
        for option in (option for option in options if option is not types.NoneType):
            try:
                return _convert(value, option)
            except _WrongType:
                continue
        raise _WrongType
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any:
        return value
    if origin is Literal:
        return _one_of(value, arguments)
    if (origin or annotation) in (list, tuple):
        items = value if isinstance(value, list | tuple) else [value]
        if value is None or isinstance(value, Mapping):
            raise _WrongType
        inner = arguments[0] if arguments else Any
        return (origin or annotation)(_convert(item, inner) for item in items)
    if is_mapping(annotation):
        if not isinstance(value, Mapping):
            raise _WrongType
        return dict(value)
    return _scalar(value, annotation)


def _one_of(value: Any, members: tuple[Any, ...]) -> Any:
    for member in members:
        if value == member and isinstance(value, bool) == isinstance(member, bool):
            return member
    raise _WrongType


def _scalar(value: Any, annotation: Any) -> Any:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if annotation is bool and isinstance(value, bool):
        return value
    if annotation is int and number and math.isfinite(value) and value == int(value):
        return int(value)
    if annotation is float and number:
        return float(value)
    if annotation is str and (number or isinstance(value, str)):
        return str(value)  # a name or a threshold that happens to be a number
    if annotation not in (bool, int, float, str) and isinstance(annotation, type):
        if isinstance(value, annotation):
            return value
        if isinstance(value, str):
            return annotation(value)  # paths and the like
    raise _WrongType


def _value_text(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return f"a mapping with {', '.join(map(str, value)) or 'nothing in it'}"
    return f"{value!r} ({type(value).__name__})"


def _leaf_keys(value: Any, key: str) -> list[str]:
    """Dotted keys of the plain values at and below a value."""
    if isinstance(value, Mapping) and value:
        return [leaf for name, below in value.items() for leaf in _leaf_keys(below, f"{key}.{name}")]
    return [key]
