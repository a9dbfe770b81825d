"""SwiGLU of bf16 rows in one compiled pass, against fp64 and against torch's operators."""

from __future__ import annotations

import ctypes
import functools
import platform
from pathlib import Path

import pytest
import torch

from moe_tp.experts import compiled
from moe_tp.experts.activation import SwiGLU
from moe_tp.experts.blocks import Block
from moe_tp.experts.elementwise import activate, activate_backward
from moe_tp.parallel import native

ROUNDING = 2.0**-8  # the most by which one changes a number, of it
Results = dict[str, torch.Tensor]


@functools.cache
def plain_passes() -> ctypes.CDLL:
    """Return the passes for a processor that does not round to bf16 by itself."""
    return compiled._declared(native.build(compiled._SOURCE, "-mno-avx512bf16"))


@pytest.fixture(params=["this machine's rounding", "rounding by integers"])
def compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the passes be those of this machine, then those of another; skip if nothing compiles."""
    if compiled._passes() is None:  # pragma: no cover
        pytest.skip("no C compiler")
    if request.param == "rounding by integers":
        if platform.machine() != "x86_64":  # pragma: no cover
            pytest.skip("rounds by integers anyway")
        monkeypatch.setattr(compiled, "_passes", plain_passes)


def inputs(rows: int, size: int) -> Results:
    """Return rows with gates of all magnitudes."""
    torch.manual_seed(0)
    gate_up = torch.randn(rows, 2 * size) * torch.logspace(-3, 1.5, 2 * size)
    grad, weight = torch.randn(rows, size), torch.rand(rows)
    return {"gate_up": gate_up.bfloat16(), "grad": grad.bfloat16(), "weight": weight}


def passes(given: Results) -> Results:
    """Return what the two passes fill."""
    gate_up, weight, (rows, size) = given["gate_up"], given["weight"], given["grad"].shape
    out = {
        "act": torch.empty(rows, size, dtype=torch.bfloat16),
        "hidden": torch.empty(rows, size, dtype=torch.bfloat16),
        "d_gate_up": torch.empty_like(gate_up),
        "d_weight": torch.empty(rows),
    }
    block = Block(0, rows, counts=(rows,))
    activate(block, gate_up, out["act"], SwiGLU())
    activate_backward(
        block, given["grad"].clone(), gate_up, weight, out["hidden"], out["d_gate_up"], None,
        out["d_weight"], SwiGLU(),
    )  # fmt: skip
    return out


def in_fp64(given: Results) -> Results:
    """Return the same by autograd in fp64."""
    gate_up = given["gate_up"].double().requires_grad_()
    weight = given["weight"].double().requires_grad_()
    act = SwiGLU().apply(*gate_up.chunk(2, dim=1))
    hidden = act * weight[:, None]
    hidden.backward(given["grad"].double())
    assert gate_up.grad is not None
    assert weight.grad is not None
    return {"act": act, "hidden": hidden, "d_gate_up": gate_up.grad, "d_weight": weight.grad}


@pytest.mark.parametrize(("rows", "size"), [(37, 200), (1, 1), (0, 8), (64, 64)])
def test_each_result_is_rounded_once(rows: int, size: int, compiler: None) -> None:
    """Rows of 200 leave a rest of the lanes; every number is fp64's but for its own rounding."""
    given = inputs(rows, size)
    got, expected = passes(given), in_fp64(given)
    for name in ("act", "hidden", "d_gate_up"):
        error = (got[name].double() - expected[name]).abs()
        # near its zero, at a gate of -1.28, the slope of silu is a small difference
        assert bool((error <= ROUNDING * 1.01 * expected[name].abs() + 1e-6).all()), name
    torch.testing.assert_close(got["d_weight"].double(), expected["d_weight"], rtol=1e-5, atol=1e-5)


def test_the_results_do_not_depend_on_threads(compiler: None) -> None:
    """The same bits on one thread and on two."""
    given, before = inputs(37, 200), torch.get_num_threads()
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(passes(given))
    torch.set_num_threads(before)
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_torchs_operators_agree(monkeypatch: pytest.MonkeyPatch, compiler: None) -> None:
    """Where nothing compiles the same comes out, with more roundings."""
    given = inputs(37, 200)
    got = passes(given)
    monkeypatch.setattr(compiled, "_passes", lambda: None)
    other = passes(given)
    assert not torch.equal(got["hidden"], other["hidden"])  # the switch did switch
    for name, value in got.items():
        error = (value.double() - other[name].double()).norm() / other[name].double().norm()
        assert error < 2 * ROUNDING, name


def test_not_a_number_and_infinity_come_through(compiler: None) -> None:
    """A NaN stays a NaN in what it enters and in nothing else; large gates do not overflow."""
    given = inputs(2, 70)
    given["gate_up"][0, 3] = float("nan")
    given["gate_up"][1, :2] = torch.tensor([-300.0, 300.0])
    got = passes(given)
    for name in ("act", "hidden"):
        assert got[name].isnan().nonzero().tolist() == [[0, 3]]
    assert got["d_gate_up"].isnan().nonzero().tolist() == [[0, 3], [0, 73]]
    assert got["d_weight"].isnan().tolist() == [True, False]
    assert -1e-30 < got["act"][1, 0] <= 0
    # a weight whose low bits are all set, which adding half a unit would carry into the sign
    given["weight"][1] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    assert passes(given)["hidden"][1].isnan().all()
    given["gate_up"][1, 70] = float("inf")
    given["gate_up"][1, 0] = 1
    assert passes(given)["act"][1, 0] == float("inf")


def test_other_rows_take_the_other_way() -> None:
    """fp32 rows, strided rows and fp64 weights are not the compiled passes'."""
    rows = torch.zeros(4, 8, dtype=torch.bfloat16)
    assert not compiled.available((rows.float(),))
    assert not compiled.available((rows[:, ::2],))
    assert not compiled.available((rows,), (torch.zeros(4, dtype=torch.float64),))


def test_no_compiler_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither a missing compiler nor a source that does not compile stops anybody."""
    broken = tmp_path / "passes.c"
    broken.write_text("int f(void) { return }\n", encoding="utf-8")
    with pytest.raises(OSError, match=r"error|no C compiler"):
        native.build(broken)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(OSError, match="no C compiler"):
        native.build(compiled._SOURCE)
    compiled._passes.cache_clear()
    assert compiled._passes() is None
    compiled._passes.cache_clear()
