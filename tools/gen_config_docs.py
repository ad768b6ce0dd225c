"""Write docs/config.md, the reference of every configuration key, from the dataclasses and their docstrings.

python tools/gen_config_docs.py            write it
python tools/gen_config_docs.py --check    fail where it is not current
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ostinato.ppo.config import FOLLOWS, PpoConfig
from ostinato.ppo.schema import field_types, section_type, sections, type_text

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "config.md"

HEAD = """\
# Configuration

Written by `make docs` (tools/gen_config_docs.py) from the dataclasses; change those, not this page.

A key is set on the command line as `section.key=value`, or in a YAML file of your own (`ostinato-ppo --help`). Each key
has a default. `null` stands for «not set»; a list is written `[a,b]`, and one value stands for a list of one. A key
whose default is marked → takes the other key's value until it is set itself. `ostinato-ppo … --cfg job` prints all keys
of a run with their values.
"""


def meanings(cls: type) -> dict[str, str]:
    """What a class and its bases say about their fields under `Attributes:`; a field's `help` metadata comes first."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            found |= dict(_attributes(inspect.cleandoc(base.__dict__.get("__doc__") or "")))
    fields = dataclasses.fields(cls)
    return found | {entry.name: entry.metadata["help"] for entry in fields if "help" in entry.metadata}


def _attributes(text: str) -> Iterator[tuple[str, str]]:
    block = re.search(r"^Attributes:\n((?:[ ]+.*\n?|\n)*)", text, re.MULTILINE)
    if block is None:
        return
    for entry in re.split(r"\n(?=[ ]{4}\w)", "\n" + block[1].rstrip()):
        name, colon, meaning = entry.strip().partition(":")
        if colon:
            yield name, re.sub(r"(?<!=)\bNone\b", "null", " ".join(meaning.split()))


def default_text(entry: dataclasses.Field[Any], key: str) -> str:
    """A field's default as one would write it."""
    if key in FOLLOWS:
        return f"→ `{FOLLOWS[key]}`"
    if key == "trainer.default_local_dir":
        return "`checkpoints/PROJECT/EXPERIMENT`"
    value = entry.default if entry.default_factory is dataclasses.MISSING else entry.default_factory()
    if value is None:
        return "`null`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, list | tuple):
        return f"`[{','.join(map(str, value))}]`"
    return f"`{value}`" if value not in ("", {}) else "not set" if value == "" else "`{}`"


def document() -> str:
    """The whole page."""
    parts, written = [HEAD], {}
    for name, cls in sections(PpoConfig):
        about, types = meanings(cls), field_types(cls)
        entries = {entry.name: entry for entry in dataclasses.fields(cls) if entry.name in types}
        plain = [entry for entry in entries.values() if section_type(types[entry.name]) is None]
        if not name or not plain:
            continue
        rows = ""
        for entry in plain:
            key = f"{name}.{entry.name}"
            cells = (f"`{entry.name}`", type_text(types[entry.name]), default_text(_default_of(name, entry), key))
            rows += "| " + " | ".join((*cells, about.get(entry.name, "").replace("|", "\\|"))) + " |\n"
        same = written.setdefault(rows, name)
        table = f"| key | type | default | meaning |\n|---|---|---|---|\n{rows}" if same == name else f"As `{same}`.\n"
        parts.append(f"\n## {name}\n\n{_first_line(cls)}\n\n{table}")
    return "".join(parts)


def _default_of(section: str, entry: dataclasses.Field[Any]) -> dataclasses.Field[Any]:
    """The field with the default that it has in this place: `critic.optim.lr` differs from the optimizer's own."""
    config: Any = PpoConfig()
    for part in section.split("."):
        config = getattr(config, part)
    placed = dataclasses.field(default=getattr(config, entry.name)) if not _mutable(config, entry) else entry
    placed.name = entry.name
    return placed


def _mutable(config: Any, entry: dataclasses.Field[Any]) -> bool:
    return isinstance(getattr(config, entry.name), list | dict | set)


def _first_line(cls: type) -> str:
    return inspect.cleandoc(cls.__doc__ or "").splitlines()[0]


def main() -> None:
    """Write the page, or compare it."""
    text = document()
    if "--check" not in sys.argv[1:]:
        DOCUMENT.parent.mkdir(exist_ok=True)
        DOCUMENT.write_text(text, encoding="utf-8")
    elif not DOCUMENT.exists() or DOCUMENT.read_text(encoding="utf-8") != text:
        sys.exit("docs/config.md is not current: run `make docs`")


if __name__ == "__main__":
    main()
