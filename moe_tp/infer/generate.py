"""Generation on the training mesh: the same tokens for every layout.

Letters: B rows · S columns · V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import torch

from moe_tp.errors import ConfigError, DataError, RoutingError
from moe_tp.infer.prompts import (
    Prompts,
    Rows,
    agree_rows,
    check_model,
    prompt_problem,
    read_prompts,
    share_of,
)
from moe_tp.infer.sampling import Sampling, choose, gather_logits, is_whole
from moe_tp.infer.steps import Stream, run_call
from moe_tp.infer.stops import Stops, is_id, stops_of
from moe_tp.models.decoder import Decoder
from moe_tp.parallel.collectives import raw_all_gather, raw_all_reduce
from moe_tp.parallel.exchange import sharing_memory
from moe_tp.parallel.functions import working_dtype
from moe_tp.parallel.held import holding
from moe_tp.parallel.parameter import named_specs
from moe_tp.parallel.zero import reshard

OnToken = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """New tokens of each row.

    Args:
        tokens: new token ids of each row, a stop token included, nothing after it.
        reasons: why each row ended: `stop`, `length` (as many as asked for) or `positions` (the
            model knows no more).
        pad: the token that fills rows.
        logits: for each row `[new tokens, V]`, what its tokens were chosen from; where asked for.
    """

    tokens: list[list[int]]
    reasons: list[str]
    pad: int
    logits: list[torch.Tensor] | None = None

    def padded(self) -> torch.Tensor:
        """Return int64 `[B, most new tokens]`, finished rows filled up with the padding token."""
        most = max((len(row) for row in self.tokens), default=0)
        rows = [row + [self.pad] * (most - len(row)) for row in self.tokens]
        return torch.tensor(rows, dtype=torch.int64).view(len(rows), most)


def generate(
    model: Decoder,
    input_ids: Prompts,
    *,
    attention_mask: torch.Tensor | None = None,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    stop_ids: Collection[int] | int | None = None,
    split_rows: bool = False,
    on_token: OnToken | None = None,
    return_logits: bool = False,
) -> Generated:
    """Return new tokens for each prompt; collective, the same in every layout.

    Evaluation: no dropout, no noise of the router, no gradient, nothing counted for losses or bias;
    each module's mode is restored. A row depends on its own tokens alone.

    Args:
        model: any layout with cp = 1.
        input_ids: `[B, S]`, or a list of prompts of any lengths. Ranks that share a batch (same dp)
            pass the same; dp ranks pass their own, of any number, also none.
        attention_mask: `[B, S]`, true where a token is real; padding may stand anywhere.
        max_new_tokens: of each row.
        temperature, top_k, top_p, seed: see `Sampling`; temperature 0 takes the likeliest token.
        stop_ids: tokens that end a row, or one such; None: those that the model's folder names;
            empty: none.
        split_rows: every rank passes the same prompts; dp ranks take a part each, and every rank
            gets all results.
        on_token: called with (row, token) for this rank's rows as tokens come; rows are numbered
            as in the result.
        return_logits: keep what tokens were chosen from; for checks.

    Raises:
        DataError: a prompt cannot be used; on every rank, before anything is computed.
        ConfigError: a setting or the layout does not serve.
        RankMismatchError: ranks were given different settings, or ones that share a batch different
            prompts.

    Collectives: an exchange of the settings through the store; an all-gather of three integers over
        the world; those of the model's calls, of `choose`, and over dp an all-reduce of a number
        for each token with which a row may end (without stop tokens the last, or the model's
        positions); on CPUs two all-gathers of objects over tp and over ep
        (`moe_tp.parallel.exchange`).
    """
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    if not is_whole(max_new_tokens, 1):
        raise ConfigError(f"max_new_tokens={max_new_tokens} must be a whole number from 1 on")
    max_new_tokens = int(max_new_tokens)
    if split_rows and return_logits:
        raise ConfigError("return_logits=True is for this rank's own rows; leave split_rows out")
    check_model(model)
    stops = stops_of(model)
    if stop_ids is not None:
        vocab_size = model.config.vocab_size
        given = stop_ids if isinstance(stop_ids, Collection) else [stop_ids]
        if not all(is_id(value, vocab_size) for value in given):
            raise ConfigError(
                f"stop_ids={stop_ids!r} must be a token id or a list of them, from 0 to "
                f"{vocab_size - 1}; texts have ids by the model's tokenizer"
            )
        stops = Stops(ids=frozenset(map(int, given)), pad=stops.pad)
    try:
        prompts, problem = read_prompts(input_ids, attention_mask), None
    except DataError as error:  # told to the ranks that wait for this one
        prompts, problem = [], str(error)
    said = [sampling, max_new_tokens, sorted(stops.ids), split_rows, prompts if split_rows else ()]
    model.mesh.agree("the settings of generate", repr(said))
    problem = problem or prompt_problem(model, prompts)
    share = share_of(len(prompts), model.mesh) if split_rows else slice(None)
    rows = agree_rows(model, prompts[share], problem)
    with _serving(model):
        run = _Run(model, rows, sampling, stops, max_new_tokens, return_logits)
        first = rows.first if split_rows else 0
        run.to_the_end(lambda row, token: on_token(first + row, token) if on_token else None)
    result = run.result()
    return _joined(model, rows, result) if split_rows else result


@contextlib.contextmanager
def _serving(model: Decoder) -> Iterator[None]:
    """Have the model in evaluation mode without gradients; give each module its mode back."""
    modes = [(module, module.training) for module in model.modules()]
    mesh = model.mesh
    groups = [mesh.group(axis) for axis in ("tp", "ep") if mesh.device.type == "cpu"]
    model.eval()
    try:
        with (
            torch.no_grad(),
            sharing_memory(groups, mesh.runtime.timeout),
            holding() if _stays(model) else contextlib.nullcontext(),
        ):
            yield
    finally:
        reshard(model)
        for module, training in modes:
            module.training = training


def _stays(model: Decoder) -> bool:
    """Return whether each weight is used where and as it lies: not gathered, not cast."""
    mesh = model.mesh
    asked = mesh.runtime.compute_dtype
    return mesh.layout.zero == 0 and all(
        spec.keep_fp32 or working_dtype(asked, param.dtype, mesh.device) == param.dtype
        for _, _, _, param, spec in named_specs(model)
    )


class _Run:
    """The rows of one call of `generate`, from the prompts to the last token."""

    def __init__(
        self,
        model: Decoder,
        rows: Rows,
        sampling: Sampling,
        stops: Stops,
        new_tokens: int,
        keep_logits: bool,
    ) -> None:
        self.model, self.rows, self.sampling, self.stops = model, rows, sampling, stops
        self.new_tokens = new_tokens
        self.tokens: list[list[int]] = [[] for _ in rows.prompts]
        self.reasons = [""] * len(rows.prompts)
        self.logits: list[list[torch.Tensor]] | None = None
        if keep_logits:
            self.logits = [[] for _ in rows.prompts]

    def to_the_end(self, on_token: OnToken) -> None:
        """Generate until every row of every rank has ended."""
        if self.rows.most == 0:
            return
        mesh = self.model.mesh
        stream = Stream(self.model, self.rows.prompts, self.rows.most, self.new_tokens)
        at = list(range(self.rows.most))  # which row of the result each row of the stream is
        call, certain = stream.first_call(), self._certain()
        for number in range(self.new_tokens):
            part_BV = run_call(self.model, call)
            row_B = torch.tensor(at, device=mesh.device) + self.rows.first
            ids_B = choose(
                part_BV,
                self.sampling,
                row_B=row_B,
                number=number,
                vocab_size=self.model.config.vocab_size,
                tp=mesh.group("tp"),
                pp=mesh.group("pp"),
            )
            self._keep_logits(part_BV, at)
            self._take(at, ids_B.tolist(), on_token)
            if number + 1 < certain:
                call = stream.next_call(ids_B.clamp_min(0))
                continue
            live = [row < len(self.reasons) and not self.reasons[row] for row in at]
            most = torch.tensor([sum(live)], device=mesh.device)
            most_live = int(raw_all_reduce(most, mesh.group("dp"), "max"))
            if most_live == 0 or number + 1 == self.new_tokens:
                return
            stream.finish_rows(torch.tensor(live, device=mesh.device))
            if 2 * most_live <= len(at):
                # the live ones first, then as many others as the fullest rank needs
                order = sorted(range(len(at)), key=lambda i: not live[i])[:most_live]
                keep = torch.tensor(sorted(order), device=mesh.device)
                stream.keep_rows(keep)
                ids_B, at = ids_B[keep], [at[i] for i in sorted(order)]
            call = stream.next_call(ids_B.clamp_min(0))

    def _certain(self) -> int:
        """Return how many tokens every row of every rank surely gets.

        Collectives: where there are no stop tokens, an all-reduce of a number over dp.
        """
        if self.stops.ids:
            return 1
        longest = max(map(len, self.rows.prompts), default=0)
        least = min(self.new_tokens, self.model.config.max_positions - longest)
        mesh = self.model.mesh
        return int(raw_all_reduce(torch.tensor(least, device=mesh.device), mesh.group("dp"), "min"))

    def _take(self, at: list[int], ids: list[int], on_token: OnToken) -> None:
        """Add a token to each live row and end those that are done."""
        for row, token in zip(at, ids, strict=True):
            if row >= len(self.reasons) or self.reasons[row]:
                continue
            if token < 0:
                raise RoutingError(
                    f"rank {self.model.mesh.rank}: the logits of row {self.rows.first + row} after "
                    f"{len(self.tokens[row])} new tokens are not finite; look at the model's "
                    f"weights, or choose a wider dtype"
                )
            self.tokens[row].append(token)
            on_token(row, token)
            have = len(self.rows.prompts[row]) + len(self.tokens[row])
            if token in self.stops.ids:
                self.reasons[row] = "stop"
            elif len(self.tokens[row]) == self.new_tokens:
                self.reasons[row] = "length"
            elif have > self.model.config.max_positions:
                self.reasons[row] = "positions"

    def _keep_logits(self, part_BV: torch.Tensor | None, at: list[int]) -> None:
        if self.logits is None or part_BV is None:
            return
        mesh = self.model.mesh
        logits_BV = gather_logits(part_BV, mesh.group("tp"), self.model.config.vocab_size)
        for row, logits_V in zip(at, logits_BV, strict=True):
            if row < len(self.reasons) and not self.reasons[row]:
                self.logits[row].append(logits_V.clone())

    def result(self) -> Generated:
        """Return what this rank's rows became."""
        logits = None
        if self.logits is not None:
            logits = [torch.stack(row) for row in self.logits if row]
        return Generated(
            tokens=self.tokens, reasons=self.reasons, pad=self.stops.pad, logits=logits
        )


_REASONS = ("stop", "length", "positions")


def _joined(model: Decoder, rows: Rows, mine: Generated) -> Generated:
    """Return the rows of all dp ranks, in order.

    Collectives: two all-gathers over dp.
    """
    group, device = model.mesh.group("dp"), model.mesh.device
    if group.size == 1:
        return mine
    longest = max((len(row) for row in mine.tokens), default=0)
    width = int(raw_all_gather(torch.tensor([longest], device=device), group).max()) + 2
    table = torch.full((rows.most, width), -1, dtype=torch.int64)
    for i, (tokens, reason) in enumerate(zip(mine.tokens, mine.reasons, strict=True)):
        table[i, 0], table[i, 1] = len(tokens), _REASONS.index(reason)
        table[i, 2 : 2 + len(tokens)] = torch.tensor(tokens)
    whole = [row for row in raw_all_gather(table.to(device), group).tolist() if row[0] >= 0]
    return Generated(
        tokens=[row[2 : 2 + row[0]] for row in whole],
        reasons=[_REASONS[row[1]] for row in whole],
        pad=mine.pad,
    )
