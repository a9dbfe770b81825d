"""Generation: equal to transformers, to one full forward, and to itself in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_cases import CASES, error, hub_config
from test_models_transformers import both
from torch import nn

from moe_tp.errors import ConfigError, DataError, RoutingError
from moe_tp.experts.few import compute_few
from moe_tp.experts.layer import GroupedExperts
from moe_tp.experts.router import Router
from moe_tp.infer import Sampling, generate
from moe_tp.infer.cache import LayerColumns
from moe_tp.infer.sampling import draw
from moe_tp.models.config import ModelConfig
from moe_tp.models.load import build, from_pretrained, save_pretrained
from moe_tp.parallel.collectives import record_traffic
from moe_tp.parallel.held import is_holding
from moe_tp.parallel.layout import ParallelLayout, Runtime
from moe_tp.parallel.mesh import Mesh
from moe_tp.parallel.parameter import named_specs
from moe_tp.parallel.shards import to_local
from moe_tp.testing import run_ranks
from moe_tp.train import LoRAConfig, apply_lora

PROMPTS = [[4, 5, 6, 7, 8], [9, 10], [11, 3, 9, 1, 2, 4, 5, 40], [20], [7, 7, 7]]


def padded(prompts: list[list[int]], pad: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    length = max(map(len, prompts))
    rows = [[pad] * (length - len(p)) + p for p in prompts]
    mask = [[0] * (length - len(p)) + [1] * len(p) for p in prompts]
    return torch.tensor(rows), torch.tensor(mask)


@pytest.mark.parametrize("case", CASES)
def test_equals_transformers_and_one_forward(case: str, tmp_path: Path) -> None:
    """C59, R6: each family's greedy tokens, left padded; a step's logits are the forward's."""
    theirs, _ = both(case, tmp_path)
    ids, mask = padded(PROMPTS)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    expected = theirs.generate(ids, attention_mask=mask, **options)[:, ids.shape[1] :]
    ours = from_pretrained(tmp_path, Mesh.single(), dtype=torch.float64)
    got = generate(ours, ids, attention_mask=mask, max_new_tokens=12, return_logits=True)
    assert torch.equal(got.padded(), expected)
    assert got.logits is not None
    for prompt, new, logits in zip(PROMPTS, got.tokens, got.logits, strict=True):
        with torch.no_grad():
            whole = ours(torch.tensor([prompt + new])).logits
        assert whole is not None
        # angles are fp32 in every dtype, so positions alone do not spoil the ninth digit
        assert error(logits, whole[0, len(prompt) - 1 : -1]) < 1e-9


