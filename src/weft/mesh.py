"""Mesh: a Layout bound to live process groups."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .errors import LayoutError
from .layout import DATA_AXES, Layout


class Mesh:
    """The ranks of a run on its layout's axes. One process without torch.distributed, or `alone`, is one rank."""

    def __init__(self, layout: Layout, device: torch.device, alone: bool = False):
        world = dist.get_world_size() if dist.is_initialized() and not alone else 1
        if layout.world != world:
            raise LayoutError(
                "layout", str(layout), f"it has {layout.world} ranks, {world} processes run",
                f"start {layout.world} processes",
            )  # fmt: skip
        self.layout, self.device = layout, device
        self.rank = dist.get_rank() if world > 1 else 0
        self.coords = layout.coords(self.rank)
        self._groups: dict[tuple[str, ...], dist.ProcessGroup] = {}
        self.device_mesh: DeviceMesh | None = None
        if world > 1:
            self.device_mesh = init_device_mesh(
                device.type, tuple(size for _, size in layout.sizes), mesh_dim_names=layout.axes
            )
            # every group that a run may need, made by all ranks in the same order
            for axes in [(axis,) for axis in layout.axes] + [
                layout.live(*DATA_AXES),
                layout.live(*DATA_AXES, "tp"),
                layout.live(),
            ]:
                self._make(axes)
            for axis in DATA_AXES:
                self._make(layout.live(axis, "tp"))

    def _make(self, axes: tuple[str, ...]) -> None:
        live = self.layout.live(*axes) if axes else ()
        if live and live not in self._groups and self.device_mesh is not None:
            if live == self.layout.live() and dist.group.WORLD is not None:
                self._groups[live] = dist.group.WORLD
            elif len(live) == 1:
                self._groups[live] = self.device_mesh.get_group(live[0])
            else:
                self._groups[live] = self.device_mesh[live]._flatten(".".join(live)).get_group()

    def group(self, *axes: str) -> dist.ProcessGroup | None:
        """The group of the ranks that differ only on these axes; None where that is this rank alone."""
        live = self.layout.live(*axes) if axes else ()
        return self._groups[live] if live else None

    def index(self, *axes: str) -> int:
        """This rank's position on these axes together."""
        return self.layout.index(self.rank, *axes)

    def size(self, *axes: str) -> int:
        return self.layout.size(*axes)

    def axes_of(self, group_name: str) -> str | None:
        """The axes of the group with this name, joined by a dot."""
        for live, group in self._groups.items():
            if group.group_name == group_name:
                return ".".join(live)
        return None
