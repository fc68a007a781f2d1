"""The layout of a run that continues on fewer ranks. Batch, microbatches, seed and order of data
stay the same, and so do the losses."""

from __future__ import annotations

import math
from collections.abc import Iterator

from weft.core import REPLICA_AXIS, Divides, Layout, LayoutError, Refusal, RunConfig
from weft.parallel import DATA_AXES, SEQUENCE_AXES, axis_table

from . import build, build_data, run_checks

GROWTH = 1.5  # what a rank may have to spare of memory; no more than a guess
COPIES = (REPLICA_AXIS, *SEQUENCE_AXES)  # whose ranks hold the same weights


def shrink_to(run: RunConfig, ranks: int) -> RunConfig:
    """The run on a layout of at most `ranks` ranks; the other ranks are spares.

    The layout is the run's own if it fits, else the first of `layout.elastic` that fits, else, if
    that is no list, the best one with the same axes. Raises LayoutError if none fits.
    """
    layout, named = run.layout.axes, run.layout.elastic
    if layout.world <= ranks:
        return run
    candidates = smaller_layouts(layout, ranks) if isinstance(named, bool) else named
    bare, train, refused = build.build_skeleton(run), build_data.build_dataset(run), None
    for candidate in candidates:
        there = build.on_own_layout(run, candidate)
        parts = run.train.accumulate * candidate.size(*DATA_AXES)
        if candidate.world > ranks or (run.train.batch % parts and candidate.world > 1):
            continue
        try:
            run_checks.plan_without_weights(there, bare, train)
            return there
        except Refusal as error:
            refused = refused or error
    problem = f"no layout of at most {ranks} ranks can take its place" + (
        f" ({refused})" if refused else ""
    )
    fix = (
        "use a batch that more numbers of ranks divide, or name layouts in layout.elastic, as in"
        ' ["dp3.tp2"]'
    )
    raise LayoutError("layout.axes", str(layout), problem, fix)


def smaller_layouts(layout: Layout, ranks: int) -> Iterator[Layout]:
    """Layouts of the same axes with at most so many ranks, best first: none whose ranks hold over
    GROWTH times as much of the model; then most ranks; then fewest axes changed that cut the model,
    and these least; then data axes least. Those that cut tensors go down to a divisor, so that what
    they divided they divide still."""
    table = axis_table().traits
    axes, sizes = layout.axes, [size for _, size in layout.sizes]

    def choices(axis: str, size: int) -> list[int]:
        if table[axis].shrinks_freely:
            return [*range(1, ranks + 1)]
        stages = Divides.STAGES in table[axis].divides
        return [n for n in range(1, size + 1) if stages or size % n == 0]

    def rank(found: tuple[int, ...]) -> tuple[float, ...]:
        far = [abs(math.log(now / was)) for now, was in zip(found, sizes)]
        cuts = [d for axis, d in zip(axes, far) if axis not in DATA_AXES]
        grown = math.prod(
            was / now for axis, now, was in zip(axes, found, sizes) if axis not in COPIES
        )
        return grown > GROWTH, -math.prod(found), sum(d > 0 for d in cuts), sum(cuts), sum(far)

    every = _products([choices(axis, size) for axis, size in layout.sizes], ranks)
    for found in sorted(every, key=rank):
        live = tuple((axis, size) for axis, size in zip(axes, found) if size > 1)
        kept = {axis for axis, _ in live}
        options = tuple((a, o) for a, o in layout.options if a in kept)
        yield Layout(live, options) if live else Layout.single()


def _products(choices: list[list[int]], most: int) -> Iterator[tuple[int, ...]]:
    """One of each list, with a product of at most so much."""
    if not choices:
        yield ()
        return
    for first in choices[0]:
        for others in _products(choices[1:], most // first) if first <= most else ():
            yield first, *others
