"""Accelerators and links: published peak rates, and the one set of efficiencies used with them.

Rates are the makers' data sheets (dense bf16, without sparsity). Every number can be overridden.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from moe_tp.errors import ConfigError

_MOST = 1e30  # of rates and sizes: with more, or with fractions, sums and ratios are not finite


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One kind of GPU in nodes of equal size.

    Args:
        name: of the GPU.
        flops: dense bf16 operations a second.
        memory: bytes.
        bandwidth: of the memory, bytes a second.
        link: bytes a second that a GPU sends inside its node, one direction.
        network: bytes a second that a GPU sends to other nodes, one direction.
        node_size: GPUs of a node.
        latency: seconds a collective needs whatever it carries.
        matmul_efficiency: part of `flops` that large matmuls reach.
        link_efficiency: part of both link rates that collectives reach.
        half_rows: rows of a matmul at which half of that efficiency is reached.
        overlap: part of the backward and forward compute behind which ZeRO's traffic can hide.
    """

    name: str
    flops: float
    memory: float
    bandwidth: float
    link: float
    network: float = 50e9
    node_size: int = 8
    latency: float = 20e-6
    matmul_efficiency: float = 0.75
    link_efficiency: float = 0.75
    half_rows: float = 128.0
    overlap: float = 0.8

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise ConfigError(f"name={self.name!r} of the hardware must be a text")
        for name in ("flops", "memory", "bandwidth", "link", "network", "node_size"):
            if not 1 <= getattr(self, name) <= _MOST:
                raise ConfigError(
                    f"{name}={getattr(self, name)} of the hardware must be at least 1 and at most "
                    f"{_MOST:.0e}"
                )
        if self.node_size != int(self.node_size):
            raise ConfigError(f"node_size={self.node_size} of the hardware must be a whole number")
        for name in ("matmul_efficiency", "link_efficiency"):
            if not 1e-6 <= getattr(self, name) <= 1:
                raise ConfigError(
                    f"{name}={getattr(self, name)} of the hardware must be at least 1e-6, at most 1"
                )
        for name, most in (("latency", 60.0), ("half_rows", 1e9), ("overlap", 1.0)):
            value = getattr(self, name)
            if not 0 <= value <= most:
                raise ConfigError(
                    f"{name}={value} of the hardware must be at least 0 and at most {most:g}"
                )


# NVLink and Infinity Fabric rates are one direction; the network is one 400 Gbit/s port a GPU
# (200 for A100).
TABLE: dict[str, Hardware] = {
    gpu.name: gpu
    for gpu in (
        Hardware(
            name="A100", flops=312e12, memory=80e9, bandwidth=2.04e12, link=300e9, network=25e9
        ),
        Hardware(name="H100", flops=989e12, memory=80e9, bandwidth=3.35e12, link=450e9),
        Hardware(name="H200", flops=989e12, memory=141e9, bandwidth=4.8e12, link=450e9),
        Hardware(name="B200", flops=2250e12, memory=180e9, bandwidth=7.7e12, link=900e9),
        Hardware(name="MI300X", flops=1307e12, memory=192e9, bandwidth=5.3e12, link=448e9),
    )
}
# one direction, bytes a second, for --link and --network
LINKS = {
    "nvlink3": 300e9,
    "nvlink4": 450e9,
    "nvlink5": 900e9,
    "pcie4": 32e9,
    "pcie5": 64e9,
    "ib200": 25e9,
    "ib400": 50e9,
    "ib800": 100e9,
    "eth400": 50e9,
    "eth100": 12.5e9,
    "eth25": 3.1e9,
}


def hardware(name: str, /, **changes: Any) -> Hardware:
    """Return a GPU of the table with some of its numbers replaced.

    Raises:
        ConfigError: it is not in the table, or has no such number.
    """
    if name not in TABLE:
        raise ConfigError(f"gpu={name!r} is not in the table; choose one of {', '.join(TABLE)}")
    known = {field.name for field in fields(Hardware)}
    for key in changes:
        if key not in known:
            raise ConfigError(f"hardware has no {key!r}; it has {', '.join(sorted(known))}")
    return replace(TABLE[name], **changes)


def read_hardware(path: str | Path) -> Hardware:
    """Return the hardware of a JSON file: the fields of `Hardware`, as `moe-tp bench` writes them.

    With `gpu`, a name of the table, the file need only hold what differs from that.

    Args:
        path: of the file.

    Raises:
        ConfigError: it is no such file, or a value is missing, unknown or no positive number.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no hardware profile in JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is no hardware profile: it holds no JSON object")
    base = found.pop("gpu", None)
    known = {field.name for field in fields(Hardware)}
    for key, value in found.items():
        if key not in known:
            raise ConfigError(f"{path}: hardware has no {key!r}; it has {', '.join(sorted(known))}")
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if key != "name" and not number:
            raise ConfigError(f"{path}: {key}={value!r} is no number")
    if base is not None:
        return hardware(str(base), **found)
    missing = [key for key in ("flops", "memory", "bandwidth", "link") if key not in found]
    if missing:
        raise ConfigError(
            f"{path} does not say {', '.join(missing)}; add them, or name a gpu of the table "
            f"({', '.join(TABLE)}) whose numbers they then are"
        )
    return Hardware(**{"name": Path(path).stem, **found})


def parse_bytes(text: str) -> float:
    """Return bytes of `80GB`, `80GiB` or `80e9`.

    Raises:
        ConfigError: it is none of these, not positive, or a small number without a unit.
    """
    value = _bytes_of(text)
    if value is None:
        raise ConfigError(f"{text!r} is no number of bytes; write 80GB, 80GiB or 80e9")
    return value


def parse_rate(text: str) -> float:
    """Return bytes a second of `450GB`, `450GB/s`, `450e9` or a name of `LINKS`.

    Raises:
        ConfigError: it is none of these, not positive, or a small number without a unit.
    """
    value = LINKS.get(text.lower()) or _bytes_of(text)
    if value is None:
        raise ConfigError(
            f"{text!r} is no link and no number of bytes a second; write 50GB, or one of "
            f"{', '.join(LINKS)}"
        )
    return value


def _bytes_of(text: str) -> float | None:
    match = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)\s*([kmgt]?)(i?)b?(?:/s)?", text.strip().lower())
    try:
        value = float(match.group(1)) if match else 0.0
    except ValueError:
        value = 0.0
    if match is None or not 0 < value < math.inf or (value < 1e6 and not match.group(2)):
        return None
    base = 1024 if match.group(3) else 1000
    return value * float(base ** " kmgt".index(match.group(2) or " "))
