"""The same run on more devices, replica by replica: weak scaling (as many samples for each) or
strong (as many in all). As the estimate prices them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from weft.core import (
    REPLICA_AXIS,
    ConfigError,
)

from ..cost.breakdown import waits_for
from ..cost.layout_batch import AXES, Array
from .scenario import Scenario

Mode = Literal["weak", "strong"]


@dataclass(frozen=True)
class ScalingPoint:
    """`batch` samples a step. `efficiency`: tokens per second and device over those of the first
    point. `exposed`: the share of a step that is messages which nothing hides."""

    devices: int
    dp: int
    batch: float
    step_s: float
    tokens_per_s: float
    mfu: float
    exposed: float
    efficiency: float


def scaling_curve(setup: Scenario, mode: Mode, to: int) -> list[ScalingPoint]:
    """From the setup's own number of devices on, twice as many each time, to at most `to`. Raises
    ConfigError."""
    if to < setup.devices:
        raise ConfigError(
            "--to", to, f"is fewer than the {setup.devices} devices of {setup.name}", "name more"
        )
    found: list[ScalingPoint] = []
    times = 1
    while setup.devices * times <= to:
        larger = scale_up(setup, mode, times)
        if larger is None:
            break
        priced = larger.estimate()
        speed, step = float(priced.tokens_per_s[0]), float(priced.step_s[0])
        exposed = sum(float(part.value[0]) for part in priced.time if waits_for(part.name))
        first = found[0] if found else None
        each = speed / larger.devices
        efficiency = each / (first.tokens_per_s / first.devices) if first else 1.0
        found.append(
            ScalingPoint(
                larger.devices,
                larger.size(REPLICA_AXIS),
                float(larger.choices.batch[0]),
                step,
                speed,
                float(priced.mfu[0]),
                exposed / step,
                efficiency,
            )
        )
        times *= 2
    return found


def scale_up(setup: Scenario, mode: Mode, times: int) -> Scenario | None:
    """With so many times the replicas; None if the batch has too few samples for them."""
    one = setup.choices
    sizes = {**one.sizes, REPLICA_AXIS: one.sizes[REPLICA_AXIS] * times}
    accumulate, microbatch = one.accumulate, one.microbatch
    if mode == "strong":  # fewer microbatches, then smaller ones
        fewer = np.gcd(accumulate, times)
        accumulate, microbatch = accumulate // fewer, microbatch / (times // fewer)
        if microbatch[0] != int(microbatch[0]):
            return None
    choices = replace(
        one,
        sizes=sizes,
        strides=_strides(one.sizes, one.strides, times),
        accumulate=accumulate,
        microbatch=microbatch,
    )
    cluster = setup.cluster.model_copy(update={"devices": setup.devices * times})
    return replace(setup, choices=choices, cluster=cluster)


def _strides(
    sizes: Mapping[str, Array], strides: Mapping[str, Array], times: int
) -> dict[str, Array]:
    """Axes outside of dp are further apart then."""
    inner = strides[REPLICA_AXIS] * sizes[REPLICA_AXIS]
    return {
        axis: strides[axis] * np.where((axis != REPLICA_AXIS) & (strides[axis] >= inner), times, 1)
        for axis in AXES
    }
