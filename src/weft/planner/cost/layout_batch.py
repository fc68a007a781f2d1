"""Many layouts as arrays, one entry each, so that a formula prices all of them at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import prod
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from weft.core import (
    DEFAULT_SCHEDULE,
    EXPERTS,
    REPLICA_AXIS,
    STAGE_AXIS,
    Layout,
)
from weft.parallel import (
    DATA_AXES,
    FEATURE_AXES,
    SEQUENCE_AXES,
    STATE_AXES,
    VOCABULARY_AXES,
    axis_table,
)

Array = NDArray[Any]
AXES = axis_table().names  # outermost first, where nothing else is asked for


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
        return self.size(*AXES)

    @property
    def batch(self) -> Array:
        """Samples of a step, of all ranks."""
        return self.microbatch * self.accumulate * self.size(*DATA_AXES)

    def size(self, *axes: str) -> Array:
        """Product of the sizes of these axes."""
        if axes not in self._products:
            self._products[axes] = np.prod([self.sizes[axis] for axis in axes], axis=0)
        return self._products[axes]

    @cached_property
    def _products(self) -> dict[tuple[str, ...], Array]:
        """Of axes that were asked for: what is priced asks for the same ones again and again."""
        return {}

    @property
    def replicas(self) -> Array:
        """Number of replicas."""
        return self.sizes[REPLICA_AXIS]

    @property
    def stage_ranks(self) -> Array:
        """Ranks of a pipeline."""
        return self.sizes[STAGE_AXIS]

    @property
    def feature_ranks(self) -> Array:
        """Ranks that divide heads and features."""
        return self.size(*FEATURE_AXES)

    @property
    def vocabulary_ranks(self) -> Array:
        """Ranks that divide the vocabulary."""
        return self.size(*VOCABULARY_AXES)

    @property
    def state_ranks(self) -> Array:
        """Ranks over which parameters, gradients and optimizer state are sharded."""
        return self.size(*STATE_AXES)

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
        recompute: str | int | float | Sequence[str | int | float] = "none",
        schedule: str | Sequence[str] = DEFAULT_SCHEDULE,
        chunks: int | Sequence[int] = 1,
    ) -> Self:
        """These layouts, each with the rest of its choice: one value for all, or one for each.
        `recompute`: as [train] has it, or a share of the repeated blocks."""
        count = len(layouts)

        def each(value: Any) -> list[Any]:
            return list(value) if isinstance(value, list | tuple | np.ndarray) else [value] * count

        sizes = {a: np.array([one.size(a) for one in layouts]) for a in AXES}
        strides = {a: np.array([_stride(one, a) for one in layouts]) for a in AXES}
        names = each(schedule)
        known = tuple(dict.fromkeys(names))
        levels = [
            [int(o[4:]) for _, o in one.options if o.startswith("zero")] or [3] for one in layouts
        ]
        parts, modes = np.array(each(accumulate)), each(recompute)
        return cls(
            sizes,
            strides,
            experts=np.array([one.size(EXPERTS) // _expert_feature_ranks(one) for one in layouts]),
            sequence=np.array([one.has_option("sequence") for one in layouts]),
            gather=np.array([one.has_option("gather") for one in layouts]),
            zero=np.array([level[0] for level in levels]),
            shards=np.prod([sizes[axis] for axis in STATE_AXES], axis=0),
            offload=np.array([one.has_option("offload") for one in layouts]),
            schedule=np.array([known.index(name) for name in names]),
            schedules=known,
            chunks=np.array(each(chunks)),
            microbatch=batch / (parts * np.prod([sizes[a] for a in DATA_AXES], axis=0)),
            accumulate=parts,
            again=np.array(
                [
                    1 / mode
                    if isinstance(mode, int)
                    else mode
                    if isinstance(mode, float)
                    else float(mode == "full")
                    for mode in modes
                ]
            ),
            selective=np.array([mode == "selective" for mode in modes]),
        )


def _expert_feature_ranks(layout: Layout) -> int:
    """Ranks that would divide features, and spread experts in place of it."""
    return prod(layout.size(axis) for axis in FEATURE_AXES if layout.spreads_experts(axis))


def _stride(layout: Layout, axis: str) -> int:
    stride = 1
    for name, size in reversed(layout.sizes):
        if name == axis:
            return stride
        stride *= size
    return stride
