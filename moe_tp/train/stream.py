"""Data that is read while the run goes on: windows of documents, each packed and shuffled alone.

The first rank reads, tokenises and packs window after window of `data.stream_window` documents, one
ahead of the run; the others map its files into memory. A window follows from its place alone, and
the rows of a window are taken in an order that is a hash of (seed, epoch, window, row), so samples
come in the same order in every layout, and a position is three numbers. A resume reads on from its
window, without tokenising what came before.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from moe_tp.checkpoint.agree import gather_json
from moe_tp.errors import ConfigError, DataError
from moe_tp.models.tokens import IGNORE
from moe_tp.parallel.mesh import Mesh
from moe_tp.train.config import DataConfig
from moe_tp.train.data import Batch, data_together, epoch_order
from moe_tp.train.documents import Document, DocumentMaker
from moe_tp.train.files import list_files, read_records
from moe_tp.train.rows import Counts, Ints, Rows, make_rows

_EPOCH = 1 << 32  # windows of an epoch, for the key of an order


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What the first rank has made of a window.

    Args:
        folder: of its rows; None where nothing in it is learned.
        last: it ends the epoch.
    """

    folder: str | None
    last: bool


class WindowMaker:
    """Makes windows in order, on the first rank.

    Args:
        config: how to read the data.
        model_folder: of tokenizer and chat template.
        vocab_size: of the model.
        cache: folder that all ranks see.
    """

    def __init__(self, config: DataConfig, model_folder: str, vocab_size: int, cache: Path) -> None:
        self.config, self.cache = config, cache
        self.maker = DocumentMaker(config, model_folder, vocab_size)
        self._next: tuple[int, int] | None = None
        self._documents: Iterator[Document] = iter(())

    def make(self, epoch: int, window: int) -> Window:
        """Return a window, its rows written.

        Raises:
            DataError: a file or record cannot be used.
        """
        size = self.config.stream_window
        if self._next != (epoch, window):
            self._documents = self._read(skip=window * size)
        found = list(itertools.islice(self._documents, size))
        ahead = next(self._documents, None)
        if ahead is not None:
            self._documents = itertools.chain([ahead], self._documents)
        self._next = (epoch, window + 1)
        folder = self.cache / f"window-{epoch}-{window}"
        learned = any(label != IGNORE for d in found for label in d.labels[1:])
        if learned:
            try:
                rows = make_rows(
                    found,
                    self.config.seq_len,
                    packing=self.config.packing,
                    long=self.config.long,
                )
                rows.save(folder)
            except DataError:  # the targets are all in documents that are longer than a row
                learned = False
        return Window(folder=str(folder) if learned else None, last=ahead is None)

    def _read(self, *, skip: int) -> Iterator[Document]:
        for path in list_files(self.config.train):
            kind: str | None = None
            for record in read_records(path):
                if kind is None:
                    kind = self.maker.kind_of(record)
                if skip:
                    skip -= 1
                else:
                    yield self.maker(record, kind)


def _names_and_sizes(train: Sequence[str]) -> str:
    """Return a digest of the files, by which a resume knows that they are those it began with."""
    files = [(path.name, path.stat().st_size) for path in list_files(train)]
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()[:16]


