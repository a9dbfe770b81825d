"""Training checkpoints: same losses as not stopping, in any layout; whole or not there at all."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from resumable import MIXTRAL, MODELS, curve, run, settings, stop_after, write_inputs
from safetensors.torch import load_file

from moe_tp.checkpoint.state import load_state, save_state
from moe_tp.checkpoint.states import list_states, newest_state, open_state, state_folder
from moe_tp.cli.main import main
from moe_tp.errors import CheckpointError, ConfigError, MoeTpError
from moe_tp.models import ModelConfig, build
from moe_tp.models.decoder import Decoder
from moe_tp.parallel.layout import ParallelLayout, Runtime
from moe_tp.parallel.mesh import Mesh
from moe_tp.parallel.parameter import named_specs
from moe_tp.parallel.shards import full_logical, local_index, to_local
from moe_tp.testing import run_crash, run_ranks


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random models, and data that they can learn."""
    root = tmp_path_factory.mktemp("state")
    write_inputs(root)
    return root


@pytest.fixture(scope="module")
def whole_runs(root: Path) -> dict[str, Path]:
    """A run of 6 steps without a stop for each model, with a checkpoint in the middle."""
    for name in MODELS:
        run(settings(root, f"whole-{name}", name))
    return {name: root / f"whole-{name}" for name in MODELS}


def stopped_at_3(whole: Path, output: Path) -> Path:
    """Make `output` what a run that was killed in step 6 leaves behind."""
    output.mkdir()
    shutil.copytree(state_folder(whole, 3), state_folder(output, 3))
    lines = (whole / "metrics.jsonl").read_text().splitlines(keepends=True)
    (output / "metrics.jsonl").write_text("".join(lines[:5]))
    return output


@pytest.mark.parametrize("name", list(MODELS))
def test_the_same_layout_goes_on_bit_for_bit(
    root: Path, whole_runs: dict[str, Path], name: str
) -> None:
    """K4, C33, C48: losses, norms, tokens and the final weights, with dropout and a moving bias."""
    whole = whole_runs[name]
    assert [path.name for path in list_states(whole)] == ["checkpoint-6", "checkpoint-3"]
    output = stopped_at_3(whole, root / f"again-{name}")
    run(settings(root, output.name, name), resume=True)
    assert curve(output) == curve(whole)
    before, after = (load_file(f / "final" / "model.safetensors") for f in (whole, output))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


PAIRS = [
    ("mixtral", {"tp": 2}, {"dp": 2, "ep": 2, "zero": 3}),
    ("mixtral", {"dp": 2, "ep": 2, "zero": 3}, {"pp": 2}),
    ("mixtral", {"pp": 2}, {"dp": 2}),
    ("deepseek", {"dp": 2, "ep": 2, "zero": 2}, {"tp": 2, "ep": 1, "etp": 2}),
]


@pytest.mark.parametrize(("name", "first", "second"), PAIRS)
def test_another_layout_goes_on_with_the_same_losses(
    root: Path,
    whole_runs: dict[str, Path],
    name: str,
    first: dict[str, int],
    second: dict[str, int],
) -> None:
    """K4, C33, C48: fp64, 1e-9, against one process that never stopped."""
    output = "-".join([name, *first, "to", *second])
    tree = settings(root, output, name, save_every=2)
    run_ranks(stop_after, 2, {**tree, "parallel": first}, 4)
    stopped = newest_state(root / output)
    assert stopped is not None
    with open_state(stopped) as folder:
        assert "model.embed.weight" in folder.logical
        assert ("model.head.weight" in folder.logical) == (name != "mixtral")  # tied: once
    run_ranks(run, 2, {**tree, "parallel": second}, True)
    for found, expected in zip(curve(root / output), curve(whole_runs[name]), strict=True):
        assert np.allclose(found, expected, rtol=0, atol=1e-9), (found, expected)


