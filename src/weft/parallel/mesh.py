"""Mesh: a Layout bound to live process groups."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from weft.core import REPLICA_AXIS, STAGE_AXIS, Divides, Layout, LayoutError

from .axes import TOKEN_AXES
from .strategies import axis_table

# the sets of axes over which a gradient can be partial
_SUMMED = [axis for axis, t in axis_table().traits.items() if Divides.STAGES not in t.divides]
PARTIAL = [axes for n in range(1, len(_SUMMED) + 1) for axes in combinations(_SUMMED, n)]


class Mesh:
    """The ranks of a run on its layout's axes. One process without torch.distributed, or `alone`,
    is one rank.

    `shared`: sets of positions on `pp` whose ranks have something to reduce together; `pairs`:
    positions (lower, higher) between which messages go. `replicas`: groups for a synchroniser, each
    as the parts that the positions on `dp` are in; `lanes` are this rank's. `independent_axes`:
    axes whose ranks step independently: this is the mesh of one of them, with its own ranks
    from 0. `replica`: the position on `dp` of this process, where the processes of a replica have a
    world to themselves.
    """

    def __init__(
        self,
        layout: Layout,
        device: torch.device,
        alone: bool = False,
        shared: Iterable[tuple[int, ...]] = (),
        pairs: Iterable[tuple[int, int]] = (),
        replicas: Iterable[Iterable[Iterable[int]]] = (),
        independent_axes: tuple[str, ...] = (),
        replica: int | None = None,
    ):
        world = dist.get_world_size() if dist.is_initialized() and not alone else 1
        self.whole, self.layout, self.device = (
            layout,
            layout.without(*independent_axes) if independent_axes else layout,
            device,
        )
        self._here = (
            self.layout if replica is not None else layout
        )  # of all processes of this world
        if self._here.world != world:
            raise LayoutError(
                "layout",
                str(layout),
                f"it needs {self._here.world} ranks, and {world} processes are running",
                f"start {self._here.world} processes",
            )
        self._world_rank = dist.get_rank() if world > 1 else 0
        self.place = self._world_rank  # in the whole layout
        if replica is not None:
            self.place = layout.rank(
                **{**self.layout.coords(self._world_rank), REPLICA_AXIS: replica}
            )
        self.coords = {
            axis: c for axis, c in layout.coords(self.place).items() if axis not in independent_axes
        }
        self.rank = self.layout.rank(**self.coords)
        self._groups: dict[tuple[str, ...], dist.ProcessGroup] = {}
        self._parts: dict[tuple[str, ...], list[list[int]]] = {}
        self._among: dict[tuple[tuple[str, ...], tuple[int, ...]], dist.ProcessGroup] = {}
        # position on `pp` -> groups of that rank and this one: for messages to the higher of the
        # two, and to the lower. What flows both ways, or to several ranks, must not queue up in one
        # communicator
        self.pipes: dict[int, tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}
        self.device_mesh: DeviceMesh | None = None
        self.lanes: list[dist.ProcessGroup] = []
        if world > 1:
            self.device_mesh = init_device_mesh(
                device.type,
                tuple(size for _, size in self._here.sizes),
                mesh_dim_names=self._here.axes,
            )
            # every group that a run may need, made by all ranks in the same order
            own = self.layout
            for axis in own.axes:
                self._make((axis,))
            for axes in (*PARTIAL, (*TOKEN_AXES, STAGE_AXIS), own.axes):
                self._make(axes)
            if layout.stage_ranks > 1:
                here = self.coords[STAGE_AXIS]
                for pair in sorted(set(pairs)):
                    up, down = (self._new((STAGE_AXIS,), pair) for _ in range(2))
                    if here in pair and up is not None and down is not None:
                        self.pipes[sum(pair) - here] = up, down
                        _open(up, device, first=here == pair[0])
                        _open(down, device, first=here == pair[1])
                for among in sorted(set(shared)):
                    self._make_among(among)
            for parts in replicas:
                made = [self._new((REPLICA_AXIS,), tuple(part), REPLICA_AXIS) for part in parts]
                self.lanes += [group for group in made if group is not None]

    def _make(self, axes: tuple[str, ...]) -> None:
        live = self.layout.active_axes(*axes) if axes else ()
        if live and live not in self._groups and self.device_mesh is not None:
            if live == self._here.active_axes() and dist.group.WORLD is not None:
                self._groups[live] = dist.group.WORLD
            elif len(live) == 1:
                self._groups[live] = self.device_mesh.get_group(live[0])
            else:
                self._groups[live] = self.device_mesh[live]._flatten(".".join(live)).get_group()

    def _new(
        self, axes: tuple[str, ...], among: tuple[int, ...], axis: str = STAGE_AXIS
    ) -> dist.ProcessGroup | None:
        """Of the ranks that differ only on these axes, the group of those at these positions on
        `axis`, if this rank is one. Every rank makes those of all ranks: torch names a group by how
        many were made before."""
        mine = None
        for peers in self._lines(axes):
            group = dist.new_group(
                ranks := [rank for rank in peers if self._here.coords(rank)[axis] in among]
            )
            if self._world_rank in ranks:
                mine = group
        return mine

    def _lines(self, axes: tuple[str, ...]) -> list[list[int]]:
        """All ranks in parts, each of those that differ only on these axes."""
        if axes not in self._parts:
            found: dict[tuple[int, ...], list[int]] = {}
            for rank in range(self._here.world):
                others = tuple(c for axis, c in self._here.coords(rank).items() if axis not in axes)
                found.setdefault(others, []).append(rank)
            self._parts[axes] = list(found.values())
        return self._parts[axes]

    def _make_among(self, among: tuple[int, ...]) -> None:
        """The groups of these positions on `pp`, with every set of other axes over which a gradient
        can be partial."""
        seen = set()
        for others in ((), *PARTIAL):
            axes = self.layout.active_axes(*others, STAGE_AXIS)
            if axes not in seen:
                seen.add(axes)
                group = self._new(axes, among)
                if group is not None:
                    self._among[axes, among] = group

    def group(self, *axes: str, among: tuple[int, ...] = ()) -> dist.ProcessGroup | None:
        """The group of the ranks that differ only on these axes; None where that is this rank
        alone.

        `among`: only those at these positions on `pp`.
        """
        live = self.layout.active_axes(*axes) if axes else ()
        if among:
            return self._among[live, among]
        return self._groups[live] if live else None

    def sharding(self, axis: str, across: bool) -> DeviceMesh:
        """What FSDP2 shards over: the ranks of an axis, or of several, joined by dots, as one; with
        the replicas of these around them if `across`."""
        assert self.device_mesh is not None
        outer = self.layout.active_axes(REPLICA_AXIS) if across else ()
        inner = self.layout.active_axes(axis)
        if len(inner) == 1:
            return self.device_mesh[(*outer, *inner)]
        name, together = ".".join(inner), self._groups[inner]
        if not outer:
            return DeviceMesh.from_group(together, self.device.type, mesh_dim_names=(name,))
        replicas = self.layout.group_ranks(self.rank, *outer)
        return DeviceMesh.from_group(
            [self._groups[outer], together],
            self.device.type,
            torch.tensor([self.layout.group_ranks(rank, *inner) for rank in replicas]),
            mesh_dim_names=(*outer, name),
        )

    def index(self, *axes: str) -> int:
        """This rank's position on these axes together."""
        return self.layout.index(self.rank, *axes)

    def size(self, *axes: str) -> int:
        return self.layout.size(*axes)

    def axes_of(self, group_name: str) -> str | None:
        """The axes of the group with this name, joined by a dot."""
        named = [
            *self._groups.items(),
            *((live, group) for (live, _), group in self._among.items()),
        ]
        named += [((STAGE_AXIS,), group) for pipe in self.pipes.values() for group in pipe]
        for live, group in [*named, *(((REPLICA_AXIS,), lane) for lane in self.lanes)]:
            if group.group_name == group_name:
                return ".".join(live)
        return None


def _open(pipe: dist.ProcessGroup, device: torch.device, first: bool) -> None:
    """Send something once: NCCL connects two ranks at their first message, for which both must be
    there. Later, one may post a receive long before the other comes to send."""
    token, peer = torch.zeros(1, device=device), 1 - pipe.rank()
    if first:
        dist.send(token, group=pipe, group_dst=peer)
    else:
        dist.recv(token, group=pipe, group_src=peer)
