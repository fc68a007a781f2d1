"""Every layout of a number of ranks that a run can use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

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
    bare, train = build_skeleton(run), build_dataset(run)
    found, last = [], None
    for text in _layouts(world, list(registry())):
        layout = Layout.parse(text or "dp1")
        try:
            plan_without_weights(with_layout(run, layout), bare, train)
            found.append(str(layout))
        except Refusal as error:
            last = error
            refused(str(layout), error)
    if last is not None and not found:
        raise last
    return found


def _layouts(world: int, axes: Sequence[str]) -> Iterator[str]:
    """Every layout of so many ranks over some of these axes, each with at most one option."""
    if world == 1:
        yield ""
        return
    for i, axis in enumerate(axes):
        for size in (size for size in range(2, world + 1) if world % size == 0):
            for option in ("", *(f"+{option}" for option in allowed_options(axis))):
                for rest in _layouts(world // size, axes[i + 1 :]):
                    yield ".".join(filter(None, (f"{axis}{size}{option}", rest)))
