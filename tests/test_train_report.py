"""What people see of a run: lines of metrics, the live line, the page and the picture."""

from __future__ import annotations

import io
import json
import math
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from moe_tp.errors import DataError
from moe_tp.train.load import StepLoad, scalars
from moe_tp.train.metrics import LOAD, METRICS, LineWriter, column, read_lines
from moe_tp.train.picture import draw_picture
from moe_tp.train.progress import ProgressLine, clock
from moe_tp.train.report import heat_map, heat_maps, line_chart, load_color, share, write_report


def line(step: int, **more: Any) -> dict[str, Any]:
    base = {"step": step, "loss": 5.0 - step / 10, "grad_norm": 1.0, "lr": 1e-3, "tokens": 64}
    load = {"tokens_per_second": 1000.0, "load_balance_loss": 0.02, "max_load_ratio": 1.5}
    return {**base, **load, "total_tokens": 64 * step, **more}


def write_run(folder: Path, steps: int = 6) -> None:
    metrics, load = LineWriter(folder / METRICS), LineWriter(folder / LOAD)
    for step in range(1, steps + 1):
        more = {"eval_loss": 4.0, "eval_perplexity": math.exp(4)} if step % 3 == 0 else {}
        metrics.write(line(step, **more))
        load.write({"step": step, "layers": [0, 2], "counts": [[step, 2, 3], [4, 4, 4]]})
    metrics.close()
    load.close()


def step_load(counts: list[list[int]], choices: list[int] | None = None) -> StepLoad:
    layers = len(counts)
    return StepLoad(
        layers=tuple(range(1, layers + 1)),
        counts_LE=torch.tensor(counts),
        choices_L=torch.tensor(choices or [sum(row) for row in counts]),
        entropy_L=torch.full((layers,), 0.5),
        wire_P4=torch.tensor([[1, 2, 30, 40], [5, 6, 70, 80]]),
    )


def test_load_is_summed_up_by_its_worst_layer() -> None:
    found = step_load([[2, 2, 2, 2], [6, 2, 0, 0]], [8, 12]).summary()
    assert found["max_load_ratio"] == pytest.approx(3.0)
    assert found["layer_max_load_ratio"] == [1.0, 3.0]
    assert found["dead_experts"] == 2
    assert found["layer_dead_experts"] == [0, 2]
    assert found["layer_dropped_share"] == pytest.approx([0.0, 1 / 3], abs=1e-4)
    assert found["dropped_share"] == pytest.approx(4 / 20)
    assert found["wire_rows_received"] == [2, 6]
    assert found["wire_bytes_sent"] == [30, 70]
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / math.log(4)
    assert found["load_entropy"] == pytest.approx(entropy)
    assert step_load([]).summary()["max_load_ratio"] == 0.0


def test_numbers_are_flat_for_trackers() -> None:
    line = {"step": 3, "loss": 0.5, "skipped": True, "where": "x", "eval_loss": None}
    line |= {"layer_dead_experts": [0, 2], "wire_bytes_sent": [30, 70]}
    assert scalars(line, (1, 4)) == {
        "loss": 0.5,
        "dead_experts/layer_1": 0.0,
        "dead_experts/layer_4": 2.0,
        "wire_bytes_sent/rank_0": 30.0,
        "wire_bytes_sent/rank_1": 70.0,
    }