def test_sigterm_saves_at_the_end_of_the_step(root: Path, whole_runs: dict[str, Path]) -> None:
    """K4: also without save_every; the handler of before is put back."""
    before = signal.getsignal(signal.SIGTERM)
    tree = settings(root, "sigterm", save_every=0)
    result = stop_after(tree, 2)
    assert (result["steps"], result["final"]) == (2, None)
    assert [path.name for path in list_states(root / "sigterm")] == ["checkpoint-2"]
    assert signal.getsignal(signal.SIGTERM) is before
    run(tree, resume=True)
    assert curve(root / "sigterm") == curve(whole_runs["mixtral"])


def test_a_second_signal_breaks_no_save(root: Path) -> None:
    """K4: Ctrl-C saves as SIGTERM does, more SIGTERMs change nothing, a second Ctrl-C ends it."""
    before = signal.getsignal(signal.SIGINT)
    term, ctrl_c = signal.SIGTERM, signal.SIGINT
    try:
        result = stop_after(settings(root, "signals", save_every=0), 2, (ctrl_c, term, term))
    except KeyboardInterrupt:
        pytest.fail("the first Ctrl-C ended the run")
    assert (result["steps"], result["final"]) == (2, None)
    assert [path.name for path in list_states(root / "signals")] == ["checkpoint-2"]
    with pytest.raises(KeyboardInterrupt):
        stop_after(settings(root, "at-once", save_every=0), 2, (ctrl_c, ctrl_c))
    assert list_states(root / "at-once") == []
    assert signal.getsignal(signal.SIGINT) is before


