"""The ranks of a run seen along named axes.

Two grids over the same ranks: dense `(pp, dp_cp, tp)`, where `dp_cp` is dp-major, and expert
`(pp, edp, ep, etp)`. Parameters lie on sub-meshes of these two (`Mesh.at_rest`); forwards ask for
the `Group` of an axis (`Mesh.group`). dp and cp are one axis of the dense grid because parameters
never tell them apart; their own groups are made beside it where both are larger than one.

With `dp_replicate` (HSDP) what ZeRO shards lies on two more grids, in which `dp_cp` is split into
`(dp_replicate, dp_shard)` and `edp` into `(edp_replicate, edp_shard)`; the shards of one replica
are neighbouring ranks. Experts without replicas (edp 1) have nothing to split.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from moe_tp.errors import ConfigError, RankMismatchError
from moe_tp.parallel.collectives import Group
from moe_tp.parallel.layout import ParallelLayout, Runtime, check_sharding

Domain = Literal["dense", "expert"]

_DENSE = ("pp", "dp_cp", "tp")
_EXPERT = ("pp", "edp", "ep", "etp")


def local_device_mesh(device_type: str, axes: Sequence[str]) -> DeviceMesh:
    """Return a DeviceMesh of one rank that needs no process group.

    torch offers this only through private arguments; they are used here and nowhere else.
    """
    grid = torch.zeros([1] * len(axes), dtype=torch.int, device="cpu")
    return DeviceMesh(device_type, grid, mesh_dim_names=tuple(axes), _init_backend=False, _rank=0)


@dataclass(frozen=True, slots=True)
class _Grid:
    """Row-major coordinates of the world along named axes."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    def ranks_along(self, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` along `axes` only, in row-major order."""
        grid = torch.arange(math.prod(self.sizes)).view(self.sizes)
        place = [int(i) for i in torch.unravel_index(torch.tensor(rank), self.sizes)]
        index = [slice(None) if a in axes else place[d] for d, a in enumerate(self.axes)]
        return tuple(int(r) for r in grid[tuple(index)].flatten())

    def split(self, axis: str, names: tuple[str, str], outer: int) -> _Grid:
        """Return the grid with `axis` as two axes, the first of size `outer`; itself at 1."""
        if outer == 1:
            return self
        at = self.axes.index(axis)
        sizes = (outer, self.sizes[at] // outer)
        return _Grid(
            (*self.axes[:at], *names, *self.axes[at + 1 :]),
            (*self.sizes[:at], *sizes, *self.sizes[at + 1 :]),
        )


class Mesh:
    """The ranks of a layout along named axes, and the groups between them.

    Axes for `group`, `size` and `coordinate`: `pp dp cp tp edp ep etp`; `dp_cp`, the replicas of
    dense parameters; `cp_tp`, the ranks that share a batch; `stage`, all owners of tokens of one
    pipeline stage (dp x cp x tp); `pp_ends`, the first and the last pipeline rank; `world`.

    Args:
        layout: degrees; `dp=None` fills the world.
        runtime: how the layout is run.
        device: where parameters and activations live; None takes the current CUDA device, or
            the CPU where there is none.

    Raises:
        ConfigError: the layout does not fill the world, or no process group was made.
        RankMismatchError: ranks asked for different layouts, runtimes or versions.

    Collectives: exchange of a digest through the store; creation of the axes' groups.
    """

    def __init__(
        self,
        layout: ParallelLayout,
        runtime: Runtime | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if not dist.is_initialized():
            raise ConfigError(
                "Mesh needs torch.distributed.init_process_group first; "
                "on one process use Mesh.single()"
            )
        refused: ConfigError | None = None
        try:
            layout = layout.resolve(dist.get_world_size())
            check_sharding(layout, runtime or Runtime())
        except ConfigError as error:
            refused = error
        self._setup(layout, runtime, device, dist.get_rank(), dist.get_world_size())
        # A rank that must refuse its layout says so first: the others would wait for it.
        self.agree("layout and runtime", f"{self.layout!r} {self.runtime!r} {_version()}")
        if refused is not None:
            raise refused
        self._connect()

    @classmethod
    def single(
        cls, runtime: Runtime | None = None, device: torch.device | str | None = None
    ) -> Mesh:
        """Return the mesh of one process, which needs no process group."""
        check_sharding(ParallelLayout(dp=1), runtime or Runtime())
        mesh = cls.__new__(cls)
        mesh._setup(ParallelLayout(dp=1), runtime, device, 0, 1)
        mesh._groups = {axis: Group(axis) for axis in (*_AXES, "pp_ends", "world")}
        mesh._rest = {
            "dense": local_device_mesh(mesh.device.type, ("dp_cp", "tp")),
            "expert": local_device_mesh(mesh.device.type, ("edp", "ep", "etp")),
        }
        mesh._model = mesh._replicas = {}
        return mesh

    def _setup(
        self,
        layout: ParallelLayout,
        runtime: Runtime | None,
        device: torch.device | str | None,
        rank: int,
        world_size: int,
    ) -> None:
        self.layout = layout
        self.runtime = runtime or Runtime()
        self.rank = rank
        self.world_size = world_size
        if self.runtime.deterministic:
            torch.use_deterministic_algorithms(True)
        if device is None:
            cuda = torch.cuda.is_available()
            device = torch.device("cuda", torch.cuda.current_device()) if cuda else "cpu"
        self.device = torch.device(device)

    def _connect(self) -> None:
        lay, kind = self.layout, self.device.type
        assert lay.dp is not None
        replicate = self.runtime.dp_replicate
        dense = _Grid(_DENSE, (lay.pp, lay.dp * lay.cp, lay.tp))
        expert = _Grid(_EXPERT, (lay.pp, lay.edp, lay.ep, lay.etp))
        dense_zero = dense.split("dp_cp", ("dp_replicate", "dp_shard"), replicate)
        expert_zero = expert.split(
            "edp", ("edp_replicate", "edp_shard"), replicate if lay.edp > 1 else 1
        )
        meshes = {
            grid: init_device_mesh(kind, grid.sizes, mesh_dim_names=grid.axes)
            for grid in dict.fromkeys((dense, expert, dense_zero, expert_zero))
        }
        self._rest: dict[Domain, DeviceMesh] = {
            "dense": meshes[dense]["dp_cp", "tp"],
            "expert": meshes[expert]["edp", "ep", "etp"],
        }
        self._model: dict[Domain, DeviceMesh] = {
            "dense": meshes[dense_zero]["tp"],
            "expert": meshes[expert_zero]["ep", "etp"],
        }
        self._replicas: dict[Domain, DeviceMesh] = {
            "dense": meshes[dense_zero][dense_zero.axes[1:-1]],
            "expert": meshes[expert_zero][expert_zero.axes[1:-2]],
        }
        everyone = tuple(range(self.world_size))
        world = dist.group.WORLD
        made: dict[tuple[int, ...], dist.ProcessGroup] = {}
        if world is not None:
            made[everyone] = world
        limit = timedelta(seconds=self.runtime.timeout)
        for mesh in meshes.values():
            for axis in mesh.mesh_dim_names or ():
                group = mesh.get_group(axis)
                # init_device_mesh takes no timeout and would leave torch's half an hour.
                if dist.get_backend(group) in ("gloo", "nccl"):
                    dist.distributed_c10d._set_pg_timeout(limit, group)
                made.setdefault(tuple(dist.get_process_group_ranks(group)), group)
        grid = _Grid(("pp", "dp", "cp", "tp"), (lay.pp, lay.dp, lay.cp, lay.tp))
        self._groups: dict[str, Group] = {}
        for axis, parts in _AXES.items():
            source = expert if axis in _EXPERT[1:] else grid
            along = partial(source.ranks_along, axes=parts)
            self._groups[axis] = self._make_group(axis, along, made)
        for source in (dense_zero, expert_zero):
            for axis in source.axes:
                if axis not in self._groups:
                    along = partial(source.ranks_along, axes=(axis,))
                    self._groups[axis] = self._make_group(axis, along, made)

        def ends(rank: int) -> tuple[int, ...]:
            line = grid.ranks_along(rank, ("pp",))
            return tuple(sorted({line[0], line[-1]}))

        self._groups["pp_ends"] = self._make_group("pp_ends", ends, made)
        self._groups["world"] = Group("world", self.world_size, self.rank, everyone, world)

    def _make_group(
        self,
        axis: str,
        ranks_of: Callable[[int], tuple[int, ...]],
        made: dict[tuple[int, ...], dist.ProcessGroup],
    ) -> Group:
        """Return this rank's group of an axis, made if no axis before it had the same ranks."""
        mine = ranks_of(self.rank)
        sets = {ranks_of(rank) for rank in range(self.world_size)}
        if len(mine) > 1 and mine not in made:
            # Every rank must create every group of the axis, in the same order.
            limit = timedelta(seconds=self.runtime.timeout)
            for ranks in sorted(sets):
                group = dist.new_group(list(ranks), timeout=limit)
                if ranks == mine:
                    made[mine] = group
        if self.rank not in mine or len(mine) == 1:
            return Group(axis, ranks=(self.rank,))
        return Group(axis, len(mine), mine.index(self.rank), mine, made[mine])

    def agree(self, what: str, value: str, *, axis: str | None = None) -> None:
        """Check that every rank of the world, or of an axis, holds the same `value`.

        Args:
            what: the thing compared, for the message.
            value: any text, such as the repr of a configuration.
            axis: None for the world.

        Raises:
            RankMismatchError: names the ranks that differ from the first, and their values.

        Collectives: exchange of a text a rank through the store of the default group.
        """
        ranks = range(self.world_size) if axis is None else self.group(axis).ranks
        if len(ranks) == 1:
            return
        store = dist.distributed_c10d._get_default_store()
        # the groups of an axis come here as often as their layers do, each by its own count
        folder = "moe_tp/agree" if axis is None else f"moe_tp/agree/{','.join(map(str, ranks))}"
        turn = store.add(f"{folder}/turn/{self.rank}", 1)
        digest = hashlib.sha256(f"{what}\0{value}".encode()).hexdigest()
        store.set(f"{folder}/{turn}/{self.rank}", f"{digest} {what}: {value[:2000]}")
        keys = [f"{folder}/{turn}/{rank}" for rank in ranks]
        store.wait(keys, timedelta(seconds=self.runtime.timeout))
        texts = [text.decode() for text in store.multi_get(keys)]
        told = dict(zip(ranks, texts, strict=True))
        odd = [rank for rank in ranks if told[rank][:64] != texts[0][:64]]
        if odd:
            raise RankMismatchError(
                f"ranks {odd} disagree with rank {ranks[0]} about {what}: rank {odd[0]} has "
                f"{_difference(told[odd[0]][65:], texts[0][65:], ranks[0])}; start every rank with "
                f"the same settings and the same version"
            )

    def group(self, axis: str) -> Group:
        """Return the group of this rank along `axis`."""
        try:
            return self._groups[axis]
        except KeyError:
            raise ConfigError(
                f"axis={axis!r} is unknown; choose one of {', '.join(self._groups)}"
            ) from None

    def size(self, axis: str) -> int:
        """Return the number of ranks along `axis`."""
        return self.group(axis).size

    def coordinate(self, axis: str) -> int:
        """Return this rank's place along `axis`."""
        return self.group(axis).rank

    def at_rest(self, domain: Domain, *, zero_sharded: bool) -> DeviceMesh:
        """Return the mesh on which parameters of a domain are made.

        It includes the replicas' axis, but for parameters that ZeRO shards at stages 1-3:
        `fully_shard` adds that axis.
        """
        return (self._model if zero_sharded and self.layout.zero else self._rest)[domain]

    def replicas(self, domain: Domain) -> DeviceMesh:
        """Return the mesh over which parameters of a domain are replicated: (replicate,) shard."""
        return self._replicas[domain]

    @property
    def stage(self) -> int:
        """This rank's pipeline rank."""
        return self.coordinate("pp")

    @property
    def owners(self) -> Group:
        """The ranks that own the tokens of this pipeline stage."""
        return self.group("stage")


_AXES: dict[str, tuple[str, ...]] = {
    "pp": ("pp",),
    "dp": ("dp",),
    "cp": ("cp",),
    "tp": ("tp",),
    "edp": ("edp",),
    "ep": ("ep",),
    "etp": ("etp",),
    "dp_cp": ("dp", "cp"),
    "cp_tp": ("cp", "tp"),
    "stage": ("dp", "cp", "tp"),
}


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"moe_tp {version('moe_tp')} torch {torch.__version__}"
    except PackageNotFoundError:
        return f"moe_tp (source tree) torch {torch.__version__}"


def _difference(mine: str, reference: str, first: int) -> str:
    """Return the stretch where a text differs from that of the first rank, from just before it."""
    pairs = enumerate(zip(mine, reference, strict=False))
    same = next((at for at, (a, b) in pairs if a != b), min(len(mine), len(reference)))
    start = max(0, same - 40)
    own, other = (text[start : same + 60] for text in (mine, reference))
    return f"...{own}... where rank {first} has ...{other}..."
