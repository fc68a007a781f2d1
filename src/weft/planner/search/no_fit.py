"""Why a search finds nothing that fits, by how much the nearest layout misses, and what would
help."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from weft.core import ConfigError, LayoutError
from weft.parallel import (
    axis_with_option,
)

from ..cost.hardware import GIB, Cluster
from ..cost.layout_batch import AXES
from .candidates import divisors, find_candidates, refusal
from .explain import describe_row
from .layout_pattern import LayoutPattern
from .query import PlanQuery
from .query_from_run import plain_layout
from .ranking import Ranking, priced_best

MORE = (2, 4, 8, 16, 32, 64)  # times as many devices, where none fits


def no_candidates(
    question: PlanQuery,
    pattern: LayoutPattern,
    field: str = "--layout",
    more: Mapping[str, Any] | None = None,
) -> LayoutError:
    """The rules allow no choice of a pattern. `more` columns that they are asked of."""
    one = dict.fromkeys(AXES, 1) | {"chunks": 1} | dict(more or {})
    named = plain_layout(pattern.layout).sizes if pattern.exact else pattern.sizes
    sizes = {axis: size for axis, size in named if size is not None}
    devices = question.cluster.devices
    if math.prod(sizes.values()) > devices:
        problem = f"{math.prod(sizes.values())} ranks are more than {devices} devices"
        return LayoutError(field, pattern.text, problem, "use smaller sizes, or a larger cluster")
    problem = refusal(one | sizes, question) or (
        "the rules of the search allow no layout of this pattern"
    )
    allowed = [
        f"{axis}{size}"
        for axis in sizes
        for size in divisors(devices)
        if size > 1 and not refusal(one | {axis: size}, question)
    ]
    return LayoutError(
        field, pattern.text, problem, f"sizes that work: {', '.join(allowed) or 'none'}"
    )


def nothing_fits(
    question: PlanQuery, pattern: LayoutPattern, found: Ranking, limit_gib: float | None = None
) -> ConfigError:
    """Nothing fits: by how much the best misses, and what would help. `limit_gib`: what was allowed
    of a device."""
    nearest = found.rows[0]
    device, gib = question.cluster.hardware.device, nearest.held_bytes / GIB
    problem = (
        f"no layout fits: {describe_row(nearest)}, the nearest, takes {gib:,.1f} GiB of"
        f" {device.memory_gib:g}, {nearest.over_bytes / GIB:,.1f} too many"
    )
    helps = []
    axis = axis_with_option("offload")
    if not pattern.given(axis) and (pattern.more or axis in dict(pattern.sizes)):
        sizes = pattern.sizes if axis in dict(pattern.sizes) else (*pattern.sizes, (axis, None))
        away = replace(pattern, sizes=sizes, options=(*pattern.options, (axis, "offload")))
        row = priced_best(question, find_candidates(question, found.devices, away))
        if row is not None and row.fits:
            helps.append(f'--layout "{row.layout}.*" fits')
    most = question.cluster.hardware.tiers[-1].devices or math.inf
    for times in MORE:
        if times * found.devices > most:
            break
        larger = _on(question, times * found.devices)
        row = priced_best(larger, find_candidates(larger, larger.cluster.devices, pattern))
        if row is not None and row.fits:
            helps.append(f"{larger.cluster.devices} devices would do, with {row.layout}")
            break
    more = "use devices with more memory" if limit_gib is None else "allow more memory"
    fix = "; ".join(helps) or f"{more}, shorter samples, or a smaller model"
    if limit_gib is not None:
        return ConfigError("--max-memory", limit_gib, problem, fix)
    return ConfigError("--cluster", str(question.cluster), problem, fix)


def _on(question: PlanQuery, devices: int) -> PlanQuery:
    """The same on so many devices. Raises ConfigError."""
    return replace(question, cluster=Cluster.of(question.cluster.hardware, devices))