def tiny(layout: dict[str, int], experts: int, seed: int) -> tuple[Decoder, torch.optim.AdamW]:
    hub = {**MIXTRAL, "num_local_experts": experts, "tie_word_embeddings": False}
    split = torch.distributed.is_initialized()
    mesh = Mesh(ParallelLayout(**layout), Runtime()) if split else Mesh.single()
    model = build(ModelConfig.from_hub(hub), mesh, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer


def is_expert(fqn: str) -> bool:
    return ".experts." in fqn


def save_numbered(layout: dict[str, int], path: Path) -> None:
    """Save a model whose expert i holds i, and i + 0.5 in its moments."""
    model, optimizer = tiny(layout, 10, seed=1)
    for entry in named_specs(model):
        state = {"step": torch.tensor(7.0)}
        index = local_index(entry.param, entry.spec)[0].clamp(min=0).float()
        by_expert = index.view(-1, *[1] * (entry.param.dim() - 1))
        with torch.no_grad():
            if is_expert(entry.fqn):
                to_local(entry.param).copy_(by_expert.expand_as(to_local(entry.param)))
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = torch.zeros_like(entry.param)
                to_local(state[key]).add_(by_expert + 0.5)
        optimizer.state[entry.param] = state
    save_state(model, optimizer, path, {"step": 7})


def load_numbered(layout: dict[str, int], path: Path) -> int:
    """Check each expert's numbers; the elements of the model."""
    model, optimizer = tiny(layout, 10, seed=2)
    assert load_state(model, optimizer, path) == {"step": 7}
    total = 0
    for entry in named_specs(model):
        total += torch.Size(entry.spec.shape).numel()
        state = optimizer.state[entry.param]
        assert float(state["step"]) == 7.0
        assert state["step"].shape == ()
        rows = torch.arange(entry.spec.shape[0]).float().view(-1, *[1] * (entry.param.dim() - 1))
        values = full_logical(entry.param, entry.spec, model.mesh)
        if is_expert(entry.fqn):
            assert torch.equal(values, rows.expand_as(values)), entry.fqn
        for key in ("exp_avg", "exp_avg_sq"):
            moment = full_logical(state[key], entry.spec, model.mesh)
            assert torch.equal(moment, (rows + 0.5).expand_as(moment)), (entry.fqn, key)
    return total


def test_each_expert_and_its_moments_are_there_once(tmp_path: Path) -> None:
    """C47: 10 experts on ep=4, which leaves empty slots; as many elements in as out."""
    run_ranks(save_numbered, 4, {"dp": 4, "ep": 4}, tmp_path / "checkpoint-7")
    total = load_numbered({}, tmp_path / "checkpoint-7")
    with open_state(tmp_path / "checkpoint-7") as folder:
        sizes = {n: torch.Size(t.shape).numel() for n, t in folder.logical.items()}
    assert sum(n for name, n in sizes.items() if name.startswith("model.")) == total
    assert sum(n for name, n in sizes.items() if ".exp_avg" in name) == 2 * total
    run_ranks(load_numbered, 2, {"tp": 2, "ep": 2}, tmp_path / "checkpoint-7")
    run_ranks(load_numbered, 4, {"tp": 4, "ep": 2, "etp": 2}, tmp_path / "checkpoint-7")


def test_large_tensors_are_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer smaller than a tensor."""
    model, optimizer = tiny({}, 4, seed=1)
    save_state(model, optimizer, tmp_path / "checkpoint-1", {})
    monkeypatch.setattr("moe_tp.checkpoint.state.BUFFER", 256)
    again, optimizer = tiny({}, 4, seed=2)
    load_state(again, optimizer, tmp_path / "checkpoint-1")
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(to_local(one), to_local(other))


def test_the_correction_bias_keeps_its_bits(tmp_path: Path) -> None:
    """C48: fp32 beside bf16 weights, through save and load."""
    values = torch.tensor([10.16, 10.17, 10.18, 10.20])
    config = ModelConfig.from_hub(MODELS["deepseek"])
    model = build(config, Mesh.single(), seed=1, dtype=torch.bfloat16)
    (name,) = [e.fqn for e in named_specs(model) if e.name == "correction_bias"]
    with torch.no_grad():
        to_local(model.get_parameter(name)).copy_(values)
    steps = dict(model.named_buffers())[name.replace("correction_bias", "bias_steps")]
    steps.fill_(12)
    save_state(model, torch.optim.AdamW(model.parameters()), tmp_path / "checkpoint-1", {})
    again = build(config, Mesh.single(), seed=2, dtype=torch.bfloat16)
    load_state(again, None, tmp_path / "checkpoint-1")
    found = to_local(again.get_parameter(name))
    assert found.dtype == torch.float32
    assert torch.equal(found, values)
    assert int(dict(again.named_buffers())[name.replace("correction_bias", "bias_steps")]) == 12
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(to_local(one), to_local(other))


def test_a_torn_folder_is_refused_by_name(tmp_path: Path, whole_runs: dict[str, Path]) -> None:
    """K5: a cut or missing file; an older whole one is used, and without one all stops."""
    for step in (3, 6):
        shutil.copytree(state_folder(whole_runs["mixtral"], step), state_folder(tmp_path, step))
    weights = state_folder(tmp_path, 6) / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match=r"checkpoint-6.*model\.safetensors"):
        open_state(state_folder(tmp_path, 6))
    assert newest_state(tmp_path) == state_folder(tmp_path, 3)
    weights.write_bytes(data)
    assert newest_state(tmp_path) == state_folder(tmp_path, 6)
    for step in (3, 6):
        (state_folder(tmp_path, step) / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"none of its 2 checkpoints is complete"):
        newest_state(tmp_path)
    with pytest.raises(CheckpointError, match="expected a training checkpoint"):
        open_state(whole_runs["mixtral"] / "final")


def die_while_saving(path: Path, after: float) -> None:
    model, optimizer = tiny({}, 4, seed=1)
    save_state(model, optimizer, state_folder(path, 1), {"step": 1})

    def die(done: int, total: int) -> None:
        if done >= after * total:
            os.kill(os.getpid(), signal.SIGKILL)

    save_state(model, optimizer, state_folder(path, 2), {"step": 2}, progress=die)


@pytest.mark.parametrize("after", [0.0, 1.0])
def test_a_killed_save_leaves_the_older_checkpoint(tmp_path: Path, after: float) -> None:
    """K5: nothing looks like a checkpoint; the next save clears the remains away."""
    report = run_crash(die_while_saving, 1, tmp_path, after)
    assert report.exit_codes == [-9], report.stderr
    assert list_states(tmp_path) == [state_folder(tmp_path, 1)]
    assert newest_state(tmp_path) == state_folder(tmp_path, 1)
    model, optimizer = tiny({}, 4, seed=1)
    assert load_state(model, optimizer, state_folder(tmp_path, 1)) == {"step": 1}
    save_state(model, optimizer, state_folder(tmp_path, 2), {"step": 2})
    names = sorted(entry.name for entry in tmp_path.iterdir())
    assert names == ["checkpoint-1", "checkpoint-2"]


def test_what_would_go_on_wrongly_is_refused(root: Path, whole_runs: dict[str, Path]) -> None:
    """K4: other data, order, optimiser or model; a new run over an old one's checkpoints."""
    output = stopped_at_3(whole_runs["mixtral"], root / "refused")
    with pytest.raises(ConfigError, match=r"checkpoint-3 of an earlier run; add --resume"):
        run(settings(root, "refused"))
    tree = settings(root, "refused")
    with pytest.raises(MoeTpError, match=r"seed=5, and this run has 6"):
        run({**tree, "seed": 6}, resume=True)
    with pytest.raises(MoeTpError, match=r"train\.optimizer='adamw', and this run has 'sgd'"):
        run(settings(root, "refused", optimizer="sgd"), resume=True)
    with pytest.raises(MoeTpError, match="is of another model than"):
        run(settings(root, "refused", "deepseek"), resume=True)
    with pytest.raises(MoeTpError, match=r"resume with the runtime\.master_dtype"):
        run({**tree, "runtime": {}}, resume=True)
    text = (root / "train.jsonl").read_text()
    (root / "train.jsonl").write_text(text.replace(" 3,", " 4,", 1))
    with pytest.raises(MoeTpError, match="as many rows, but not the same"):
        run(tree, resume=True)
    (root / "train.jsonl").write_text(text)
    with (root / "train.jsonl").open("a") as file:
        file.write('\n{"input_ids": ' + str(list(range(24))) + "}")
    try:
        with pytest.raises(MoeTpError, match="the checkpoint's data has rows="):
            run(tree, resume=True)
    finally:
        lines = (root / "train.jsonl").read_text().splitlines()
        (root / "train.jsonl").write_text("\n".join(lines[:-1]))
    assert [path.name for path in list_states(output)] == ["checkpoint-3"]
    assert not (output / "config.yaml").exists()


def test_a_checkpoint_becomes_a_hub_folder(root: Path, whole_runs: dict[str, Path]) -> None:
    """K1: by way of a training checkpoint the bytes are those of final/, files beside included."""
    whole = whole_runs["deepseek"]
    out = root / "exported"
    assert main(["export", str(state_folder(whole, 6)), str(out)]) == 0
    names = sorted(entry.name for entry in out.iterdir())
    assert names == sorted(entry.name for entry in (whole / "final").iterdir())
    for name in names:
        assert (out / name).read_bytes() == (whole / "final" / name).read_bytes(), name


def test_the_command_goes_on(
    root: Path, whole_runs: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without a checkpoint --resume starts at 0, as a restarted job must; then it goes on."""
    path = root / "run.yaml"
    path.write_text(yaml.safe_dump(settings(root, "command", save_every=1, keep=1)))
    assert main(["finetune", str(path), "--resume"]) == 0
    assert [p.name for p in list_states(root / "command")] == ["checkpoint-6"]
    assert curve(root / "command") == curve(whole_runs["mixtral"])
    capfd.readouterr()
    assert (
        main(["finetune", str(path), f"model={root}/command/checkpoint-6", f"output={tmp_path}/o"])
        == 2
    )
    assert "is a training checkpoint and no model folder" in capfd.readouterr().err
    assert main(["finetune", str(path), "--resume", "train.steps=7"]) == 0
    assert [line[0] for line in curve(root / "command")] == [1, 2, 3, 4, 5, 6, 7]
