"""Dataclasses from YAML and `key.sub=value` words, each value typed by its field, and back."""

from __future__ import annotations

import dataclasses
import difflib
import os
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import yaml

from moe_tp.checkpoint.dtypes import SHORT
from moe_tp.errors import ConfigError
from moe_tp.train.config import FinetuneConfig

T = TypeVar("T")
_KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    torch.dtype: "a dtype such as bfloat16",
}


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> FinetuneConfig:
    """Return the settings of a YAML file with some of them replaced.

    Args:
        path: the file.
        overrides: `key.sub=value`, the value as YAML.

    Raises:
        ConfigError: the file cannot be read, or a key or value is not one that exists.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as settings: {error}") from error
    tree = _parse(text, str(path))
    for word in overrides:
        override(tree, word)
    return _at_home(from_mapping(FinetuneConfig, tree, str(path)))


def _at_home(config: FinetuneConfig) -> FinetuneConfig:
    """Return the settings with `~` in front of a path read as the home folder, as a shell does."""
    home, data = os.path.expanduser, config.data
    return dataclasses.replace(
        config,
        model=home(config.model),
        output=home(config.output),
        data=dataclasses.replace(
            data,
            train=tuple(map(home, data.train)),
            eval=tuple(map(home, data.eval)),
            tokenizer=data.tokenizer and home(data.tokenizer),
            chat_template=data.chat_template and home(data.chat_template),
        ),
    )


def override(tree: dict[str, Any], word: str) -> None:
    """Set one `key.sub=value` in a tree of settings, its value read as YAML."""
    key, found, text = word.partition("=")
    if not found or not key:
        raise ConfigError(f"{word!r} is no setting; write key.sub=value")
    value = _parse_value(text, word)
    *parents, last = key.split(".")
    node = tree
    for name in parents:
        inner = node.get(name)
        if inner is None:
            inner = node[name] = {}
        if not isinstance(inner, dict):
            raise ConfigError(f"{word!r} goes below {name}, which is {inner!r} and holds no keys")
        node = inner
    node[last] = value


def from_mapping(kind: type[T], tree: Mapping[str, Any], where: str, prefix: str = "") -> T:
    """Return a dataclass from nested mappings.

    Args:
        kind: a dataclass.
        tree: its fields by name.
        where: the file, for messages.
        prefix: dotted name of the dataclass in the file, with a dot at its end.

    Raises:
        ConfigError: an unknown key (the nearest known one is named), a missing one, a value of
            another type, or one that the dataclass refuses.
    """
    hints = typing.get_type_hints(kind)
    fields = {f.name: f for f in dataclasses.fields(kind) if f.init}  # type: ignore[arg-type]
    for key in tree:
        if key not in fields:
            raise ConfigError(f"{where}: {prefix}{key} is unknown; {_suggest(str(key), fields)}")
    values: dict[str, Any] = {}
    for name, entry in fields.items():
        if name in tree:
            values[name] = _typed(tree[name], hints[name], where, prefix + name)
        elif _required(entry):
            if not dataclasses.is_dataclass(hints[name]):
                raise ConfigError(f"{where}: {prefix}{name} is missing; {_purpose(kind, name)}")
            values[name] = _typed({}, hints[name], where, prefix + name)
    try:
        return kind(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def to_mapping(settings: Any) -> dict[str, Any]:
    """Return nested mappings that YAML can hold and `from_mapping` reads back."""
    return {f.name: _plain(getattr(settings, f.name)) for f in dataclasses.fields(settings)}


def to_yaml(settings: Any) -> str:
    """Return the settings as a YAML text."""
    return yaml.safe_dump(to_mapping(settings), sort_keys=False, allow_unicode=True)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_mapping(value)
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _required(entry: dataclasses.Field[Any]) -> bool:
    missing = dataclasses.MISSING
    return entry.default is missing and entry.default_factory is missing


def _suggest(key: str, known: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"{hint}It can be {', '.join(known)}"


def _purpose(kind: type, name: str) -> str:
    """Return the documentation of a field from its dataclass's docstring."""
    found: list[str] = []
    for line in (kind.__doc__ or "").splitlines():
        text = line.strip()
        if text.startswith(f"{name}:"):
            found = [text.partition(":")[2].strip()]
        elif found and line.startswith(" " * 12) and text:
            found.append(text)
        elif found:
            break
    return f"it is: {' '.join(found)}" if found else "add it"


def _typed(value: Any, hint: Any, where: str, name: str) -> Any:
    """Return the value as its field's type has it."""
    origin, choices = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None or (isinstance(value, str) and value.lower() in ("none", "null")):
            return None
        (inner,) = [choice for choice in choices if choice is not type(None)]
        return _typed(value, inner, where, name)
    if value is None:
        none = ", or [] for none" if origin is tuple else ""
        raise ConfigError(f"{where}: {name} has no value; give it one{none}, or leave it out")
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where}: {name}={value!r} must hold keys of its own")
        assert isinstance(hint, type)
        return from_mapping(hint, value, where, name + ".")
    if origin is typing.Literal:
        if value not in choices:
            raise ConfigError(
                f"{where}: {name}={value!r} is not one of {', '.join(map(str, choices))}"
            )
        return value
    if origin is tuple:
        items = list(value) if isinstance(value, (list, tuple)) else [value]
        kinds = [choices[0]] * len(items) if choices[-1] is Ellipsis else list(choices)
        if len(items) != len(kinds):
            raise ConfigError(f"{where}: {name}={value!r} must hold {len(kinds)} values")
        pairs = zip(items, kinds, strict=True)
        return tuple(_typed(item, kind, where, name) for item, kind in pairs)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where}: {name}={value!r} must hold keys of its own")
        return {str(key): _typed(item, choices[1], where, name) for key, item in value.items()}
    return _scalar(value, hint, where, name)


def _scalar(value: Any, hint: Any, where: str, name: str) -> Any:
    """Return a number, text, flag or dtype; YAML reads 1e-4 as text, which a float field takes."""
    text = value.strip().lower() if isinstance(value, str) else None
    if hint is bool and (isinstance(value, bool) or text in ("true", "false")):
        return value if isinstance(value, bool) else text == "true"
    if hint is torch.dtype and text is not None:
        found = getattr(torch, SHORT.get(text, text), None)
        if isinstance(found, torch.dtype) and found.is_floating_point:
            return found
    if hint is str and isinstance(value, (str, int, float)) and not isinstance(value, bool):
        return str(value)
    if hint in (int, float) and not isinstance(value, bool):
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = float("nan")
        if hint is float and (number == number or text in ("nan", ".nan")):
            return number
        if hint is int and number.is_integer():
            return value if isinstance(value, int) else int(number)
    raise ConfigError(f"{where}: {name}={value!r} must be {_KINDS[hint]}")


class _Loader(yaml.SafeLoader):
    """YAML that refuses a key given twice: the first of the two would be lost in silence."""


def _unique_keys(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    result: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if key in result:
            raise yaml.MarkedYAMLError(
                problem=f"key {key!r} stands there twice", problem_mark=key_node.start_mark
            )
        result[key] = loader.construct_object(value_node, deep=True)
    return result


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique_keys)


def _parse(text: str, where: str) -> dict[str, Any]:
    try:
        tree = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where} is not YAML: {' '.join(str(error).split())}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{where} holds {type(tree).__name__} where keys of settings must stand")
    return tree


def _parse_value(text: str, word: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{word!r} has no readable value: {' '.join(str(error).split())}") from (
            error
        )
