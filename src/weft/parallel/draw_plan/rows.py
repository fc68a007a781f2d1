"""What a picture of a Plan shows, row by row: the tensors that cross the edge of a module, and the
slices of weights that each rank computes with. Read from the Steps alone.

Rows stand in the order of the model's parameters. Blocks whose rows are the same are one panel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from math import inf

from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from weft.core import (
    COPY,
    SUM,
    Boundary,
    ConfigError,
    DimShard,
    Param,
    Plan,
    Step,
    collective,
    is_inside,
)

DRAWN = 8  # ranks at most
SPLIT, NOTHING = "split", "identity"


def is_exchange(done: str) -> bool:
    """Whether ranks need each other for what is `done` at an edge."""
    return done not in (SPLIT, NOTHING)


@dataclass(frozen=True)
class EdgeCrossing:
    """A tensor that enters or leaves a module on one axis, and what is done to it and to its
    gradient. `letter`: f or g of Megatron-LM, where it is one of them. `before`, `after`: how the
    tensor lies in forward."""

    module: str
    axis: str
    enters: bool
    letter: str
    forward: str
    backward: str
    before: str
    after: str


@dataclass(frozen=True)
class HeldSlices:
    """What each rank computes with of one weight.

    `cut`: columns (of the outputs of a linear), rows (of its inputs, or of a table), or the dim;
    empty where it is not cut. `dim`: that is cut. `spans`: lane -> the share of the dim from where
    to where, several if the weight is several side by side. `said`: lane -> the same in words.
    `summed`: backward leaves partial sums, which are added over the ranks. `stored_whole`: each
    rank stores all of it.
    """

    weight: str
    shape: tuple[int, ...]
    cut: str
    dim: int
    spans: tuple[tuple[tuple[float, float], ...], ...]
    said: tuple[str, ...]
    summed: bool
    stored_whole: bool


PlanRow = EdgeCrossing | HeldSlices


@dataclass(frozen=True)
class PlanPanel:
    """Rows of one block, or of what is outside of blocks. `modules`: the blocks that have just
    these rows, which have names within their block."""

    modules: tuple[str, ...]
    rows: tuple[PlanRow, ...]


@dataclass(frozen=True)
class PlanRows:
    """All that a picture of a Plan shows. `lanes`: a rank each, or, of several groups of ranks on
    these axes, the positions within a group. `staged`: each group holds its stages alone."""

    layout: str
    axes: tuple[str, ...]
    lanes: tuple[str, ...]
    groups: int
    staged: bool
    panels: tuple[PlanPanel, ...]

    def head(self) -> str:
        """One line: layout, axes, ranks."""
        count, axes = len(self.lanes), ", ".join(self.axes)
        if self.groups == 1:
            return f"layout {self.layout}: {count} ranks on {axes}"
        return f"layout {self.layout}: {count} positions on {axes}, in each of {self.groups} groups"

    def figures(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


def plan_rows(plan: Plan) -> PlanRows:
    """What the first ranks of the axes hold and exchange at whose edges tensors cross.

    Raises:
        ConfigError: No axis has any, or too many ranks do.
    """
    layout = plan.layout
    crossed = {
        axis
        for step in plan.steps
        for boundary in (step.input, step.output)
        if boundary is not None
        for axis in (*boundary.outside, *boundary.inside)
    }
    axes = tuple(axis for axis in layout.active_axes() if axis in crossed)
    if not axes:
        problem = "its ranks divide no layer, so there is no slice of a weight to draw"
        raise ConfigError("layout", str(layout), problem, "name one with tp, as in --layout tp2")
    ranks = layout.group_ranks(0, *axes)
    if len(ranks) > DRAWN:
        problem = f"a picture shows at most {DRAWN} ranks, and {'.'.join(axes)} has {len(ranks)}"
        raise ConfigError("layout", str(layout), problem, "draw it with fewer, as in --layout tp4")
    panels = _panels(plan, [*_ordered(plan, axes, ranks)])
    lanes = tuple(
        f"rank {rank}"
        if layout.world == len(ranks)
        else ", ".join(f"{axis} {layout.coords(rank)[axis]}" for axis in axes)
        for rank in ranks
    )
    groups, staged = layout.world // len(ranks), plan.staging is not None
    return PlanRows(str(layout), axes, lanes, groups, staged, tuple(panels))


def _ordered(plan: Plan, axes: Sequence[str], ranks: Sequence[int]) -> Iterator[PlanRow]:
    """All rows, in the order of the model's parameters. What crosses an edge stands before or
    after all that is within the module."""
    place = {weight.name: number for number, weight in enumerate(plan.weights)}
    found: list[tuple[tuple[float, int, int], PlanRow]] = []
    heads = _weights_of_heads(plan)

    def ends(module: str) -> tuple[float, float]:
        inside = [at for name, at in place.items() if name.startswith(_prefix(module))]
        return (min(inside), max(inside)) if inside else (inf, inf)  # inf: a tied head

    for number, step in enumerate(plan.steps):
        (first, last), depth = ends(step.module), len(step.module)
        if step.input is not None:
            found += [((first, 0, depth), e) for e in _crossings(step.module, step.input, True)]
        for param in step.params:
            sum_after = _sum_after(plan, step, param.axis)
            if sum_after is not None and param.cut is None:  # a bias, added once to the sum
                at, when = ends(sum_after.module)[1], 3
            else:
                own = param.name.startswith(_prefix(step.module))
                at, when = (place[param.name] if own else inf), 1
            if param.axis in axes:
                held = _slices(plan, param, _cut_name(plan, step, param), heads, ranks)
                found.append(((at, when, number), held))
        if step.output is not None:
            found += [((last, 2, -depth), e) for e in _crossings(step.module, step.output, False)]
    for _, row in sorted(found, key=lambda each: each[0]):
        if not isinstance(row, EdgeCrossing) or row.axis in axes:
            yield row


def _prefix(module: str) -> str:
    return f"{module}." if module else ""


def _crossings(module: str, boundary: Boundary, enters: bool) -> Iterator[EdgeCrossing]:
    for axis, forward, backward in boundary.moves(enters):
        inside = boundary.inside.get(axis, COPY)
        letter = "f" if enters and inside == COPY else "g" if not enters and inside == SUM else ""
        yield EdgeCrossing(
            module,
            axis,
            enters,
            letter,
            _done(*forward),
            _done(*backward),
            _lies(forward[0]),
            _lies(forward[1]),
        )


def _done(src: Placement, dst: Placement) -> str:
    name = collective(src, dst)
    if name is not None:
        return name.replace("_", "-")
    return SPLIT if isinstance(dst, Shard) and src != dst else NOTHING


def _lies(placement: Placement) -> str:
    if isinstance(placement, Shard):
        return "last dim cut" if placement.dim == -1 else f"dim {placement.dim} cut"
    return "whole" if placement == COPY else "partial sums"


def _weights_of_heads(plan: Plan) -> frozenset[str]:
    """Parameters that are cut between heads: those from an entry that divides heads to the sum
    after it."""
    found, inside, within = set[str](), False, ""
    for step in plan.steps:
        if step.activation_sharding is not None:
            inside = step.activation_sharding == "heads"
            within = step.module if step.output is not None else ""
        if inside and is_inside(step.module, within):
            found |= {param.name for param in step.params if param.cut is not None}
        if step.output is not None and step.input is None:
            inside = False
    return frozenset(found)


def _cut_name(plan: Plan, step: Step, param: Param) -> str:
    """Whether a weight is cut by columns or by rows.

    What a linear by rows, or a table, gives is a partial sum. Where the sum is that of a module
    which multiplies by several weights itself, their dims tell: torch stores a linear's outputs
    first.
    """
    cut, shape = param.cut, _shape(plan, param)
    if cut is None:
        return ""
    if len(shape) != 2:
        return f"dim {cut.dim}"
    sum_after = _sum_after(plan, step, param.axis)
    if sum_after is not None and sum_after.input is not None:
        return "columns" if cut.dim == 0 else "rows"
    return "columns" if sum_after is None else "rows"


def _sum_after(plan: Plan, step: Step, axis: str) -> Step | None:
    """The Step at whose edge the partial sums of this module are added: its own, or that of a
    module around it that all of its tensors enter and leave by."""

    def sums(one: Step) -> bool:
        return one.output is not None and one.output.inside.get(axis) == SUM

    if sums(step):
        return step
    around = (s for s in plan.steps if s.input is not None and sums(s))
    return next((s for s in around if is_inside(step.module, s.module)), None)


def _shape(plan: Plan, param: Param) -> tuple[int, ...]:
    return next(weight.shape for weight in plan.weights if weight.name == param.name)


def _slices(
    plan: Plan, param: Param, cut_name: str, heads: frozenset[str], ranks: Sequence[int]
) -> HeldSlices:
    shape, cut = _shape(plan, param), param.cut
    spans: list[tuple[tuple[float, float], ...]] = []
    said: list[str] = []
    for rank in ranks:
        index, size = plan.layout.index(rank, param.axis), plan.layout.size(param.axis)
        if cut is None:
            spans.append(((0.0, 1.0),))
            said.append("whole")
            continue
        total, held = sum(cut.parts), cut.intervals(index, size)
        spans.append(tuple((start / total, stop / total) for start, stop in held))
        said.append(_in_words(cut, held, param.name in heads))
    return HeldSlices(
        param.name,
        shape,
        cut_name,
        0 if cut is None else cut.dim,
        tuple(spans),
        tuple(said),
        param.grad == SUM,
        param.stored == COPY,
    )


def _in_words(cut: DimShard, held: Sequence[tuple[int, int]], heads: bool) -> str:
    if not heads:
        return ", ".join(f"{start}:{stop}" for start, stop in held)
    found, offset = [], 0
    for (start, stop), length, units in zip(held, cut.parts, cut.units, strict=True):
        width = length // units
        first, last = (start - offset) // width, (stop - offset) // width - 1
        found.append(f"head {first}" if first >= last else f"heads {first}-{last}")
        offset += length
    return ", ".join(dict.fromkeys(found))


def _panels(plan: Plan, rows: Sequence[PlanRow]) -> Iterator[PlanPanel]:
    """Rows of a block together; a block at whose own edge something crosses has that apart."""
    blocks = plan.blocks

    def home(row: PlanRow) -> str:
        name = row.module if isinstance(row, EdgeCrossing) else row.weight
        return next((b for b in blocks if name.startswith(b + ".")), "")

    held: PlanPanel | None = None
    for block, group in groupby(rows, key=home):
        if not block:
            made = PlanPanel((), tuple(group))
        else:
            made = PlanPanel((block,), tuple(_within(block, row) for row in group))
        if held is not None and block and held.rows == made.rows:
            held = replace(held, modules=(*held.modules, block))
            continue
        if held is not None:
            yield held
        held = made
    if held is not None:
        yield held


def _within(block: str, row: PlanRow) -> PlanRow:
    if isinstance(row, EdgeCrossing):
        return replace(row, module=row.module.removeprefix(block + "."))
    return replace(row, weight=row.weight.removeprefix(block + "."))
