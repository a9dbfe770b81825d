"""The model beyond parity: ties, first values, dropout, refusals, traffic, saved bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_cases import error, hub_config
from test_models_layouts import (
    Layout,
    batch_of,
    compare,
    folder_of,
    layout_id,
    measure,
    one_process,
    own_samples,
    world_of,
)
from test_models_layouts import root as root  # a session fixture

from moe_tp.checkpoint.gather import gather_named
from moe_tp.errors import CheckpointError, ConfigError, DataError
from moe_tp.models.config import ModelConfig
from moe_tp.models.decoder import Decoder
from moe_tp.models.load import build, from_pretrained, save_pretrained
from moe_tp.models.tokens import next_token_targets
from moe_tp.parallel.collectives import TrafficLog, record_traffic
from moe_tp.parallel.gradients import clip_grad_norm, parameter_groups, settle_gradients
from moe_tp.parallel.layout import ParallelLayout, Runtime
from moe_tp.parallel.mesh import Mesh
from moe_tp.parallel.parameter import named_specs
from moe_tp.parallel.shards import to_local
from moe_tp.testing import run_ranks


def mesh_for(layout: Layout, **runtime: Any) -> Mesh:
    if not layout:
        return Mesh.single(Runtime(loss_chunk=8, **runtime))
    return Mesh(ParallelLayout(**layout), Runtime(loss_chunk=8, **runtime))


def measure_with(folder: str, layout: Layout, runtime: dict[str, Any]) -> dict[str, Any]:
    mesh = mesh_for(layout, **runtime)
    model = from_pretrained(folder, mesh)
    return measure(model, batch_of(own_samples(mesh.size("dp"), mesh.coordinate("dp"))))


SHARDED: list[tuple[Layout, dict[str, Any]]] = [
    ({"dp": 2, "zero": 1}, {}),
    ({"dp": 2, "zero": 2, "ep": 2}, {}),
    ({"dp": 2, "tp": 2, "ep": 2, "zero": 3}, {"recompute": "full"}),
    ({"tp": 2, "etp": 2}, {"recompute": "full"}),
    ({"dp": 2, "ep": 2}, {"recompute": "selective"}),
]


@pytest.mark.parametrize(("layout", "runtime"), SHARDED, ids=layout_id)
@pytest.mark.parametrize("case", ["mixtral", "mixtral-window-tied"])
def test_zero_and_recompute(case: str, layout: Layout, runtime: dict[str, Any], root: str) -> None:
    """G1, G3, L3, N3, C26, C33: ZeRO and recompute change no value and count nothing twice."""
    folder = folder_of(case, root)
    results = run_ranks(measure_with, world_of(layout), folder, layout, runtime)
    compare(results, one_process(folder), layout.get("dp", 1))


# --- ties ---------------------------------------------------------------------------------------


def train_tied(layout: Layout, steps: int) -> dict[str, Any]:
    config = ModelConfig.from_hub(
        hub_config("mixtral", tie_word_embeddings=True, vocab_size=13, num_hidden_layers=1)
    )
    mesh = mesh_for(layout)
    model = build(config, mesh, seed=1)
    assert model.head is not None
    assert model.embed is not None
    assert model.head.weight is model.embed.weight
    assert sum(p is model.embed.weight for p in model.parameters()) == 1
    ids = torch.arange(10).view(2, 5)
    groups = parameter_groups(model, weight_decay=0.0)
    assert sum(p is model.embed.weight for g in groups for p in g["params"]) == 1
    optimiser = torch.optim.SGD(groups, lr=0.1)
    losses, norms = [], []
    for _ in range(steps):
        out = model(ids, labels=ids)
        assert out.loss is not None
        out.loss.backward()
        settle_gradients(model)
        norms.append(clip_grad_norm(model, 1e9))
        losses.append(float(out.loss.detach()))
        optimiser.step()
        optimiser.zero_grad()
    assert model.head.weight is model.embed.weight
    model.to(torch.bfloat16)
    assert model.head.weight is model.embed.weight
    assert to_local(model.head.weight).data_ptr() == to_local(model.embed.weight).data_ptr()
    assert model.embed.weight.dtype == torch.bfloat16
    return {"losses": losses, "norms": norms}


@pytest.mark.parametrize("layout", [{"tp": 2}, {"dp": 2}], ids=layout_id)
def test_tied_head(layout: Layout) -> None:
    """C33, G3: one parameter, both gradients, one share of the norm, one optimiser entry."""
    expected = train_tied({}, 3)
    for got in run_ranks(train_tied, world_of(layout), layout, 3):
        assert got["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert got["norms"] == pytest.approx(expected["norms"], rel=1e-5)


def tie_folder(path: Path, flag: bool, head: str) -> Path:
    """Write a folder whose head is absent, equal to the embedding, or different."""
    import json

    from safetensors.torch import load_file, save_file

    config = ModelConfig.from_hub(hub_config("mixtral"))
    save_pretrained(build(config, Mesh.single()), path)
    tensors = load_file(path / "model.safetensors")
    if head == "absent":
        del tensors["lm_head.weight"]
    elif head == "equal":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**raw, "tie_word_embeddings": flag}))
    return path


def tied_names(path: str, layout: Layout) -> tuple[bool, list[str]]:
    model = from_pretrained(path, mesh_for(layout))
    assert model.head is not None
    assert model.embed is not None
    named = gather_named(model)
    return model.head.weight is model.embed.weight, [n for n in named if "lm_head" in n]


@pytest.mark.parametrize("layout", [{}, {"tp": 2}], ids=["one", "tp2"])
@pytest.mark.parametrize(
    ("flag", "head", "tied"),
    [
        (True, "absent", True),
        (True, "equal", True),
        (True, "different", False),
        (False, "absent", None),
        (False, "equal", False),
        (False, "different", False),
    ],
)
def test_tie_flag_and_file(
    flag: bool,
    head: str,
    tied: bool | None,
    layout: Layout,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """C41: a head in the file that differs is kept, and never dropped in silence."""
    path = str(tie_folder(tmp_path / "m", flag, head))

    def load() -> tuple[bool, list[str]]:
        if not layout:
            return tied_names(path, layout)
        return run_ranks(tied_names, world_of(layout), path, layout)[0]

    if tied is None:
        with pytest.raises(CheckpointError, match=r"lm_head.*tie_word_embeddings"):
            load()
        return
    with caplog.at_level("WARNING", logger="moe_tp"):
        assert load() == (tied, [] if tied else ["lm_head.weight"])
    if flag and not tied and not layout:
        assert "lm_head" in caplog.text


# --- first values and dropout -------------------------------------------------------------------


def first_values(case: str, layout: Layout) -> dict[str, torch.Tensor]:
    return gather_named(build(ModelConfig.from_hub(hub_config(case)), mesh_for(layout), seed=9))


@pytest.mark.parametrize("case", ["mixtral", "deepseek_v3", "gpt_oss"])
def test_first_values_do_not_depend_on_the_layout(case: str) -> None:
    """N1, C36: bitwise the same weights; experts, layers and matrices differ."""
    expected = first_values(case, {})
    for layout in ({"tp": 2, "ep": 2}, {"tp": 4, "ep": 2, "etp": 2}, {"dp": 2, "zero": 3}):
        for got in run_ranks(first_values, world_of(layout), case, layout):
            assert all(torch.equal(got[name], value) for name, value in expected.items())
    if case == "mixtral":
        seen = [v for name, v in expected.items() if ".w1." in name or ".w3." in name]
        assert len({tuple(v.flatten()[:8].tolist()) for v in seen}) == len(seen) == 24
        other = build(ModelConfig.from_hub(hub_config(case)), Mesh.single(), seed=10)
        assert not torch.equal(to_local(other.layers["0"].attention.q.weight), seen[0])


def dropped(layout: Layout, runtime: dict[str, Any], step: int) -> dict[str, Any]:
    config = hub_config("mixtral", residual_dropout=0.1, attention_dropout=0.1)
    mesh = mesh_for(layout, **runtime)
    model = build(ModelConfig.from_hub(config), mesh, seed=4)
    mine = own_samples(mesh.size("dp"), mesh.coordinate("dp"))
    offset = mine[0] if mine else 0
    return measure(model, batch_of(mine), step=step, sample_offset=offset)


@pytest.mark.parametrize(
    ("layout", "runtime"),
    [
        ({"tp": 2, "ep": 2}, {}),
        ({"dp": 2, "tp": 2, "etp": 2}, {"recompute": "full"}),
        ({"dp": 4, "ep": 4}, {}),
    ],
    ids=layout_id,
)
def test_dropout_masks_do_not_depend_on_the_layout(layout: Layout, runtime: dict[str, Any]) -> None:
    """N2, N3: residual and attention dropout at 0.1 give the one-process loss and gradients."""
    expected = dropped({}, {}, 3)
    compare(run_ranks(dropped, world_of(layout), layout, runtime, 3), expected, layout.get("dp", 1))


def test_dropout_differs_by_step_and_is_off_in_evaluation() -> None:
    """N2."""
    config = ModelConfig.from_hub(hub_config("mixtral", residual_dropout=0.3))
    model = build(config, Mesh.single())
    ids = torch.randint(0, 61, (2, 6))
    with torch.no_grad():
        one, same, other = (model(ids, step=step).logits for step in (1, 1, 2))
        moved = model(ids, step=1, sample_offset=1).logits
        model.eval()
        still, again = (model(ids, step=step).logits for step in (1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert not torch.equal(one[0], moved[0])
    assert torch.equal(still, again)


# --- odd sizes and refusals ---------------------------------------------------------------------


def few_tokens(layout: Layout, batch: int, length: int) -> dict[str, Any]:
    # fp64: the gradient of a single key is 0 but for rounding, which differs by processor in fp32
    config, mesh = ModelConfig.from_hub(hub_config("mixtral")), mesh_for(layout)
    model = build(config, mesh, dtype=torch.float64, seed=2)
    ids = torch.arange(batch * length).view(batch, length)
    return measure(model, {"input_ids": ids, "labels": ids})


@pytest.mark.parametrize(("batch", "length"), [(1, 1), (1, 3), (0, 5), (2, 0)])
def test_fewer_tokens_than_ranks(batch: int, length: int) -> None:
    """D4, L1: token counts below tp, and none at all; without a target the loss is 0."""
    expected = few_tokens({}, batch, length)
    if batch * length < 2:
        assert expected["loss"] == 0.0
    for got in run_ranks(few_tokens, 4, {"tp": 4, "ep": 2}, batch, length):
        assert got["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert got["logits"].shape == expected["logits"].shape == (batch, length, 61)
        for name, grad in expected["grads"].items():
            assert error(got["grads"][name], grad, expected["norm"]) < 1e-5, name


def refused(layout: Layout, changes: dict[str, Any]) -> str:
    try:
        build(ModelConfig.from_hub(hub_config("mixtral", **changes)), mesh_for(layout))
    except ConfigError as caught:
        return str(caught)
    return ""


@pytest.mark.parametrize(
    ("layout", "changes", "words"),
    [
        ({"tp": 4}, {"num_attention_heads": 6, "head_dim": 8}, ("=6", "tp=4", "[1, 2, 3, 6]")),
        ({"dp": 2, "etp": 2}, {"intermediate_size": 25}, ("etp=2", "25")),
        ({"tp": 4, "ep": 4}, {"num_local_experts": 2, "num_experts_per_tok": 2}, ("ep=4",)),
    ],
    ids=["heads", "hidden", "experts"],
)
def test_sizes_that_do_not_split(
    layout: Layout, changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    """D9, F3: refused with the fix named, on every rank."""
    for text in run_ranks(refused, world_of(layout), layout, changes):
        for word in words:
            assert word in text


def bad_batch(layout: Layout) -> str:
    mesh = mesh_for(layout)
    model = build(ModelConfig.from_hub(hub_config("mixtral")), mesh)
    ids = torch.full((1, 4), 61 if mesh.coordinate("dp") == 1 else 5)
    with pytest.raises(DataError) as caught:
        model(ids, labels=torch.zeros_like(ids))
    return str(caught.value)


def test_token_beyond_the_vocabulary() -> None:
    """F1: one sentence on the rank that has it, and no other rank hangs."""
    first, second = run_ranks(bad_batch, 2, {"dp": 2})
    assert "token id 61" in second
    assert "vocabulary of 61" in second
    assert "rank 1 was given a batch that cannot be used" in first


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"input_ids": torch.zeros(4, dtype=torch.int64)}, ("[4]", "[batch, sequence]")),
        ({"input_ids": torch.tensor([[1, -2]])}, ("-2", "vocabulary")),
        ({"labels": torch.tensor([[1]])}, ("labels", "[1, 1]", "[1, 2]")),
        ({"labels": torch.tensor([[1, -7]])}, ("label -7", "-100")),
        ({"position_ids": torch.tensor([[1]])}, ("position_ids",)),
        ({"position_ids": torch.tensor([[0.0, 1.0]])}, ("position_ids", "whole numbers")),
        ({"labels": torch.tensor([[1.0, 2.0]])}, ("labels", "float32", "whole numbers")),
        ({"attention_mask": torch.tensor([[-1e9, 0.0]])}, ("holds -1000000000.0", "added to")),
        ({"attention_mask": torch.tensor([[1, 2]])}, ("attention_mask holds 2", "position_ids")),
    ],
)
def test_unusable_batches(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    """F3, C54: among them masks that mean something else, which would be obeyed the wrong way."""
    model = build(ModelConfig.from_hub(hub_config("mixtral")), Mesh.single())
    batch = {"input_ids": torch.tensor([[1, 2]]), **changes}
    with pytest.raises(DataError) as caught:
        model(**batch)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_ids_of_few_bits(dtype: torch.dtype) -> None:
    """L1: -100 does not fit into a byte, and is no target all the same."""
    model = build(ModelConfig.from_hub(hub_config("mixtral")), Mesh.single())
    ids = torch.tensor([[1, 2, 3, 4]])
    mask = torch.tensor([[1, 1, 1, 0]])
    (expected, got) = (model(x, x, m) for x, m in ((ids, mask), (ids.to(dtype), mask.to(dtype))))
    assert torch.equal(expected.loss, got.loss)


def test_targets() -> None:
    """C54, R6: shifted; none across documents, next to padding, or where the label says so."""
    labels = torch.tensor([[10, 11, 12, 13, 14, 15]])
    assert next_token_targets(labels).tolist() == [[11, 12, 13, 14, 15, -100]]
    at = torch.tensor([[0, 1, 2, 0, 1, 2]])
    assert next_token_targets(labels, None, at).tolist() == [[11, 12, -100, 14, 15, -100]]
    mask = torch.tensor([[0, 0, 1, 1, 1, 0]])
    assert next_token_targets(labels, mask).tolist() == [[-100, -100, 13, 14, -100, -100]]


# --- what lies and travels where ----------------------------------------------------------------


def parameters_and_traffic(layout: Layout) -> tuple[dict[str, int], TrafficLog, dict[str, int]]:
    mesh = mesh_for(layout)
    model = build(ModelConfig.from_hub(hub_config("mixtral", num_local_experts=8)), mesh)
    sizes = {entry.fqn: to_local(entry.param).numel() for entry in named_specs(model)}
    ids = torch.randint(0, 61, (2, 8))
    with record_traffic() as log:
        out = model(ids, labels=ids)
        assert out.loss is not None
        (out.loss + out.aux.loss).backward()
    return sizes, log, {axis: mesh.size(axis) for axis in ("tp", "ep", "etp")}


@pytest.mark.parametrize(
    "layout", [{"tp": 2}, {"tp": 4, "ep": 2, "etp": 2}, {"dp": 2, "tp": 2, "ep": 4}], ids=layout_id
)
def test_parameters_and_traffic_equal_their_formulas(layout: Layout) -> None:
    """D11: elements a rank holds, and bytes of attention, vocabulary and loss over tp."""
    whole, _, _ = parameters_and_traffic({})
    for sizes, log, axes in run_ranks(parameters_and_traffic, world_of(layout), layout):
        tp, experts = axes["tp"], axes["ep"] * axes["etp"]
        for fqn, size in sizes.items():
            if "experts" in fqn:
                assert size == whole[fqn] // experts
            elif fqn in ("embed.weight", "head.weight"):
                assert size == -(-61 // tp) * 32
            elif ".k." in fqn or ".v." in fqn:
                assert size == whole[fqn] // (tp if tp <= 2 else 1)
            elif "attention.q" in fqn or "attention.o" in fqn:
                assert size == whole[fqn] // tp
            else:
                assert size == whole[fqn]
        # Each rank owns 16 / tp tokens of 32 features of 4 bytes, and sends them to tp - 1 others.
        shard = 16 // tp * 32 * 4 * (tp - 1)
        layers = 2
        gathers = layers + 1  # q, k, v of each layer; the head
        assert log.total(axis="tp", op="all_gather", phase="forward") == gathers * shard
        # o of each layer; the embedding; and the head's gradient, which forward computes
        assert log.total(axis="tp", op="reduce_scatter", phase="forward") == (layers + 2) * shard
        # x again and o's gradient of each layer; the embedding's gradient
        assert log.total(axis="tp", op="all_gather", phase="backward") == (2 * layers + 1) * shard
        assert log.total(axis="tp", op="reduce_scatter", phase="backward") == layers * shard


def saved_bytes(layout: Layout) -> dict[str, int]:
    """Return bytes that autograd keeps of norms and of the residual with its dropout."""
    mesh = mesh_for(layout)
    config = hub_config("mixtral", residual_dropout=0.1, num_attention_heads=4, hidden_size=64)
    model = build(ModelConfig.from_hub(config), mesh)
    block = model.layers["0"]
    ids = torch.randint(0, 61, (2, 8))
    call = model.open(ids)
    x_TD = model.embed_tokens(call).detach().requires_grad_()
    weights = {to_local(p).data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        if t.data_ptr() not in weights:
            kept[t.untyped_storage().data_ptr()] = t.numel() * t.element_size()
        return t

    alive = []
    result = {}
    for name, work in {
        "norm": lambda: block.attention_norm(x_TD),
        "residual": lambda: block._join(x_TD, x_TD * 1.0, "mlp", call),
    }.items():
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            alive.append(work())
        result[name] = sum(kept.values())
    return result


def test_saved_bytes_of_norm_and_residual_fall_with_tp() -> None:
    """D11: norms, dropout and residuals keep 1/tp of the bytes."""
    whole = saved_bytes({})
    assert min(whole.values()) > 0
    for tp in (2, 4):
        for got in run_ranks(saved_bytes, tp, {"tp": tp}):
            assert got == {name: size // tp for name, size in whole.items()}


def steps_of(folder: str, layout: Layout, steps: int) -> dict[str, torch.Tensor]:
    mesh = mesh_for(layout)
    model: Decoder = from_pretrained(folder, mesh, dtype=torch.float64)
    optimiser = torch.optim.AdamW(parameter_groups(model, weight_decay=0.1), lr=1e-2)
    batch = batch_of(own_samples(mesh.size("dp"), mesh.coordinate("dp")))
    for step in range(steps):
        out = model(**batch, step=step)
        assert out.loss is not None
        (out.loss + out.aux.loss).backward()
        settle_gradients(model)
        clip_grad_norm(model, 1.0)
        optimiser.step()
        optimiser.zero_grad()
    return gather_named(model)


@pytest.mark.parametrize(
    "layout",
    [{"tp": 2, "ep": 2}, {"dp": 2, "tp": 2, "ep": 2, "etp": 2}, {"dp": 4, "zero": 3, "ep": 2}],
    ids=layout_id,
)
def test_weights_after_five_steps(layout: Layout, root: str) -> None:
    """G5, R2: AdamW in fp64 gives the same weights in every layout, and on every rank."""
    folder = folder_of("mixtral", root)
    expected = steps_of(folder, {}, 5)
    for got in run_ranks(steps_of, world_of(layout), folder, layout, 5):
        for name, value in expected.items():
            assert error(got[name], value) < 1e-9, name
