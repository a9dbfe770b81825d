"""`picture.png`: loss and expert load of a run, drawn by matplotlib where that is installed."""

from __future__ import annotations

from pathlib import Path

from moe_tp.errors import ConfigError
from moe_tp.train.metrics import LOAD, METRICS, column, read_lines
from moe_tp.train.report import share


def draw_picture(output: Path, *, baseline: tuple[str, float] | None = None) -> Path:
    """Return the path of the picture, having drawn it from the run's metrics.

    Args:
        output: the run's folder.
        baseline: name and loss of something to compare with, drawn as a line.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("a picture needs matplotlib; pip install 'moe-tp[matplotlib]'") from error
    lines, loads = read_lines(output / METRICS), read_lines(output / LOAD)
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(*column(lines, "loss"), label="training", color="#2563c9", linewidth=1.2)
    steps, values = column(lines, "eval_loss")
    left.plot(steps, values, label="held out", color="#c2410c", marker="o", markersize=3)
    if baseline is not None:
        left.axhline(baseline[1], label=baseline[0], color="#4b5563", linestyle="--", linewidth=1)
    left.set(xlabel="step", ylabel="loss, nats a token", title="Loss")
    left.legend(frameon=False)
    if loads:
        # A row for each expert of each layer, a column for each recorded step.
        layers = loads[-1]["layers"]
        rows = [
            [share(line["counts"][i])[e] for line in loads]
            for i in range(len(layers))
            for e in range(len(loads[-1]["counts"][i]))
        ]
        extent = (loads[0]["step"], loads[-1]["step"] + 1, len(rows), 0)
        image = right.imshow(rows, aspect="auto", cmap="RdBu_r", vmin=0, vmax=2, extent=extent)
        experts = len(rows) // len(layers)
        right.set_yticks([i * experts + experts / 2 for i in range(len(layers))])
        right.set_yticklabels([f"layer {n}" for n in layers])
        for i in range(1, len(layers)):
            right.axhline(i * experts, color="black", linewidth=0.8)
        right.set(xlabel="step", title="Load of each expert over the mean of its layer")
        figure.colorbar(image, ax=right)
    path = output / "picture.png"
    figure.savefig(path, dpi=130)
    return path
