"""Layout: named axes <-> ranks. Pure arithmetic; no torch.

A layout is written outermost axis first, each axis with its size, and an option of the axis after a
`+`:

    dp2.fsdp2+zero2.tp4+sequence

    rank = ((dp * 2) + fsdp) * 4 + tp          neighbours on the last axis are neighbouring ranks
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod

from .errors import LayoutError

REPLICA_AXIS = "dp"  # its ranks are the replicas that synchronisers, servers and recovery work on
STAGE_AXIS = "pp"  # its ranks are the stages that the pipeline runs
EXPERTS_OPTION = "ep"  # after an axis: experts are spread over its ranks too
EXPERTS = "experts"  # in place of an axis: all over which experts are spread
_AXIS = re.compile(r"([a-z]+)([0-9]+)((?:\+[a-z0-9][a-z0-9-]*)*)")


@dataclass(frozen=True)
class Layout:
    """Named axes and sizes, outermost first. `str` and `parse` are inverse.

    Example:
        >>> layout = Layout.parse("pp2.dp2.tp2+sequence")
        >>> layout.world, layout.size("tp"), str(layout)
        (8, 2, 'pp2.dp2.tp2+sequence')
    """

    sizes: tuple[tuple[str, int], ...]
    options: tuple[tuple[str, str], ...] = ()  # (axis, option) in the order written

    def __post_init__(self) -> None:
        names = self.axes
        for name, size in self.sizes:
            if size < 1:
                raise LayoutError(
                    "layout", str(self), f"axis {name} has size {size}", "sizes start at 1"
                )
            if names.count(name) > 1:
                raise LayoutError(
                    "layout", str(self), f"axis {name} is named twice", "name each axis once"
                )

    @classmethod
    def parse(cls, text: str) -> Layout:
        """The layout that a text such as `pp2.dp2.tp2+sequence` writes. Raises LayoutError."""
        sizes: list[tuple[str, int]] = []
        options: list[tuple[str, str]] = []
        for part in text.strip().split("."):
            match = _AXIS.fullmatch(part)
            if match is None:
                raise LayoutError(
                    "layout",
                    text,
                    f"{part!r} is not an axis with a size",
                    'write axes as in "dp2.fsdp2.tp2+sequence"',
                )
            name, size, flags = match.groups()
            sizes.append((name, int(size)))
            options += [(name, flag) for flag in flags.split("+")[1:]]
        return cls(tuple(sizes), tuple(options))

    @classmethod
    def single(cls) -> Layout:
        """One device."""
        return cls(((REPLICA_AXIS, 1),))

    def __str__(self) -> str:
        return ".".join(
            f"{name}{size}" + "".join(f"+{o}" for a, o in self.options if a == name)
            for name, size in self.sizes
        )

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.sizes)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return prod(size for _, size in self.sizes)

    def expand(self, *axes: str) -> tuple[str, ...]:
        """These axes: in place of names joined by dots each of them, as the ranks of several axes
        together are written; and in place of `experts` those over which experts are spread: `ep`,
        and each axis that has it as an option, a second reading of the same ranks."""
        axes = tuple(name for axis in axes for name in axis.split("."))
        if EXPERTS not in axes:
            return axes
        return (*axes, "ep", *(axis for axis, option in self.options if option == EXPERTS_OPTION))

    def size(self, *axes: str) -> int:
        """Product of the sizes of these axes; an axis that is not in the layout has size 1."""
        axes = self.expand(*axes)
        return prod(size for name, size in self.sizes if name in axes)

    def without(self, *axes: str) -> Layout:
        """The same layout without these axes."""
        sizes = tuple((name, size) for name, size in self.sizes if name not in axes)
        return Layout(
            sizes or Layout.single().sizes, tuple((a, o) for a, o in self.options if a not in axes)
        )

    @property
    def replica_count(self) -> int:
        """Number of replicas."""
        return self.size(REPLICA_AXIS)

    @property
    def stage_ranks(self) -> int:
        """Number of ranks of a pipeline."""
        return self.size(STAGE_AXIS)

    def spreads_experts(self, axis: str) -> bool:
        """Whether experts are spread over an axis by its option `ep`."""
        return (axis, EXPERTS_OPTION) in self.options

    def has_option(self, option: str) -> bool:
        """Whether this option stands after any axis."""
        return any(option == written for _, written in self.options)

    def options_of(self, axis: str) -> tuple[str, ...]:
        """The options written after this axis."""
        return tuple(o for a, o in self.options if a == axis)

    def active_axes(self, *axes: str) -> tuple[str, ...]:
        """Those of these axes (of all axes if none is named) that hold more than one rank, in
        layout order."""
        axes = self.expand(*axes)
        return tuple(name for name, size in self.sizes if size > 1 and (not axes or name in axes))

    def coords(self, rank: int) -> dict[str, int]:
        """Position of a rank on every axis."""
        coords = {}
        for name, size in reversed(self.sizes):
            rank, coords[name] = divmod(rank, size)
        return {name: coords[name] for name in self.axes}

    def rank(self, **coords: int) -> int:
        """Rank at this position; an axis left out counts as 0."""
        rank = 0
        for name, size in self.sizes:
            rank = rank * size + coords.get(name, 0)
        return rank

    def index(self, rank: int, *axes: str) -> int:
        """Position of a rank among its peers on these axes together."""
        coords, index, axes = self.coords(rank), 0, self.expand(*axes)
        for name, size in self.sizes:
            if name in axes:
                index = index * size + coords[name]
        return index

    def replica_of(self, rank: int) -> int:
        """Position of a rank among the replicas."""
        return self.coords(rank).get(REPLICA_AXIS, 0)

    def stage_of(self, rank: int) -> int:
        """Position of a rank in its pipeline."""
        return self.coords(rank).get(STAGE_AXIS, 0)

    def replicas(self) -> list[list[int]]:
        """The ranks of each replica."""
        ranks = range(self.world)
        return [[r for r in ranks if self.replica_of(r) == i] for i in range(self.replica_count)]

    def group_ranks(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The ranks that differ from this one only on these axes, itself among them, in order."""
        coords, axes = self.coords(rank), self.expand(*axes)
        return tuple(
            r
            for r in range(self.world)
            if all(c == coords[a] for a, c in self.coords(r).items() if a not in axes)
        )
