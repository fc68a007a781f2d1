"""Every layout of a number of ranks that a run can use."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from weft.core import Layout, Refusal, RunConfig
from weft.parallel import allowed_options, registry
from weft.train import build_dataset, build_skeleton, plan_without_weights, with_layout


def runnable_layouts(
    run: RunConfig, world: int, refused: Callable[[str, Refusal], None]
) -> list[str]:
    """Find the layouts of `world` ranks, with at most one option per axis, that the run can use.

    `refused` is called with each other layout and the reason. Raises Refusal if there is no layout
    left.
    """
    bare, train, choices = build_skeleton(run), build_dataset(run), []
    for axis in registry():
        options = ["", *(f"+{option}" for option in allowed_options(axis))]
        sizes = [size for size in range(2, world + 1) if world % size == 0]
        choices.append(["", *(f"{axis}{size}{option}" for size in sizes for option in options)])
    found, last = [], None
    for chosen in itertools.product(*choices):
        layout = Layout.parse(".".join(filter(None, chosen)) or "dp1")
        if layout.world != world:
            continue
        try:
            plan_without_weights(with_layout(run, layout), bare, train)
            found.append(str(layout))
        except Refusal as error:
            last = error
            refused(str(layout), error)
    if last is not None and not found:
        raise last
    return found