class WindowStream:
    """The micro-batches of each optimiser step for one data-parallel rank, read as they come.

    Args:
        config: how to read the data.
        mesh: the mesh; its ranks take windows together.
        model_folder: of tokenizer and chat template.
        vocab_size: of the model.
        cache: folder that all ranks see; windows are deleted as soon as no rank needs them.
        seed: of the order.
        global_batch: rows of a step over all ranks.
        micro_batch: rows of a call on one rank.

    Attributes:
        counts: what became of the documents of all windows so far, since the start or resume.
    """

    def __init__(
        self,
        config: DataConfig,
        mesh: Mesh,
        *,
        model_folder: str,
        vocab_size: int,
        cache: Path,
        seed: int,
        global_batch: int,
        micro_batch: int,
    ) -> None:
        self.config, self.mesh, self.seed = config, mesh, seed
        self.global_batch, self.micro_batch = global_batch, micro_batch
        self.dp, self.dp_rank = mesh.size("dp"), mesh.coordinate("dp")
        if global_batch % (micro_batch * self.dp):
            raise ConfigError(
                f"global_batch={global_batch} is no multiple of micro_batch x dp = "
                f"{micro_batch} x {self.dp}"
            )
        self.epoch = self.window = self.taken = 0
        self.counts = Counts(row_tokens=config.seq_len)
        self._maker: WindowMaker | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._pending: tuple[tuple[int, int], Future[Window]] | None = None
        self._old: list[Path] = []

        def prepare() -> None:
            if mesh.rank == 0:
                list_files(config.train)
                shutil.rmtree(cache, ignore_errors=True)
                self._maker = WindowMaker(config, model_folder, vocab_size, cache)
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="moe_tp data")

        data_together(prepare, mesh)
        self._files = data_together(lambda: _names_and_sizes(config.train), mesh)
        self._rows: Rows | None = None  # of the current window; None: it has none
        self._order: Ints | None = None
        self._open_now = self._last = False
        self._epoch_rows = 0  # rows of the current epoch so far

    def next_step(self) -> list[Batch]:
        """Return this rank's micro-batches of the next step, and move on.

        Raises:
            DataError: the data cannot be used; on every rank.

        Collectives: where a window ends, agreements over the world.
        """
        places = [self._next_place() for _ in range(self.global_batch)]
        batches: list[Batch] = []
        at_once = self.micro_batch * self.dp
        for first in range(0, self.global_batch, at_once):
            offset = first + self.dp_rank * self.micro_batch
            mine = places[offset : offset + self.micro_batch]
            batches.append({**_batch(mine, self.config.seq_len), "sample_offset": offset})
        return batches

    def state(self) -> dict[str, Any]:
        """Return the position, and what it is a position in."""
        return {
            "files": self._files,
            "epoch": self.epoch,
            "window": self.window,
            "taken": self.taken,
            "seed": self.seed,
            "stream_window": self.config.stream_window,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go to a position.

        Raises:
            DataError: it belongs to other files, another seed or size of windows.
        """
        for name in ("seed", "stream_window", "files"):
            mine = self.state()[name]
            if state.get(name, mine if name == "files" else None) != mine:
                raise DataError(
                    f"the checkpoint's data has {name}={state.get(name)}, this run's "
                    f"{name}={mine}; resume with the data and the seed that it was started with"
                )
        self.epoch, self.window = state["epoch"], state["window"]
        self.taken = state["taken"]
        self._open_now = False
        self._epoch_rows = self.taken

    def close(self) -> None:
        """End the reading ahead."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _next_place(self) -> tuple[Rows, int]:
        """Return the rows and the number of the next sample."""
        if not self._open_now:
            self._open()
        while self._rows is None or self.taken >= len(self._rows):
            if self._last and not self._epoch_rows:
                raise DataError("the data holds nothing to learn, in a whole pass over it")
            self.epoch, self.window = (
                (self.epoch + 1, 0) if self._last else (self.epoch, self.window + 1)
            )
            self.taken = 0
            self._open()
        assert self._order is not None
        self.taken += 1
        return self._rows, int(self._order[self.taken - 1])

    def _open(self) -> None:
        """Map the rows of the current window."""
        world, device = self.mesh.group("world"), self.mesh.device
        place = (self.epoch, self.window)

        def wait() -> dict[str, object] | None:
            if self._thread is None or self._maker is None:
                return None
            if self._pending is None or self._pending[0] != place:
                self._pending = (place, self._thread.submit(self._maker.make, *place))
            made = self._pending[1].result()
            following = (place[0] + 1, 0) if made.last else (place[0], place[1] + 1)
            self._pending = (following, self._thread.submit(self._maker.make, *following))
            return asdict(made)

        found = gather_json(data_together(wait, self.mesh), world, device)[0]
        made = Window(**found)
        self._open_now, self._last, self._rows = True, made.last, None
        if place[1] == 0:
            self._epoch_rows = 0
        while len(self._old) > 1:  # no rank can be in it any more: all have opened the one after
            if self.mesh.rank == 0:
                shutil.rmtree(self._old[0], ignore_errors=True)
            self._old.pop(0)
        if made.folder is None:
            return
        folder = Path(made.folder)
        self._rows = rows = data_together(lambda: Rows.load(folder), self.mesh)
        self._old.append(folder)
        self._epoch_rows += len(rows)
        self.counts = _sum(self.counts, rows.counts)
        key = place[0] * _EPOCH + place[1]
        self._order = epoch_order(len(rows), self.seed, key, shuffle=self.config.shuffle)


def _sum(one: Counts, other: Counts) -> Counts:
    names = [f.name for f in dataclasses.fields(Counts) if f.name != "row_tokens"]
    sums = {name: getattr(one, name) + getattr(other, name) for name in names}
    return dataclasses.replace(one, **sums)


def _batch(places: Sequence[tuple[Rows, int]], seq_len: int) -> dict[str, torch.Tensor]:
    """Return rows of one or more windows as the model takes them."""
    rows = places[0][0]
    if all(other is rows for other, _ in places):
        return rows.batch([n for _, n in places])
    parts = [rows.batch([n], length=seq_len) for rows, n in places]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
