"""Choices: many ways to lay one model over devices, as arrays, one entry each, so that a formula
prices all at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from weft.core import (
    DEFAULT_SCHEDULE,
    EXPERTS,
    Layout,
)
from weft.parallel import (
    DATA_AXES,
    SEQUENCE_AXES,
)

Array = NDArray[Any]
AXES = (
    "pp",
    "dp",
    "fsdp",
    "ep",
    "cp",
    "up",
    "tp",
)  # outermost first, where nothing else is asked for


@dataclass(frozen=True)
class LayoutBatch:
    """Entry i of every array is one choice.

    `sizes` of each axis in AXES, 1 where a layout lacks it; `strides`: ranks from one to its
    neighbour on that axis. `experts`: ranks over which experts are spread, those of tp apart: a
    rank has as much of them if tp parts them as if it cuts each. `sequence`: that option of tp;
    `gather`: that of cp, whose keys else travel round a ring. `zero`: 1, 2 or 3, of fsdp, over
    `shards` ranks. `schedule`: place in `schedules`; `chunks`: stages of a rank. A rank has
    `microbatch` samples in each of `accumulate` microbatches. `again`: the share of repeated blocks
    that recomputation runs again; `selective`: its attention's core.
    """

    sizes: Mapping[str, Array]
    strides: Mapping[str, Array]
    experts: Array
    sequence: Array
    gather: Array
    zero: Array
    shards: Array
    offload: Array
    schedule: Array
    schedules: tuple[str, ...]
    chunks: Array
    microbatch: Array
    accumulate: Array
    again: Array
    selective: Array

    def __len__(self) -> int:
        return len(self.accumulate)

    @property
    def world(self) -> Array:
        """Ranks of each."""
        return np.prod([self.sizes[axis] for axis in AXES], axis=0)

    @property
    def batch(self) -> Array:
        """Samples of a step, of all ranks."""
        return self.microbatch * self.accumulate * self.size(*DATA_AXES)

    def size(self, *axes: str) -> Array:
        """Product of the sizes of these axes."""
        return np.prod([self.sizes[axis] for axis in axes], axis=0)

    @property
    def sequences(self) -> Array:
        """Ranks that share a sequence."""
        return self.size(*SEQUENCE_AXES)

    def take(self, index: Array) -> Self:
        """Those at these places, or where this mask is true."""
        found: dict[str, Any] = {}
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, Mapping):
                found[each.name] = {axis: array[index] for axis, array in value.items()}
            elif each.name != "schedules":
                found[each.name] = value[index]
        return replace(self, **found)

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """All of these, one after the other."""
        known = tuple(dict.fromkeys(name for part in parts for name in part.schedules))
        found: dict[str, Any] = {}
        for each in fields(cls):
            values = [getattr(part, each.name) for part in parts]
            if isinstance(values[0], Mapping):
                found[each.name] = {
                    axis: np.concatenate([value[axis] for value in values]) for axis in values[0]
                }
            elif each.name != "schedules":
                found[each.name] = np.concatenate(values)
        places = [
            np.array([known.index(name) for name in part.schedules])[part.schedule]
            for part in parts
        ]
        return cls(**found | {"schedules": known, "schedule": np.concatenate(places)})

    @classmethod
    def of(
        cls,
        layouts: Sequence[Layout],
        *,
        batch: int,
        accumulate: int | Sequence[int] = 1,
        recompute: str | int | Sequence[str | int] = "none",
        schedule: str | Sequence[str] = DEFAULT_SCHEDULE,
        chunks: int | Sequence[int] = 1,
    ) -> Self:
        """These layouts, each with the rest of its choice: one value for all, or one for each."""
        count = len(layouts)

        def each(value: Any) -> list[Any]:
            return list(value) if isinstance(value, list | tuple | np.ndarray) else [value] * count

        sizes = {a: np.array([one.size(a) for one in layouts]) for a in AXES}
        strides = {a: np.array([_stride(one, a) for one in layouts]) for a in AXES}
        names = each(schedule)
        known = tuple(dict.fromkeys(names))
        levels = [
            [int(o[4:]) for o in one.option("fsdp") if o.startswith("zero")] or [3]
            for one in layouts
        ]
        parts, modes = np.array(each(accumulate)), each(recompute)
        return cls(
            sizes,
            strides,
            experts=np.array([one.size(EXPERTS) // _spread_over_tp(one) for one in layouts]),
            sequence=np.array(["sequence" in one.option("tp") for one in layouts]),
            gather=np.array(["gather" in one.option("cp") for one in layouts]),
            zero=np.array([level[0] for level in levels]),
            shards=sizes["fsdp"],
            offload=np.array(["offload" in one.option("fsdp") for one in layouts]),
            schedule=np.array([known.index(name) for name in names]),
            schedules=known,
            chunks=np.array(each(chunks)),
            microbatch=batch / (parts * np.prod([sizes[a] for a in DATA_AXES], axis=0)),
            accumulate=parts,
            again=np.array(
                [
                    1.0 if mode == "full" else 1 / mode if isinstance(mode, int) else 0.0
                    for mode in modes
                ]
            ),
            selective=np.array([mode == "selective" for mode in modes]),
        )


def _spread_over_tp(layout: Layout) -> int:
    return layout.size("tp") if "ep" in layout.option("tp") else 1


def _stride(layout: Layout, axis: str) -> int:
    stride = 1
    for name, size in reversed(layout.sizes):
        if name == axis:
            return stride
        stride *= size
    return stride
