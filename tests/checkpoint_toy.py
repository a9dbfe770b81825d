"""A toy model of library parameters, its name rules and hub tensors, for the checkpoint tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from moe_tp.checkpoint import HubFolder, load_into, save_hub
from moe_tp.checkpoint import rules as R
from moe_tp.parallel.layout import ParallelLayout, Runtime
from moe_tp.parallel.mesh import Mesh
from moe_tp.parallel.parameter import ParallelModule
from moe_tp.parallel.shards import to_local
from moe_tp.parallel.spec import ParamSpec

VOCAB, DIM, HIDDEN, HEADS = 11, 8, 12, 16


def slots_for(num_experts: int, ep: int) -> tuple[int, ...]:
    """Contiguous experts, uneven counts padded at the end of each rank."""
    base, more = divmod(num_experts, ep)
    per = base + (more > 0)
    slots, start = [], 0
    for rank in range(ep):
        count = base + (rank < more)
        slots += [*range(start, start + count), *[-1] * (per - count)]
        start += count
    return tuple(slots)


class Part(ParallelModule):
    def __init__(self, mesh: Mesh, specs: dict[str, ParamSpec], dtype: torch.dtype) -> None:
        super().__init__(mesh)
        for name, spec in specs.items():
            self.add_parameter(name, spec, dtype)


class Toy(nn.Module):
    """Embedding, one attention-like pair, a router with bias, fused experts, a head."""

    def __init__(self, mesh: Mesh, num_experts: int = 6, dtype: torch.dtype = torch.bfloat16):
        super().__init__()
        slots = slots_for(num_experts, mesh.size("ep"))
        vocab = ParamSpec(shape=(VOCAB, DIM), shards={"tp": 0}, pad=True, role="embedding")
        self.embed = Part(mesh, {"weight": vocab}, dtype)
        self.norm = Part(
            mesh, {"weight": ParamSpec(shape=(DIM,), partial=True, keep_fp32=True)}, dtype
        )
        self.q = Part(mesh, {"weight": ParamSpec(shape=(HEADS, DIM), shards={"tp": 0})}, dtype)
        self.o = Part(mesh, {"weight": ParamSpec(shape=(DIM, HEADS), shards={"tp": 1})}, dtype)
        router = ParamSpec(shape=(num_experts, DIM), partial=True, keep_fp32=True, role="router")
        self.router = Part(mesh, {"weight": router}, dtype)
        self.router.register_fp32_buffer("bias", torch.zeros(num_experts, device=mesh.device))
        shards = {"ep": 0, "etp": 2}
        self.experts = Part(
            mesh,
            {
                "gate_up": ParamSpec(
                    shape=(num_experts, 2, HIDDEN, DIM), shards=shards, domain="expert", slots=slots
                ),
                "down": ParamSpec(
                    shape=(num_experts, DIM, HIDDEN), shards=shards, domain="expert", slots=slots
                ),
            },
            dtype,
        )
        self.head = Part(mesh, {"weight": vocab}, dtype)


def toy_rules(num_experts: int = 6, layout: R.ExpertFormat = "per_expert") -> R.NameRules:
    names = {
        "per_expert": (["mlp.experts.{e}.w1", "mlp.experts.{e}.w3"], "mlp.experts.{e}.w2"),
        "flat": (["mlp.w1", "mlp.v1"], "mlp.w2"),
    }
    gate_up, down = names.get(layout, (["mlp.gate_up"], "mlp.down"))
    sizes: dict[str, Any] = {"num_experts": num_experts, "hidden": HIDDEN, "dim": DIM}
    return R.NameRules(
        pieces={
            "embed.weight": R.whole("embed.weight", (VOCAB, DIM)),
            "norm.weight": R.whole("norm.weight", (DIM,)),
            "q.weight": R.whole("q.weight", (HEADS, DIM)),
            "o.weight": R.whole("o.weight", (DIM, HEADS)),
            "router.weight": R.whole("mlp.gate.weight", (num_experts, DIM)),
            "router.bias": R.whole("mlp.gate.bias", (num_experts,)),
            "experts.gate_up": R.expert_gate_up(layout, gate_up, **sizes),
            "experts.down": R.expert_down(layout, down, **sizes),
            "head.weight": R.whole("lm_head.weight", (VOCAB, DIM)),
        },
        passthrough=(r"mtp\..*",),
        fp32_names=(r"mlp\.gate\.bias",),
        hints={r"mlp\.experts\..*": "num_local_experts", r"mlp\.gate\..*": "num_local_experts"},
    )


def hub_tensors(
    rules: R.NameRules, dtype: torch.dtype = torch.bfloat16, mtp: bool = True
) -> dict[str, torch.Tensor]:
    """Random hub tensors; every element distinct enough to tell places apart."""
    made = torch.Generator().manual_seed(1)
    tensors = {}
    for name, shape in rules.hub_shapes().items():
        kept = rules.matches("fp32_names", name)
        tensors[name] = torch.randn(shape, generator=made).to(torch.float32 if kept else dtype)
    if mtp:
        tensors["mtp.0.weight"] = torch.randn(5, 3, generator=made).to(dtype)
    return tensors


def write_folder(
    path: Path,
    tensors: dict[str, torch.Tensor],
    *,
    shards: int = 1,
    config: dict[str, Any] | None = None,
) -> Path:
    """Write tensors with the safetensors library: one file, or several and an index."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config or {"model_type": "toy"}))
    (path / "tokenizer.json").write_bytes(b'{"tok":\r\n 1}')
    (path / "generation_config.json").write_text('{"eos_token_id": 2}\n')
    names = sorted(tensors)
    if shards == 1:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return path
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[shard::shards]}
        save_file(part, path / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {
        "metadata": {"total_size": total},
        "weight_map": dict(sorted(weight_map.items())[::-1]),
    }
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def make_mesh(world: int, **layout: int) -> Mesh:
    """A mesh on the ranks of `run_ranks`, or of one process."""
    if world == 1:
        return Mesh.single()
    return Mesh(ParallelLayout(**layout), Runtime(), device="cpu")


def fill_nan(model: nn.Module) -> None:
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            local.fill_(float("nan"))


def constant(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            to_local(tensor).fill_(value)


def save(model: nn.Module, path: Path | str, **options: Any) -> None:
    save_hub(model, path, toy_rules(6), {"model_type": "toy"}, max_shard_size=600, **options)


def value_of(path: Path) -> float:
    """The one value of all weights of a folder that loads; anything mixed fails."""
    model = Toy(Mesh.single())
    load_into(model, HubFolder(path), toy_rules(6))
    values = {float(v) for p in model.parameters() for v in to_local(p).flatten()}
    assert len(values) == 1
    return values.pop()
