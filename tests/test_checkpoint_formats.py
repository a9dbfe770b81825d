"""Quantised formats: fp8 blocks and MXFP4."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoint_toy import write_folder

from moe_tp.checkpoint import HubFolder, Quantise, export_folder
from moe_tp.checkpoint.formats import decode_mxfp4, encode_fp8, encode_mxfp4
from moe_tp.errors import CheckpointError

FP8 = {"quant_method": "fp8", "weight_block_size": [4, 4]}
MX = {"quant_method": "mxfp4"}


def fp8_folder(path: Path, tensors: dict[str, torch.Tensor], shards: int = 1) -> Path:
    return write_folder(path, tensors, shards=shards, config={"quantization_config": FP8})


def ones() -> dict[str, torch.Tensor]:
    return {
        "w": torch.ones(6, 5).to(torch.float8_e4m3fn),
        "w_scale_inv": torch.tensor([[1.0, 10.0], [100.0, 1000.0]]),
    }


@pytest.mark.parametrize("shards", [1, 2])
def test_fp8_partial_blocks_and_slices(tmp_path: Path, shards: int) -> None:
    """C42: w = q * scale[r//4, c//4]; row halves across a block border; scale in another shard."""
    folder = HubFolder(fp8_folder(tmp_path, ones(), shards))
    whole = folder.read_slice("w")
    assert whole.dtype == torch.bfloat16
    assert torch.equal(whole[:4, :4], torch.ones(4, 4).bfloat16())
    assert (whole[:4, 4] == 10).all()
    assert (whole[4:, :4] == 100).all()
    assert (whole[4:, 4] == 1000).all()
    for rows in (slice(0, 3), slice(3, 6)):
        assert torch.equal(folder.read_slice("w", (rows,)), whole[rows])
        assert torch.equal(folder.read_slice("w", (rows, slice(2, 5))), whole[rows, 2:5])
    assert torch.equal(folder.read_slice("w", (slice(0, 6, 2),)), whole[::2])
    assert list(folder.logical) == ["w"]
    assert folder.default_dtype == torch.bfloat16


def test_fp8_reads_only_the_scales_it_needs(tmp_path: Path) -> None:
    """C42, K6: 3 rows of 5 columns touch 15 bytes of weights and two scales."""
    folder = HubFolder(fp8_folder(tmp_path, ones()))
    before = folder.counter.slices
    folder.read_slice("w", (slice(0, 3),))
    assert folder.counter.slices - before == 15 + 2 * 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w_scale_inv": None}, r"'w': expected its scales 'w_scale_inv', found none"),
        ({"w_scale_inv": torch.ones(2, 1)}, r"'w_scale_inv': expected scales of shape \[2, 2\]"),
        ({"w_scale_inv": torch.ones(2, 2).int()}, r"'w_scale_inv': expected .* found I32"),
        ({"w": torch.ones(6, 5).bfloat16()}, r"'w_scale_inv': expected an fp8 weight"),
    ],
)
def test_fp8_scale_errors_name_the_tensor(
    tmp_path: Path, change: dict[str, torch.Tensor | None], message: str
) -> None:
    """C42, K2: missing, misshapen and stray scales."""
    tensors = {n: t for n, t in {**ones(), **change}.items() if t is not None}
    with pytest.raises(CheckpointError, match=message):
        HubFolder(fp8_folder(tmp_path, tensors))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "'w': found F8_E4M3, expected quantization_config"),
        ({"quantization_config": {"quant_method": "fp8"}}, "weight_block_size=None"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quant_method='gptq'"),
        ({"quantization_config": ["fp8"]}, "quant_method="),
    ],
)
def test_the_config_says_the_format(
    tmp_path: Path, config: dict[str, object], message: str
) -> None:
    """C42: block sizes come from quantization_config, never from shapes."""
    with pytest.raises(CheckpointError, match=message):
        HubFolder(write_folder(tmp_path, ones(), config=config))


def mx_blocks() -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 4, 2, 16), dtype=torch.uint8, generator=made)
    scales = torch.randint(118, 132, (3, 4, 2), dtype=torch.uint8, generator=made)
    return blocks, scales


def test_mxfp4_values() -> None:
    """C43: low nibble first, E2M1 table, exponent bias 127."""
    blocks = torch.zeros(1, 1, 16, dtype=torch.uint8)
    blocks[0, 0, :3] = torch.tensor([0x21, 0x9F, 0x74])
    values = decode_mxfp4(blocks, torch.tensor([[128]], dtype=torch.uint8))
    assert values.shape == (1, 32)
    assert values[0, :6].tolist() == [1, 2, -12, -1, 4, 12]
    assert not values[0, 6:].any()


def test_mxfp4_agrees_with_transformers() -> None:
    """C43: bit for bit what transformers' own dequantiser gives, orientation included."""
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    blocks, scales = mx_blocks()
    theirs = mxfp4.convert_moe_packed_tensors(blocks.clone(), scales.clone())
    assert torch.equal(decode_mxfp4(blocks, scales).transpose(1, 2), theirs)