def test_lines_survive_a_run_that_is_cut_off(tmp_path: Path) -> None:
    """A last line that is half there is left out; going on from step 3 drops later lines."""
    path = tmp_path / METRICS
    write_run(tmp_path, 5)
    path.write_text(path.read_text() + '{"step": 6, "lo')
    assert [entry["step"] for entry in read_lines(path)] == [1, 2, 3, 4, 5]
    writer = LineWriter(path, keep_below=3)
    writer.write(line(3, loss=math.nan))
    writer.close()
    found = read_lines(path)
    assert [entry["step"] for entry in found] == [1, 2, 3]
    assert found[2]["loss"] is None
    assert column(found, "loss") == ([1, 2], [4.9, 4.8])
    assert read_lines(tmp_path / "none.jsonl") == []


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    (tmp_path / METRICS).write_text('{"step": 1}\nnot json\n{"step": 2}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl line 2 is not JSON"):
        read_lines(tmp_path / METRICS)


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    writer = LineWriter(None)
    writer.write(line(1))
    writer.close()
    assert list(tmp_path.iterdir()) == []


def test_plain_lines_where_there_is_no_terminal() -> None:
    out = io.StringIO()
    with ProgressLine(3, console=Console(file=out, width=200), every=1e9) as progress:
        progress.note("held-out loss 4.0")
        for step in (1, 2, 3):
            progress.step(line(step))
    text = out.getvalue()
    assert "held-out loss 4.0" in text
    assert "step 1/3  loss 4.9000  1,000 tokens/s  balance 1.50  0:00 left" in text
    assert "step 2/3" not in text
    assert "step 3/3" in text


def test_a_live_line_in_a_terminal() -> None:
    out = io.StringIO()
    console = Console(file=out, width=120, force_terminal=True)
    with ProgressLine(2, console=console) as progress:
        progress.step(line(1))
        progress.step(line(2, memory_gib=1.25))
    assert "step 2/2" in out.getvalue()
    assert "1.25 GiB" in out.getvalue()


def test_other_ranks_show_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressLine(2, shown=False) as progress:
        progress.note("x")
        progress.step(line(1))
    assert capsys.readouterr().out == ""


def test_time_left_is_short_text() -> None:
    assert [clock(s) for s in (0.4, 75, 3723)] == ["0:00", "1:15", "1:02:03"]


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.svgs = 0
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        self.svgs += tag == "svg"
        if tag not in ("meta", "line", "rect", "polyline", "circle", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self.open:
            assert self.open.pop() == tag


def test_the_page_stands_alone(tmp_path: Path) -> None:
    write_run(tmp_path)
    text = write_report(tmp_path, title="a <b> run", settings="lr: 1 & 2").read_text()
    page = _Page()
    page.feed(text)
    assert page.links == []
    assert page.open == []
    assert page.svgs == 9  # five charts, load by layer, the worst over time, that of two layers
    for word in ("a &lt;b&gt; run", "lr: 1 &amp; 2", "Held-out perplexity", "54.6", "layer 2"):
        assert word in text


def test_the_page_of_a_run_without_steps(tmp_path: Path) -> None:
    assert "No step has ended" in write_report(tmp_path, title="x", settings="").read_text()


def test_the_page_of_a_run_that_failed(tmp_path: Path) -> None:
    writer = LineWriter(tmp_path / METRICS)
    writer.write(line(1, loss=math.inf, grad_norm=math.nan, skipped=True))
    writer.close()
    text = write_report(tmp_path, title="x", settings="").read_text()
    assert "not finite to not finite" in text
    assert "<td>1</td>" in text


def points(svg: str) -> list[tuple[float, float]]:
    (curve,) = [e for e in ET.fromstring(svg).iter() if e.tag.endswith("polyline")]
    pairs = (pair.split(",") for pair in curve.attrib["points"].split())
    return [(float(x), float(y)) for x, y in pairs]


def test_curves_keep_their_shape() -> None:
    found = points(line_chart([("", [1, 2, 4], [0.0, 10.0, 5.0])]))
    (x1, y1), (x2, y2), (x3, y3) = found
    assert (x2 - x1) / (x3 - x1) == pytest.approx(1 / 3, abs=0.01)
    assert y2 < y3 < y1  # SVG counts downwards
    assert (y1 - y3) / (y1 - y2) == pytest.approx(0.5, abs=0.01)


def test_a_flat_curve_and_one_point_can_be_drawn() -> None:
    for values in ([2.0, 2.0], [0.0, 0.0], [3.0]):
        steps = list(range(len(values)))
        assert all(math.isfinite(y) for _, y in points(line_chart([("", steps, values)])))


def test_colours_of_load() -> None:
    assert load_color(1.0) == "#ffffff"
    assert load_color(0.0) == "#2563c9"
    assert load_color(3.0) == load_color(9.0) == "#c22d0c"
    assert share([3, 1, 0, 0]) == [3.0, 1.0, 0.0, 0.0]
    assert share([0, 0]) == [0.0, 0.0]
    assert heat_map([("a", [1.0, 2.0]), ("b", [0.0, 1.0])]).count("<rect") == 4


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    write_run(tmp_path)
    path = draw_picture(tmp_path, baseline=("unigram", 4.5))
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    (tmp_path / LOAD).unlink()
    assert draw_picture(tmp_path).stat().st_size > 1000


def test_metrics_are_json_that_any_reader_takes(tmp_path: Path) -> None:
    write_run(tmp_path, 2)
    for text in (tmp_path / METRICS).read_text().splitlines():
        json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_the_page_of_a_deep_model_stays_small(tmp_path: Path) -> None:
    """48 layers of 64 experts over 500 lines: 2 MB, and every layer is in the overview."""
    loads = [
        {"step": n, "layers": list(range(48)), "counts": [[1] * 64] * 48} for n in range(1, 501)
    ]
    figures = heat_maps(loads)
    assert sum(map(len, figures)) < 6_000_000
    assert len(figures) == 2 + 8
    assert "layer 47" in figures[1]


MEASURE = """<script>
const found = [...document.querySelectorAll('svg')].map(svg => {
  const frame = svg.getBoundingClientRect();
  const inner = [...svg.querySelectorAll('text, rect, polyline')];
  const parts = inner.map(e => e.getBoundingClientRect());
  const outside = parts.filter(r => r.left < frame.left - 1 || r.right > frame.right + 1
    || r.top < frame.top - 1 || r.bottom > frame.bottom + 1).length;
  return [Math.round(frame.width), Math.round(frame.height), parts.length, outside];
});
document.title = JSON.stringify(found);
</script></body>"""


@pytest.mark.slow
def test_a_browser_draws_the_page(tmp_path: Path) -> None:
    """In a headless browser where there is one: every figure has a size, and lies inside itself."""
    write_run(tmp_path)
    page = write_report(tmp_path, title="a run", settings="lr: 1")
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    browser = next((path for name in names if (path := shutil.which(name))), None)
    assert page.read_text().count("<svg") == 9
    if browser is None:
        pytest.skip("there is no chromium or chrome on this machine")
    measured = tmp_path / "measured.html"
    measured.write_text(page.read_text().replace("</body>", MEASURE))
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", measured.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    title = re.search("<title>(.*?)</title>", done.stdout)
    assert title is not None, done.stderr
    figures = json.loads(title[1])
    assert len(figures) == 9
    for width, height, parts, outside in figures:
        assert width > 300
        assert height > 30
        assert parts > 3
        assert outside == 0