@pytest.mark.parametrize("case", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_neighbours_and_padding_change_nothing(case: str) -> None:
    """C59: alone, with neighbours, with a long one, any pad id, one row ending early."""
    config = ModelConfig.from_hub(hub_config(case, vocab_size=31))
    model = build(config, Mesh.single(), seed=3)
    prompts = [[4, 5, 6, 7, 8], [9, 10]]
    alone = [generate(model, [p], max_new_tokens=6, return_logits=True) for p in prompts]
    first = [a.tokens[0] for a in alone]
    torch.manual_seed(5)
    long = torch.randint(0, 31, (40,)).tolist()
    for pad in (0, 5):
        ids, mask = padded([*prompts, long], pad)
        got = generate(model, ids, attention_mask=mask, max_new_tokens=6, return_logits=True)
        assert got.tokens[:2] == first
        assert got.logits is not None
        for a, logits in zip(alone, got.logits, strict=False):
            assert a.logits is not None
            assert error(logits, a.logits[0]) < 1e-5
    stop = next(t for t in first[0] if t not in first[1][:4])
    ended = generate(model, prompts, max_new_tokens=6, stop_ids=[stop])
    assert generate(model, prompts, max_new_tokens=6, stop_ids=stop) == ended
    assert ended.tokens[0] == first[0][: first[0].index(stop) + 1]
    assert ended.reasons[0] == "stop"
    assert ended.tokens[1][:4] == first[1][:4]
    right, hole = torch.tensor([[9, 10, 3, 3]]), torch.tensor([[9, 3, 10, 3]])
    for ids, mask in ((right, [[1, 1, 0, 0]]), (hole, [[1, 0, 1, 0]])):
        got = generate(model, ids, attention_mask=torch.tensor(mask), max_new_tokens=6)
        assert got.tokens[0] == first[1]


def in_layout(path: str, layout: dict[str, int], rows: int) -> list[list[list[int]]]:
    mesh = Mesh(ParallelLayout(**layout), Runtime())
    model = from_pretrained(path, mesh, dtype=torch.float64)
    results = []
    for options in (
        {},
        {"temperature": 0.9, "top_p": 0.8, "top_k": 20, "seed": 5},
        {"temperature": 1.3, "stop_ids": list(range(0, 60, 7)), "max_new_tokens": 14},
    ):
        given: dict[str, Any] = {"max_new_tokens": 8, **options}
        results.append(generate(model, PROMPTS[:rows], split_rows=True, **given).tokens)
    return results


FEW = [("mixtral", {"pp": 2}), ("mixtral", {"zero": 3}), ("gpt_oss", {"tp": 2, "ep": 2, "etp": 2}),
       ("deepseek_v3", {"tp": 2, "ep": 2})]  # fmt: skip
MANY = [("mixtral", {"tp": 2}), ("gpt_oss", {"ep": 2})]
MANY += [(case, layout) for case in ("qwen3_moe", "olmoe", "glm4_moe", "deepseek_v3", "gpt_oss")
         for layout in ({"tp": 2}, {"tp": 4}, {"tp": 2, "pp": 2, "etp": 2}, {"ep": 4}, {"dp": 4},
                        {"tp": 2, "zero": 1, "ep": 2}, {"etp": 4}, {"zero": 2})]  # fmt: skip


def draw_biases(model: nn.Module) -> None:
    """Give the biases values: a new model's are zero."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "bias" in name:
                to_local(param).normal_(std=0.3)


def check_layout(case: str, layout: dict[str, int], tmp_path: Path) -> None:
    model = build(ModelConfig.from_hub(hub_config(case)), Mesh.single(), seed=1)
    draw_biases(model)
    save_pretrained(model, tmp_path)
    ranks = 2 if max(layout.values()) * len(layout) <= 3 else 4
    if case == "mixtral":  # num_kv_heads 2
        ranks = 2
    (expected,) = run_ranks(in_layout, 1, str(tmp_path), {}, 5)
    for got in run_ranks(in_layout, ranks, str(tmp_path), layout, 5):
        assert got == expected


@pytest.mark.parametrize(("case", "layout"), FEW, ids=str)
def test_every_layout_says_the_same(case: str, layout: dict[str, int], tmp_path: Path) -> None:
    """C59: greedy, drawn and stopped, with rows that do not divide over dp."""
    check_layout(case, layout, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "layout"), MANY, ids=str)
def test_more_layouts_say_the_same(case: str, layout: dict[str, int], tmp_path: Path) -> None:
    check_layout(case, layout, tmp_path)


def own_rows(layout: dict[str, int]) -> tuple[list[list[int]], str, list[bool], str]:
    mesh = Mesh(ParallelLayout(**layout))
    model = build(ModelConfig.from_hub(hub_config("mixtral")), mesh, seed=1)
    model.train()
    next(model.blocks).eval()
    modes = [module.training for module in model.modules()]
    first = mesh.coordinate("dp") == 0
    mine = [] if mesh.size("dp") > 1 and first else PROMPTS[:3]
    tokens = generate(model, mine, max_new_tokens=5, temperature=1.0, stop_ids=60).tokens
    with record_traffic() as log:
        endless = generate(model, mine, max_new_tokens=5, temperature=1.0, stop_ids=()).tokens
    assert [len(row) for row in endless] == [5] * len(mine)
    # how many tokens there are for certain, and the end
    exchanged = [entry for entry in log.entries if entry[:2] == ("dp", "all_reduce")]
    assert len(exchanged) == (2 if mesh.size("dp") > 1 else 0)
    try:
        generate(model, [[1], [99]] if first else [[1]], max_new_tokens=2)
        said = ""
    except DataError as problem:
        said = str(problem)
    same = [a == m.training for a, m in zip(modes, model.modules(), strict=True)]
    bad = torch.tensor([[0.0, -1e9] if first else [1.0, 1.0]])
    with pytest.raises(DataError) as caught:
        generate(model, torch.tensor([[1, 2]]), attention_mask=bad, max_new_tokens=2)
    return tokens, said, same, str(caught.value)


def test_a_rank_without_rows_and_a_bad_prompt() -> None:
    """C19, F2: an idle dp rank takes part; a prompt that one rank cannot use stops all."""
    ((tokens, said, same, mask),) = run_ranks(own_rows, 1, {})
    assert all(same)
    assert "attention_mask holds -1000000000.0" in mask
    assert "token id 99 lies outside the vocabulary of 61" in said
    (none, _, _, mask), (got, there, same, word) = run_ranks(own_rows, 2, {"ep": 2})
    assert "attention_mask holds -1000000000.0" in mask
    assert "rank 0 was given prompts that cannot be used" in word
    assert (none, got) == ([], tokens)
    assert "rank 0 was given prompts that cannot be used" in there
    assert all(same)


@pytest.mark.parametrize("case", ["mixtral", "deepseek_v3"])
def test_with_adapters(case: str) -> None:
    """G4: an adapted model generates what its full forward says, latent attention too."""
    model = build(ModelConfig.from_hub(hub_config(case)), Mesh.single(), dtype=torch.float64)
    apply_lora(model, LoRAConfig(rank=2, alpha=4.0))
    torch.manual_seed(0)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith(("_b", ".b")):
                param.to_local().normal_(std=0.3)
    got = generate(model, [[4, 5, 6]], max_new_tokens=6, return_logits=True)
    with torch.no_grad():
        whole = model(torch.tensor([[4, 5, 6, *got.tokens[0]]])).logits
    assert whole is not None
    assert got.logits is not None
    assert error(got.logits[0], whole[0, 2:-1]) < 1e-9


@pytest.mark.parametrize("case", ["qwen2_moe", "deepseek_v3", "gpt_oss", "granitemoe"])
def test_few_tokens_are_computed_alike(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """D1, R3, R6: the short way of a step gives what router, dispatcher and kernel give."""
    config = ModelConfig.from_hub(hub_config(case))
    results, calls = [], []

    def counted(*args: Any) -> torch.Tensor:
        calls.append(args)
        return compute_few(*args)

    monkeypatch.setattr("moe_tp.experts.moe.compute_few", counted)
    for experts in ("auto", "loop"):
        mesh = Mesh.single(runtime=Runtime(experts=experts))
        model = build(config, mesh, seed=1, dtype=torch.float64)
        draw_biases(model)
        calls.clear()
        got = generate(model, PROMPTS, max_new_tokens=5, return_logits=True)
        assert bool(calls) == (experts == "auto")
        if calls:  # the first layer with experts, all prompts: what fills them up goes nowhere
            idle = [set(row) == {-1} for row in calls[0][1]]
            assert sum(idle) == sum(8 - len(prompt) for prompt in PROMPTS)
        results.append(got)
    assert results[0].tokens == results[1].tokens
    for few, loop in zip(results[0].logits or [], results[1].logits or [], strict=True):
        assert error(few, loop) < 1e-12


def test_a_row_without_a_rank_order_is_refused() -> None:
    """R7: a step whose logits hold a NaN names rank, layer and token."""
    model = build(ModelConfig.from_hub(hub_config("deepseek_v3")), Mesh.single(), seed=1)
    router = next(m for m in model.modules() if isinstance(m, Router))
    to_local(router.get_parameter("weight")).data[3] = float("nan")
    with pytest.raises(RoutingError, match="rank 0, layer 1, token 0: the router's logits hold"):
        generate(model, [[1, 2]], max_new_tokens=2)


def test_what_a_call_keeps_of_weights_are_views() -> None:
    """G8: no copy of a weight is kept from step to step, and none where weights are cast."""
    config = ModelConfig.from_hub(hub_config("qwen3_moe"))
    model = build(config, Mesh.single())
    experts = next(m for m in model.modules() if isinstance(m, GroupedExperts))
    inside: list[bool] = []

    def look(_: int, __: int) -> None:
        inside.append(is_holding())
        for entry in named_specs(model):
            kept, own = entry.module.local(entry.name), to_local(entry.param)
            assert kept.untyped_storage().data_ptr() == own.untyped_storage().data_ptr()
            assert (kept is entry.module.local(entry.name)) == inside[-1]

    generate(model, [[1, 2]], max_new_tokens=2, on_token=look)
    assert inside == [True, True]
    assert not is_holding()
    with torch.no_grad():
        assert experts.local("down") is not experts.local("down")
    cast = build(config, Mesh.single(runtime=Runtime(compute_dtype=torch.bfloat16)))
    inside.clear()
    generate(cast, [[1, 2]], max_new_tokens=2, on_token=lambda *_: inside.append(is_holding()))
    assert inside == [False, False]


def test_nothing_is_counted_or_kept() -> None:
    """L3, L4: no load, no bias, no gradient; noise and jitter stay off in a training model."""
    raw = hub_config("deepseek_v3")
    model = build(ModelConfig.from_hub(raw), Mesh.single(), seed=1).train()
    before = {name: to_local(value).clone() for name, value in model.state_dict().items()}
    counted = [m.step_counts_E.clone() for m in model.modules() if hasattr(m, "step_counts_E")]
    a = generate(model, PROMPTS, max_new_tokens=4).tokens
    assert a == generate(model.eval(), PROMPTS, max_new_tokens=4).tokens
    after = [m.step_counts_E for m in model.modules() if hasattr(m, "step_counts_E")]
    assert all(map(torch.equal, counted, after))
    assert all(torch.equal(to_local(v), before[n]) for n, v in model.state_dict().items())
    assert all(param.grad is None for param in model.parameters())


def test_positions_end() -> None:
    """A row ends where the model's positions do, and a longer prompt is refused."""
    model = build(ModelConfig.from_hub(hub_config("mixtral")), Mesh.single())
    got = generate(model, [[1] * 62, [2]], max_new_tokens=8)
    assert got.reasons == ["positions", "length"]
    assert [len(row) for row in got.tokens] == [3, 8]
    with pytest.raises(DataError, match="knows max_position_embeddings=64 positions"):
        generate(model, [[1] * 65])
    for odd in ([[1.5]], [1, 2]):
        with pytest.raises(DataError, match="list of lists of token ids"):
            generate(model, odd, max_new_tokens=1)
    with pytest.raises(DataError, match="prompt 1 has no token"):
        generate(model, [[1], []])
    for wrong in ({"temperature": -1.0}, {"top_p": 0.0}, {"top_k": -2}, {"max_new_tokens": 0}):
        with pytest.raises(ConfigError, match="must"):
            generate(model, [[1]], **wrong)  # type: ignore[arg-type]


def with_cp() -> str:
    model = build(ModelConfig.from_hub(hub_config("mixtral")), Mesh(ParallelLayout(cp=2)))
    with pytest.raises(ConfigError) as caught:
        generate(model, [[1, 2]])
    return str(caught.value)


def test_context_parallelism_is_refused() -> None:
    """F3."""
    assert all("does not run with cp=2" in said for said in run_ranks(with_cp, 2))


def test_draws_follow_the_distribution() -> None:
    """Frequencies are the probabilities; top-k and top-p leave what transformers leaves."""
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    torch.manual_seed(0)
    logits = torch.randn(1, 12)
    rows = torch.arange(20000)
    for top_k, top_p in ((0, 1.0), (4, 1.0), (0, 0.6), (6, 0.5)):
        warped = logits / 0.7
        if top_k:
            warped = TopKLogitsWarper(top_k)(None, warped)
        if top_p < 1.0:
            warped = TopPLogitsWarper(top_p)(None, warped)
        sampling = Sampling(temperature=0.7, top_k=top_k, top_p=top_p, seed=1)
        ids = draw(logits.expand(20000, -1), sampling, rows, 3)
        share = torch.bincount(ids, minlength=12) / 20000
        assert (share - warped.softmax(-1)[0]).abs().max() < 0.012
        assert not share[warped[0] == -torch.inf].any()


def test_settings_that_are_none_are_refused() -> None:
    """F3: before anything is computed."""
    model = build(ModelConfig.from_hub(hub_config("mixtral")), Mesh.single())
    settings: list[tuple[dict[str, Any], str]] = [
        ({"stop_ids": "end"}, "stop_ids='end' must be a token id"),
        ({"stop_ids": [1.5]}, "must be a token id"),
        ({"stop_ids": -1}, "from 0 to"),
        ({"stop_ids": [2, model.config.vocab_size]}, "from 0 to"),
        ({"top_k": 2.5}, "top_k=2.5 must be a whole number"),
        ({"max_new_tokens": 1.5}, "max_new_tokens=1.5 must be a whole number from 1 on"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 must be a whole number from 1 on"),
        ({"top_p": 0.0}, "top_p=0.0 must lie in"),
    ]
    for given, said in settings:
        with pytest.raises(ConfigError, match=said):
            generate(model, [[1, 2]], **given)
    few, k = np.array([2, 3])
    assert len(generate(model, [[1, 2]], max_new_tokens=few, top_k=k, stop_ids=[]).tokens[0]) == 2


def test_a_temperature_near_zero_takes_the_likeliest() -> None:
    """Also where a logit over the temperature is beyond the largest number."""
    logits = torch.tensor([[1.0, 3.0, -2.0, 2.9], [-5.0, -7.0, -1.0, -2.0]])
    for temperature in (1e-3, 1e-300, 5e-324):
        for top_k, top_p in ((0, 1.0), (2, 1.0), (0, 0.5)):
            sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
            assert draw(logits, sampling, torch.arange(2), 0).tolist() == [1, 2]
    bad = torch.tensor([[1.0, torch.inf], [torch.nan, 0.0], [0.0, -torch.inf]])
    assert draw(bad, Sampling(temperature=1.0), torch.arange(3), 0).tolist() == [-1, -1, 0]


def test_the_cache_grows_in_blocks_and_windows_stay_small() -> None:
    """No step allocates; a window keeps what can be seen, whatever the length."""
    for window in (0, 5):
        layer = LayerColumns(window, 3000)
        columns = torch.randn(2, 2000, 1, 4)
        layer.extend(columns[:, :7])
        seen = [id(layer._buffers[0])]
        for at in range(7, 2000):
            (got,) = layer.extend(columns[:, at : at + 1])
            first = max(0, at - 4) if window else 0
            assert torch.equal(got[:, 0], columns[:, first : at + 1, 0])
            if id(layer._buffers[0]) != seen[-1]:
                seen.append(id(layer._buffers[0]))
        assert len(seen) < 10
        assert layer.nbytes <= 2 * 4 * 4 * (600 if window else 3000)
