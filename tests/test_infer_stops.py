"""Stop and padding tokens, as a model folder names them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from model_cases import hub_config

from moe_tp.infer import Generated, generate
from moe_tp.infer.stops import Stops, stops_of
from moe_tp.models.config import ModelConfig
from moe_tp.models.load import build, from_pretrained, save_pretrained
from moe_tp.parallel.mesh import Mesh


def test_stop_tokens_of_the_folder(tmp_path: Path) -> None:
    """`generation_config.json` first, then `config.json`; a number or a list."""
    save_pretrained(build(ModelConfig.from_hub(hub_config("mixtral")), Mesh.single()), tmp_path)

    def run(stops: Any, config_stops: Any = None) -> Generated:
        raw = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**raw, "eos_token_id": config_stops}))
        path = tmp_path / "generation_config.json"
        path.unlink(missing_ok=True)
        if stops is not None:
            path.write_text(json.dumps({"eos_token_id": stops, "pad_token_id": 60}))
        return generate(from_pretrained(tmp_path, Mesh.single()), [[1, 2]], max_new_tokens=6)

    free = run(None).tokens[0]
    stop = free[2]
    short = free[: free.index(stop) + 1]
    for stops, config_stops in ((stop, None), ([59, stop], 58), (None, stop), (None, [stop, 59])):
        got = run(stops, config_stops)
        assert (got.tokens[0], got.reasons) == (short, ["stop"])
    assert run([stop]).pad == 60
    assert Generated(tokens=[[1], [2, 3]], reasons=["", ""], pad=9).padded().tolist() == [
        [1, 9],
        [2, 3],
    ]


def test_stop_tokens_that_are_no_ids(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """F3: a warning with the reason, once; what else the files name still holds."""
    model = build(ModelConfig.from_hub(hub_config("mixtral")), Mesh.single())
    model.source, last = tmp_path, model.config.vocab_size - 1

    def said(**content: Any) -> tuple[Stops, str]:
        caplog.clear()
        (tmp_path / "generation_config.json").write_text(json.dumps(content))
        return stops_of(model), caplog.text

    for bad in ("</s>", -1, last + 1, True, 2.0, {"id": 2}):
        stops, text = said(eos_token_id=[bad, 3], pad_token_id=last)
        assert (stops.ids, stops.pad) == ({3}, last)
        assert f"{bad!r} is no token id of the vocabulary (0 to {last})" in text
        assert not said(eos_token_id=[bad, 3], pad_token_id=last)[1]
    assert "'a' is no token id" in said(eos_token_id="a")[1]
    stops, text = said(eos_token_id=[4, 3], pad_token_id=[2])
    assert (stops.ids, stops.pad) == ({3, 4}, 3)
    assert "generation_config.json: pad_token_id=[2] is passed over" in text
