"""A run with adapters, packed rows and streamed data goes on in another layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from resumable import MODELS, curve, run, settings, stop_after, write_inputs

from moe_tp.checkpoint.states import newest_state
from moe_tp.testing import run_ranks

PAIRS = [
    ("mixtral", {"dp": 2}, {"dp": 2, "tp": 2, "ep": 2, "etp": 2}),
    ("mixtral", {"tp": 2, "ep": 1, "etp": 2}, {"pp": 2, "dp": 2}),
    ("mixtral", {"pp": 2}, {"dp": 2, "ep": 2, "zero": 3}),
    ("deepseek", {"dp": 2, "ep": 2, "zero": 3}, {"tp": 2, "ep": 1, "etp": 2}),
    ("deepseek", {"tp": 2}, {"dp": 2, "ep": 2, "zero": 2}),
    ("deepseek", {"dp": 4, "ep": 2, "etp": 2, "zero": 3}, {"pp": 2, "tp": 2}),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("lora")
    write_inputs(root)
    for name in MODELS:
        run(tree(root, f"whole-{name}", name))
    return root


def tree(root: Path, output: str, name: str) -> dict[str, Any]:
    settled = settings(root, output, name, micro_batch=1)
    more = {"packing": True, "streaming": True, "stream_window": 12}
    lora = {"rank": 2, "alpha": 4, "dropout": 0.1}
    return {**settled, "data": {**settled["data"], **more}, "lora": lora}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "first", "second"), PAIRS, ids=str)
def test_another_layout_goes_on(
    root: Path, name: str, first: dict[str, int], second: dict[str, int]
) -> None:
    """K4, G4: losses, norms and tokens of one process that never stopped (fp64, 1e-9), with
    dropout in the adapters and, in the DeepSeek model, a moving bias."""
    output = "-".join([name, *(f"{k}{v}" for k, v in first.items()), "to", *second])
    told = tree(root, output, name)
    run_ranks(stop_after, world(first), {**told, "parallel": first}, 4)
    assert newest_state(root / output) is not None
    assert len(curve(root / output)) == 4
    run_ranks(run, world(second), {**told, "parallel": second}, True)
    for found, expected in zip(curve(root / output), curve(root / f"whole-{name}"), strict=True):
        assert np.allclose(found, expected, rtol=0, atol=1e-9), (found, expected)


def world(layout: dict[str, int]) -> int:
    return layout.get("pp", 1) * layout.get("dp", 1) * layout.get("tp", 1)
