"""The tables of settings in docs/finetuning.md, made of the dataclasses' docstrings.

`python tests/settings_table.py` writes them anew; test_train_settings.py compares.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from moe_tp.parallel.layout import ParallelLayout, Runtime
from moe_tp.train.config import DataConfig, FinetuneConfig, TrainConfig
from moe_tp.train.lora import LoRAConfig

PAGE = Path(__file__).parent.parent / "docs" / "finetuning.md"
BEGIN, END = "<!-- settings: begin -->", "<!-- settings: end -->"
SECTIONS: tuple[tuple[str, type], ...] = (
    ("", FinetuneConfig),
    ("data", DataConfig),
    ("train", TrainConfig),
    ("lora", LoRAConfig),
    ("parallel", ParallelLayout),
    ("runtime", Runtime),
)


def table() -> str:
    """Return all tables as Markdown."""
    parts = []
    for name, kind in SECTIONS:
        known, hints = documented(kind), get_type_hints(kind)
        rows = [f"### {name or 'The file itself'}", "", "| Key | Default | |", "|---|---|---|"]
        for field in dataclasses.fields(kind):
            if not field.init:
                continue
            text = known[field.name].replace("|", "\\|")
            values = [f"`{value}`" for value in allowed(hints[field.name])]
            if not all(value.strip("`") in text for value in values):
                text = f"{text} One of {', '.join(values)}."
            rows.append(f"| `{field.name}` | {default(field)} | {text} |")
        parts.append("\n".join(rows))
    return "\n\n".join(parts) + "\n"


def documented(kind: type) -> dict[str, str]:
    """Return what the docstring of a dataclass says of each field."""
    found: dict[str, str] = {}
    names: list[str] = []
    inside = False
    for line in (kind.__doc__ or "").splitlines():
        text = line.strip()
        if text == "Args:":
            inside = True
        elif inside and line.startswith(" " * 12) and text:
            for name in names:
                found[name] += f" {text}"
        elif inside and line.startswith(" " * 8) and ":" in text:
            head, _, rest = text.partition(":")
            names = [name.strip() for name in head.split(",")]
            found.update(dict.fromkeys(names, rest.strip()))
        elif inside and text:
            break
    return found


def allowed(hint: Any) -> Iterator[str]:
    """Yield the values of the literal types in a type."""
    if get_origin(hint) is Literal:
        yield from map(str, get_args(hint))
    else:
        for part in get_args(hint):
            yield from allowed(part)


def default(field: dataclasses.Field[Any]) -> str:
    """Return a field's default as YAML would have it."""
    if field.default_factory is not dataclasses.MISSING:
        return "see below" if dataclasses.is_dataclass(field.default_factory) else "none"
    value = field.default
    if value is dataclasses.MISSING:
        return "" if not dataclasses.is_dataclass(field.type) else "see below"
    if value is None or value == ():
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return f"`[{', '.join(map(str, value))}]`"
    return f"`{value}`"


def written() -> str:
    """Return the page with its tables as they must be."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(written(), encoding="utf-8")
