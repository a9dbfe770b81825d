"""`report.html`: one self-contained page about a run, its charts drawn as SVG."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from moe_tp.train.metrics import LOAD, METRICS, column, read_lines

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 560, 240, 64, 30, 14
_COLORS = ("#2563c9", "#c2410c", "#15803d")
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c1f24; background: #fff; margin: 2rem auto;
  max-width: 1220px; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1rem; margin: 0 0 .3rem; }
.grid { display: flex; flex-wrap: wrap; gap: 1.5rem; }
figure { margin: 0; width: 560px; max-width: 100%; } svg { width: 100%; height: auto; }
table { border-collapse: collapse; margin: 1rem 0; }
td, th { border-bottom: 1px solid #d9dde3; padding: .2rem .9rem .2rem 0; text-align: left; }
text { font: 11px system-ui, sans-serif; fill: #4b5563; }
pre { background: #f4f5f7; padding: 1rem; overflow-x: auto; }
"""
T = TypeVar("T")
_MOST_COLUMNS, _MOST_LAYERS = 60, 8
Series = tuple[str, Sequence[float], Sequence[float]]


def write_report(output: Path, *, title: str, settings: str) -> Path:
    """Return the page's path, having written it from the run's metrics.

    Args:
        output: the run's folder.
        title: heading.
        settings: the resolved YAML, shown at the end.
    """
    lines, loads = read_lines(output / METRICS), read_lines(output / LOAD)
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        _summary(lines),
        '<div class="grid">',
        *_charts(lines),
        *heat_maps(loads),
        "</div>",
        f"<h2>Settings</h2><pre>{html.escape(settings)}</pre>",
    ]
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>\n"
        "<body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )
    path = output / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def _summary(lines: Sequence[Mapping[str, Any]]) -> str:
    if not lines:
        return "<p>No step has ended yet.</p>"
    last = lines[-1]
    evals = [line for line in lines if line.get("eval_loss") is not None]
    skipped = sum(bool(line.get("skipped")) for line in lines)
    rows = [
        ("Steps", f"{last['step']}"),
        ("Training loss", f"{_number(lines[0]['loss'])} to {_number(last['loss'])}"),
        ("Tokens", f"{last.get('total_tokens', 0):,}"),
        ("Steps left out (not finite)", f"{skipped}"),
    ]
    if evals:
        first, final = evals[0]["eval_loss"], evals[-1]["eval_loss"]
        rows.insert(2, ("Held-out loss", f"{_number(first)} to {_number(final)}"))
        rows.insert(3, ("Held-out perplexity", _number(evals[-1]["eval_perplexity"])))
    cells = "".join(f"<tr><th>{a}</th><td>{html.escape(b)}</td></tr>" for a, b in rows)
    return f"<table>{cells}</table>"


