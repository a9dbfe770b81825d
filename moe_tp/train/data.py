"""The rows of a run and the order in which ranks take them.

The order is arithmetic: sample number -> (epoch, place in the epoch) -> row, and sample number ->
(micro-batch, dp rank, row of the micro-batch). It is the same for every layout, and a position in
it is one number.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from moe_tp.checkpoint.agree import together
from moe_tp.errors import CheckpointError, ConfigError, DataError
from moe_tp.log import warn_once
from moe_tp.parallel.mesh import Mesh
from moe_tp.train.config import DataConfig
from moe_tp.train.documents import Document, DocumentMaker
from moe_tp.train.files import list_files, read_records
from moe_tp.train.rows import Ints, Rows, make_rows

Batch = dict[str, "torch.Tensor | int"]
T = TypeVar("T")
Words = npt.NDArray[np.uint64]


def load_rows(
    config: DataConfig,
    files: Sequence[str],
    mesh: Mesh,
    *,
    model_folder: str,
    vocab_size: int,
    cache: Path,
) -> Rows:
    """Return the rows of data files; the first rank makes them, all map them into memory.

    Args:
        config: how to read them.
        files: files and folders.
        mesh: the mesh.
        model_folder: of tokenizer and chat template.
        vocab_size: of the model.
        cache: folder that all ranks see, where the rows lie under a name of their own; rows that
            were made of the same files and settings before are used again.

    Raises:
        DataError: the data cannot be used; on every rank.

    Collectives: agreements over the world.
    """
    folder = cache / _fingerprint(config, files, model_folder, vocab_size, mesh)

    def prepare() -> None:
        if mesh.rank or (folder / "counts.json").is_file():
            return
        documents = read_documents(config, files, model_folder, vocab_size)
        made = make_rows(documents, config.seq_len, packing=config.packing, long=config.long)
        made.save(folder)

    data_together(prepare, mesh)
    return data_together(lambda: Rows.load(folder), mesh)


def data_together(work: Callable[[], T], mesh: Mesh) -> T:
    """Return `work()`, or raise DataError on every rank if it failed on any.

    Collectives: an agreement over the world.
    """
    try:
        return together(work, mesh.group("world"), mesh.device)
    except CheckpointError as error:
        raise DataError(str(error)) from error


def read_documents(
    config: DataConfig, files: Sequence[str], model_folder: str, vocab_size: int
) -> Iterator[Document]:
    """Yield the documents of data files, in order.

    Raises:
        DataError: a file or record cannot be used; the message names it.
    """
    maker = DocumentMaker(config, model_folder, vocab_size)
    for path in list_files(files):
        kind: str | None = None
        for record in read_records(path):
            if kind is None:
                kind = maker.kind_of(record)
            yield maker(record, kind)


def _fingerprint(
    config: DataConfig, files: Sequence[str], model_folder: str, vocab_size: int, mesh: Mesh
) -> str:
    """Return a name for rows made of these files with these settings; one on all ranks."""

    def describe() -> str:
        settings = asdict(config)
        for name in ("train", "eval", "shuffle"):
            settings.pop(name)
        used = [*list_files(files), *_tokenizer_files(Path(config.tokenizer or model_folder))]
        if config.chat_template is not None and Path(config.chat_template).is_file():
            used.append(Path(config.chat_template))
        stats = [(str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns) for p in used]
        text = json.dumps([settings, stats, vocab_size], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    name = data_together(describe, mesh)
    mesh.agree("the data files", name)
    return name


def _tokenizer_files(folder: Path) -> list[Path]:
    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "chat_template.jinja")
    return [folder / name for name in names if (folder / name).is_file()]


def epoch_order(num_rows: int, seed: int, epoch: int, *, shuffle: bool = True) -> Ints:
    """Return the row at each place of an epoch.

    The order sorts rows by a hash of (seed, epoch, row), so that no version of a random generator
    enters it.

    Args:
        num_rows: rows of the data.
        seed: of the run.
        epoch: from 0.
        shuffle: False: in the order of the rows.
    """
    if not shuffle:
        return np.arange(num_rows)
    with np.errstate(over="ignore"):
        key = _mix(_mix(np.array([seed], np.uint64)) + np.uint64(epoch))
        values = _mix(np.arange(num_rows, dtype=np.uint64) + key)
    return np.argsort(values, kind="stable")


def _mix(x: Words) -> Words:
    """Return the splitmix64 hash of 64-bit numbers (Steele et al., OOPSLA 2014)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class DataStream:
    """The micro-batches of each optimiser step for one data-parallel rank.

    Args:
        rows: the data.
        seed: of the order.
        shuffle: another order each epoch.
        global_batch: rows of a step over all ranks.
        micro_batch: rows of a call on one rank.
        dp: data-parallel ranks.
        dp_rank: this one.
        length: tokens of a row of a micro-batch; None: as the longest row of it needs.

    Attributes:
        position: samples that all ranks have taken since the start of the run.
    """

    def __init__(
        self,
        rows: Rows,
        *,
        seed: int,
        global_batch: int,
        micro_batch: int,
        dp: int = 1,
        dp_rank: int = 0,
        shuffle: bool = True,
        length: int | None = None,
    ) -> None:
        if global_batch % (micro_batch * dp):
            raise ConfigError(
                f"global_batch={global_batch} is no multiple of micro_batch x dp = "
                f"{micro_batch} x {dp}"
            )
        self.rows, self.seed, self.shuffle, self.length = rows, seed, shuffle, length
        self.global_batch, self.micro_batch = global_batch, micro_batch
        self.dp, self.dp_rank = dp, dp_rank
        self.position = 0
        self._epoch: tuple[int, Ints] | None = None

    def next_step(self) -> list[Batch]:
        """Return this rank's micro-batches of the next step, and move on."""
        batches: list[Batch] = []
        at_once = self.micro_batch * self.dp
        for first in range(0, self.global_batch, at_once):
            offset = first + self.dp_rank * self.micro_batch
            samples = range(self.position + offset, self.position + offset + self.micro_batch)
            batch = self.rows.batch([self.row_of(s) for s in samples], length=self.length)
            batches.append({**batch, "sample_offset": offset})
        self.position += self.global_batch
        return batches

    def row_of(self, sample: int) -> int:
        """Return the row that is sample number `sample` of the run."""
        epoch, place = divmod(sample, len(self.rows))
        if self._epoch is None or self._epoch[0] != epoch:
            order = epoch_order(len(self.rows), self.seed, epoch, shuffle=self.shuffle)
            self._epoch = (epoch, order)
        return int(self._epoch[1][place])

    def state(self) -> dict[str, Any]:
        """Return the position, and what it is a position in."""
        return {
            "position": self.position,
            "rows": len(self.rows),
            "seed": self.seed,
            "digest": self.rows.digest,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go to a position.

        Raises:
            DataError: it belongs to other data or another seed.
        """
        for name in ("rows", "seed"):
            mine = self.state()[name]
            if state[name] != mine:
                raise DataError(
                    f"the checkpoint's data has {name}={state[name]}, this run's {name}={mine}; "
                    f"resume with the data and the seed that it was started with"
                )
        was, now = state.get("digest"), self.rows.digest
        if was and now and was != now:
            raise DataError(
                f"the checkpoint's data has digest={was}, this run's digest={now}: there are as "
                f"many rows, but not the same; resume with the data that it was started with"
            )
        self.position = state["position"]


def evaluation_batches(
    rows: Rows, *, micro_batch: int, dp: int = 1, dp_rank: int = 0, length: int | None = None
) -> Iterator[list[Batch]]:
    """Yield lists of this rank's micro-batches that together hold each row once over the ranks.

    Every rank gets as many lists; the last ones may be shorter or empty.
    """
    at_once = micro_batch * dp
    for first in range(0, len(rows), at_once):
        start = first + dp_rank * micro_batch
        numbers = range(start, min(start + micro_batch, len(rows)))
        yield [dict(rows.batch(numbers, length=length))] if numbers else []


def warn_of_length(seq_len: int, positions: int) -> None:
    """Warn where rows are longer than the positions that a model was trained on.

    Args:
        seq_len: tokens a row.
        positions: `max_position_embeddings` of the model.
    """
    if seq_len > positions:
        warn_once(
            f"data.seq_len={seq_len}",
            f"data.seq_len={seq_len} is more than the {positions} positions that the model knows "
            f"(max_position_embeddings); shorten it, or change the model's rope",
        )
