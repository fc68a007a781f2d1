"""Which devices wait for one another, and how often. Devices that share a layer's work wait
within each layer, the stages of a pipeline for messages, its replicas once a step (or as
`[sync]` says)."""

from __future__ import annotations

import numpy as np

from weft.core import (
    REPLICA_AXIS,
    STAGE_AXIS,
    Divides,
)
from weft.parallel import (
    STATE_AXES,
    axis_table,
)

from ..cost.layout_batch import AXES, Array, LayoutBatch


def lockstep_axes(choices: LayoutBatch) -> tuple[str, ...]:
    """The axes whose ranks wait for one another within each layer: those that share its tensors,
    gather its weights or exchange its tokens."""
    shares = (Divides.FEATURES, Divides.VOCABULARY, Divides.POSITIONS, Divides.EXPERTS)
    found = [*axis_table().dividing(*shares)]
    if int(choices.zero[0]) >= 3:
        found += STATE_AXES
    for axis in (*STATE_AXES, REPLICA_AXIS):  # experts that are spread over more ranks than these
        if axis not in found and int(choices.size(*found)[0]) < int(choices.experts[0]):
            found.append(axis)
    return tuple(found)


def by_pipeline(choices: LayoutBatch, devices: Array) -> Array:
    """[draws, devices] values, devices in the order of ranks -> [draws, replicas, pipelines of one
    that step together, ranks of a pipeline], of those that share a layer the highest."""
    axes, within = _outer_to_inner(choices), lockstep_axes(choices)
    grid = devices.reshape([len(devices), *(int(choices.sizes[axis][0]) for axis in axes)])
    grid = grid.max(
        axis=tuple(i for i, axis in enumerate(axes, 1) if axis in within), keepdims=True
    )
    ends = [1 + axes.index(axis) for axis in (REPLICA_AXIS, STAGE_AXIS)]
    grid = grid.transpose([0, ends[0], *(i for i in range(1, grid.ndim) if i not in ends), ends[1]])
    return grid.reshape(*grid.shape[:2], -1, grid.shape[-1])


def device_coords(choices: LayoutBatch, device: int) -> dict[str, int]:
    """Position of a device on each axis."""
    return {
        axis: device // int(choices.strides[axis][0]) % int(choices.sizes[axis][0])
        for axis in _outer_to_inner(choices)
    }


def stage_of(choices: LayoutBatch) -> Array:
    """Device -> its rank in its pipeline."""
    return (
        np.arange(int(choices.world[0]))
        // int(choices.strides[STAGE_AXIS][0])
        % int(choices.sizes[STAGE_AXIS][0])
    )


def _outer_to_inner(choices: LayoutBatch) -> list[str]:
    return sorted(
        AXES, key=lambda axis: (-int(choices.strides[axis][0]), int(choices.sizes[axis][0]))
    )