def _charts(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    wanted: list[tuple[str, list[tuple[str, str]]]] = [
        ("Loss", [("training", "loss"), ("held out", "eval_loss")]),
        ("Learning rate", [("", "lr")]),
        ("Tokens per second", [("", "tokens_per_second")]),
        ("Gradient norm", [("", "grad_norm")]),
        ("Largest load of an expert (1: balanced)", [("", "max_load_ratio")]),
        ("Router entropy (1: it knows nothing)", [("", "router_entropy")]),
        ("Share of choices that found no place", [("", "dropped_share")]),
        ("Memory, GiB", [("", "memory_gib")]),
    ]
    result = []
    for title, names in wanted:
        series = [(label, *column(lines, name)) for label, name in names]
        series = [entry for entry in series if entry[1]]
        if series:
            result.append(_figure(title, line_chart(series)))
    return result


def line_chart(series: Sequence[Series]) -> str:
    """Return curves over steps as SVG.

    Args:
        series: label, steps and values of each.
    """
    xs = [x for _, steps, _ in series for x in steps]
    ys = [y for _, _, values in series for y in values if math.isfinite(y)]
    x_low, x_high = min(xs), max(xs)
    y_low, y_high = (min(ys), max(ys)) if ys else (0.0, 1.0)
    if y_high - y_low < 1e-12 * max(1.0, abs(y_high)):
        y_low, y_high = y_low - 0.5 * abs(y_low or 1.0), y_high + 0.5 * abs(y_high or 1.0)
    right, floor = _WIDTH - 10, _HEIGHT - _BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        across = (x - x_low) / max(1e-12, x_high - x_low)
        up = (y - y_low) / (y_high - y_low)
        return _LEFT + across * (right - _LEFT), floor - up * (floor - _TOP)

    parts = []
    for i in range(5):
        value = y_low + (y_high - y_low) * i / 4
        _, y = at(x_low, value)
        parts.append(
            f'<line x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e5e7eb"/>'
        )
        parts.append(
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_number(value)}</text>'
        )
    for x, anchor in ((x_low, "start"), (x_high, "end")):
        place = at(x, y_low)[0]
        parts.append(f'<text x="{place:.1f}" y="{_HEIGHT - 10}" text-anchor="{anchor}">{x}</text>')
    for i, (label, steps, values) in enumerate(series):
        color = _COLORS[i % len(_COLORS)]
        points = [at(x, y) for x, y in zip(steps, values, strict=True) if math.isfinite(y)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline fill="none" stroke="{color}" stroke-width="1.6" points="{path}"/>')
        if len(points) < 40:
            parts += [
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{color}"/>' for x, y in points
            ]
        if label:
            y = _TOP + 14 * i + 8
            parts.append(
                f'<text x="{right - 4}" y="{y}" text-anchor="end" '
                f'style="fill:{color}">{label}</text>'
            )
    return _svg(_WIDTH, _HEIGHT, parts)


def heat_maps(loads: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the figures of expert load: at the end, and over time.

    Args:
        loads: lines of load.jsonl; a long run is shown by 60 of them, a deep model's layers one by
            one for 8 of them, so that the page stays small.
    """
    if not loads:
        return []
    last, layers = loads[-1], loads[-1]["layers"]
    shown = _spread(loads, _MOST_COLUMNS)
    steps = (loads[0]["step"], last["step"])
    rows = [(f"layer {n}", share(counts)) for n, counts in zip(layers, last["counts"], strict=True)]
    result = [_figure(f"Expert load by layer, step {last['step']} (1: balanced)", heat_map(rows))]
    rows = [
        (f"layer {layer}", [max(share(line["counts"][i]), default=0.0) for line in shown])
        for i, layer in enumerate(layers)
    ]
    result.append(_figure("Largest load of an expert by layer, over time", heat_map(rows, steps)))
    for i, layer in _spread(list(enumerate(layers)), _MOST_LAYERS):
        over_time = [share(line["counts"][i]) for line in shown]
        experts = len(over_time[0])
        rows = [(f"expert {e}", [column[e] for column in over_time]) for e in range(experts)]
        result.append(_figure(f"Expert load over time, layer {layer}", heat_map(rows, steps)))
    return result


def _spread(items: Sequence[T], most: int) -> list[T]:
    """Return at most as many items, evenly spread, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def share(counts: Sequence[int]) -> list[float]:
    """Return loads over their mean: 1 everywhere at perfect balance."""
    total = sum(counts)
    return [count * len(counts) / total if total else 0.0 for count in counts]


def heat_map(
    rows: Sequence[tuple[str, Sequence[float]]], steps: tuple[int, int] | None = None
) -> str:
    """Return a heat map as SVG, 1 in the middle of its colours.

    Args:
        rows: name and values of each.
        steps: first and last step where columns are points in time; None: columns are experts.
    """
    columns = max(len(values) for _, values in rows)
    cell = max(4.0, min(18.0, 400.0 / len(rows)))
    wide = (_WIDTH - 10 - _LEFT) / max(1, columns)
    floor = _TOP + cell * len(rows)
    parts = []
    for r, (name, values) in enumerate(rows):
        y = _TOP + r * cell
        if cell >= 9 or r in (0, len(rows) - 1):
            parts.append(
                f'<text x="{_LEFT - 6}" y="{y + cell / 2 + 4:.1f}" text-anchor="end">{name}</text>'
            )
        for c, value in enumerate(values):
            parts.append(
                f'<rect x="{_LEFT + c * wide:.1f}" y="{y:.1f}" width="{wide + 0.3:.1f}" '
                f'height="{cell + 0.3:.1f}" fill="{load_color(value)}">'
                f"<title>{value:.2f}</title></rect>"
            )
    first, last = steps or (0, columns - 1)
    unit = "step" if steps else "expert"
    y = floor + 16
    parts.append(f'<text x="{_LEFT}" y="{y:.1f}">{unit} {first}</text>')
    parts.append(f'<text x="{_WIDTH - 10}" y="{y:.1f}" text-anchor="end">{unit} {last}</text>')
    return _svg(_WIDTH, floor + 24, parts)


def load_color(value: float) -> str:
    """Return the colour of a load over its mean: blue below 1, white at 1, red from there to 3."""
    if value <= 1.0:
        low = (37, 99, 201)
        mix = max(0.0, value)
    else:
        low = (194, 45, 12)
        mix = 1.0 - min(1.0, (value - 1.0) / 2.0)
    red, green, blue = (round(part + (255 - part) * mix) for part in low)
    return f"#{red:02x}{green:02x}{blue:02x}"


def _figure(title: str, svg: str) -> str:
    return f"<figure><h2>{html.escape(title)}</h2>{svg}</figure>"


def _svg(width: float, height: float, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img">{"".join(parts)}</svg>'


def _number(value: float | None) -> str:
    if value is None:
        return "not finite"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
