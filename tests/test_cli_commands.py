"""Commands in one process: what they write, print and refuse, and their exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_tp.cli.main import COMMANDS, main
from moe_tp.cli.options import runtime_of

SMALL = ["--set", "vocab_size=128", "--set", "num_local_experts=6", "--set", "hidden_size=32"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Mixtral with 6 experts."""
    out = tmp_path_factory.mktemp("hub") / "model"
    assert main(["init", "mixtral", str(out), *SMALL]) == 0
    return out


def test_init_writes_what_inspect_reads(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(folder), "--json", "-"]) == 0
    result = json.loads(capsys.readouterr().out)
    tensors = load_file(folder / "model.safetensors")
    assert result["model_type"] == "mixtral"
    assert (result["layers"], result["experts"], result["top_k"]) == (2, 6, 2)
    assert result["params_total"] == sum(t.numel() for t in tensors.values())
    assert result["params_active"] < result["params_total"]
    assert result["tensors"] == len(tensors)
    assert result["problems"] == []
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}


def test_init_depends_on_the_seed_only(folder: Path, tmp_path: Path) -> None:
    """N1."""
    for name, seed in (("same", "0"), ("other", "1")):
        assert main(["init", "mixtral", str(tmp_path / name), *SMALL, "--seed", seed]) == 0
    first = (folder / "model.safetensors").read_bytes()
    assert (tmp_path / "same" / "model.safetensors").read_bytes() == first
    assert (tmp_path / "other" / "model.safetensors").read_bytes() != first


def test_init_replaces_no_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """F3: weights that somebody downloaded are not lost to a slip."""
    before = (folder / "model.safetensors").read_bytes()
    assert main(["init", "mixtral", str(folder), *SMALL, "--seed", "1"]) == 2
    assert "holds a model" in capsys.readouterr().err
    assert (folder / "model.safetensors").read_bytes() == before


def test_files_for_results_are_looked_at_before_the_work(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """F3: a run of hours does not end with a result that cannot be written."""
    (tmp_path / "file").write_text("")
    nowhere, out = str(tmp_path / "file" / "x.json"), tmp_path / "out"
    cases = [
        (["export", str(folder), str(out), "--json", nowhere], "is no folder"),
        (["export", str(folder), str(out), "--json", str(tmp_path)], "is a folder"),
        (["inspect", "--json", nowhere, str(folder)], "is no folder"),
        (["bench", "layer", "--profile", nowhere], "--profile"),
    ]
    for words, said in cases:
        assert main(words) == 2
        said_out, said_err = capsys.readouterr()
        assert said in said_err
        assert not said_out
    assert not out.exists()
    made = tmp_path / "made" / "by" / "x.json"
    assert main(["inspect", str(folder), "--json", str(made)]) == 0
    assert json.loads(made.read_text())["model_type"] == "mixtral"
    monkeypatch.setattr("os.access", lambda path, mode: path != made.parent)  # root may write all
    assert main(["export", str(folder), str(out), "--json", str(made.parent / "y.json")]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert not out.exists()


def test_init_splits_into_shards_and_takes_a_dtype(tmp_path: Path) -> None:
    words = ["init", "mixtral", str(tmp_path / "m"), *SMALL, "--dtype", "float32"]
    assert main([*words, "--max-shard-size", "200KB"]) == 0
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert json.loads((tmp_path / "m" / "config.json").read_text())["vocab_size"] == 128


def test_export_to_fused_experts_and_back_is_bit_exact(folder: Path, tmp_path: Path) -> None:
    """K1."""
    fused, back = str(tmp_path / "fused"), str(tmp_path / "back")
    assert main(["export", str(folder), fused, "--experts", "fused"]) == 0
    assert main(["export", fused, back, "--experts", "per-expert"]) == 0
    names = load_file(tmp_path / "fused" / "model.safetensors")
    assert names["model.layers.0.mlp.experts.gate_up_proj"].shape[0] == 6
    before, after = (load_file(Path(p) / "model.safetensors") for p in (folder, back))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_export_casts(folder: Path, tmp_path: Path) -> None:
    assert main(["export", str(folder), str(tmp_path / "f"), "--dtype", "fp32"]) == 0
    before, after = (load_file(p / "model.safetensors") for p in (folder, tmp_path / "f"))
    assert all(torch.equal(before[name].float(), after[name]) for name in before)


def test_inspect_tells_a_missing_tensor_and_a_family_it_does_not_know(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """K2: problems are told, and the exit code is that of a failed check."""
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("model.layers.1.block_sparse_moe.experts.3.w2.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["inspect", str(tmp_path)]) == 1
    assert "experts.3.w2.weight" in capsys.readouterr().out
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "dbrx"}))
    assert main(["inspect", str(tmp_path), "--json", str(tmp_path / "out.json")]) == 1
    problems = json.loads((tmp_path / "out.json").read_text())["problems"]
    assert any("model_type='dbrx'" in problem for problem in problems)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["init", "mixtrall", "OUT"], "model_type='mixtrall' is not supported"),
        (["init", "mixtral", "OUT", "--preset", "huge"], "preset='huge' is unknown"),
        (["init", "mixtral", "OUT", "--set", "hidden=3"], "no such field"),
        (["init", "mixtral", "OUT", "--set", "hidden_size"], "has no value"),
        (["init", "mixtral", "OUT", "--dtype", "int3"], "dtype 'int3' is unknown"),
        (["init", "mixtral", "OUT", "--tp", "2"], "--nproc N starts N ranks"),
        (["init", "mixtral", "OUT", "--runtime", "speed=9"], "--runtime: speed is unknown"),
        (["init", "mixtral", "OUT", "--runtime", "recompute=x"], "recompute='x' is not one of"),
        (["inspect", "no/such/folder"], "no/such/folder"),
        (["export", "no/such/folder", "OUT"], "no/such/folder"),
        (["verify", "no/such/folder"], "no/such/folder"),
        (["finetune", "no/such/config.yaml"], "no/such/config.yaml"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_2(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """F3: and nothing was written."""
    words = [str(tmp_path / "out") if word == "OUT" else word for word in words]
    assert main(words) == 2
    err = capsys.readouterr().err
    assert said in err
    assert len(err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "no/such/folder", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["dance"], ["init"], ["inspect", "a", "b"]])
def test_bad_arguments_exit_2(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert f"moe-tp {name}" in capsys.readouterr().out


def test_runtime_settings_take_their_fields_types() -> None:
    class Options:
        runtime = (
            *("compute_dtype=bf16", "deterministic=true", "virtual_stages=2", "timeout=9.5"),
            *("recompute=full", "wire_dtype=none"),
        )

    runtime = runtime_of(Options())  # type: ignore[arg-type]
    assert runtime.compute_dtype is torch.bfloat16
    assert runtime.deterministic is True
    assert (runtime.virtual_stages, runtime.timeout, runtime.recompute) == (2, 9.5, "full")