def test_mxfp4_slices(tmp_path: Path) -> None:
    """C43, K6: row r of the blocks is column r; a slice is the slice of the whole."""
    blocks, scales = mx_blocks()
    tensors = {"x_blocks": blocks, "x_scales": scales, "b": torch.ones(2).bfloat16()}
    folder = HubFolder(write_folder(tmp_path, tensors, config={"quantization_config": MX}))
    assert list(folder.logical) == ["b", "x"]
    assert folder.find("x").shape == (3, 64, 4)
    whole = folder.read_slice("x")
    assert torch.equal(whole[1, :, 2], decode_mxfp4(blocks, scales)[1, 2])
    for at in ((1,), (slice(1, 3), slice(5, 40)), (2, slice(32, 64), slice(1, 3))):
        assert torch.equal(folder.read_slice("x", at), whole[at])
    before = folder.counter.slices
    folder.read_slice("x", (0, slice(0, 32), slice(0, 1)))
    assert folder.counter.slices - before == 17


@pytest.mark.parametrize(
    ("drop", "message"),
    [
        ("x_scales", "'x_blocks': expected its scales 'x_scales', found none"),
        ("x_blocks", "'x_scales': found scales without"),
    ],
)
def test_mxfp4_errors(tmp_path: Path, drop: str, message: str) -> None:
    """C43, K2: scales or blocks alone."""
    blocks, scales = mx_blocks()
    tensors = {"x_blocks": blocks, "x_scales": scales}
    del tensors[drop]
    with pytest.raises(CheckpointError, match=message):
        HubFolder(write_folder(tmp_path, tensors, config={"quantization_config": MX}))


def test_mxfp4_again_gives_the_same_values() -> None:
    """C43: values that came from MXFP4 survive a second encoding exactly."""
    values = decode_mxfp4(*mx_blocks())
    assert torch.equal(decode_mxfp4(*encode_mxfp4(values)), values)


def test_encoders_are_close() -> None:
    """C42, C43: relative error of fresh values stays within half a step of the format."""
    made = torch.Generator().manual_seed(0)
    values = torch.randn(70, 96, generator=made)
    q, scale = encode_fp8(values, (32, 32))
    assert scale.shape == (3, 3)
    spread = scale.repeat_interleave(32, 0)[:70].repeat_interleave(32, 1)
    error = (q.float() * spread - values).abs()
    assert bool((error <= values.abs() / 16 + spread * 2**-10).all())
    back = decode_mxfp4(*encode_mxfp4(values)).float()
    # OCP MX clips up to a quarter of the largest value; elsewhere half a step.
    peak = values.abs().view(70, 3, 32).amax(-1).repeat_interleave(32, 1)
    assert bool(((back - values).abs() <= peak / 4).all())


@pytest.mark.parametrize("kind", ["fp8", "mxfp4"])
def test_dequantised_and_quantised_again(tmp_path: Path, kind: str) -> None:
    """K1, C42, C43: export drops the entry and the scales; on request they come back."""
    if kind == "fp8":
        source = fp8_folder(tmp_path / "in", {**ones(), "n": torch.ones(3).bfloat16()})
        wanted = Quantise(kind="fp8", names=("w",), block=(4, 4))
    else:
        blocks, scales = mx_blocks()
        tensors = {"x_blocks": blocks, "x_scales": scales}
        source = write_folder(tmp_path / "in", tensors, config={"quantization_config": MX})
        wanted = Quantise(kind="mxfp4", names=("x",))
    export_folder(source, tmp_path / "plain")
    plain, before = HubFolder(tmp_path / "plain"), HubFolder(source)
    assert "quantization_config" not in plain.config
    assert not plain.quantised
    assert plain.tensors.keys() == before.logical.keys()
    for name in before.logical:
        assert torch.equal(plain.read_slice(name), before.read_slice(name))
    config = json.loads((source / "config.json").read_text())
    export_folder(plain, tmp_path / "again", config_json=config, quantise=wanted)
    again = HubFolder(tmp_path / "again")
    assert again.config["quantization_config"] == config["quantization_config"]
    assert again.tensors.keys() == before.tensors.keys()
    for name in before.logical:
        assert torch.equal(again.read_slice(name), before.read_slice(name))


def test_quantising_what_cannot_be_is_refused(tmp_path: Path) -> None:
    """K2: a vector in fp8 is refused by name before anything is written."""
    source = write_folder(tmp_path / "in", {"v": torch.ones(3).bfloat16()})
    with pytest.raises(CheckpointError, match="'v': expected a matrix"):
        export_folder(source, tmp_path / "out", quantise=Quantise(kind="fp8", names=("v",)))
    assert not (tmp_path / "out").exists()
