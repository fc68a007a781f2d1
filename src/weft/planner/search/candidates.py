"""All layouts that the constraints allow, each with microbatches, recomputation and schedule, as
arrays.

Columns are crossed one after the other, and rows are dropped as soon as a rule that they break has
its columns.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from weft.core import (
    EXPERTS_OPTION,
    STAGE_AXIS,
    Layout,
)
from weft.parallel import (
    DATA_AXES,
    SPREADING,
    STATE_AXES,
    axis_table,
    axis_with_option,
)
from weft.pipeline import schedules

from ..cost.layout_batch import AXES, Array, LayoutBatch
from .constraints import (
    CONVENTIONS,
    LEGAL,
    SCHEDULES,
    STAGES,
    Constraint,
    axis_product,
    expert_ranks,
)
from .layout_pattern import ANY, LayoutPattern
from .query import PlanQuery

RECOMPUTE: tuple[tuple[float, bool], ...] = (
    (0.0, False),
    (0.0, True),
    (1.0, False),
    (1 / 2, False),
    (1 / 3, False),
)
MOST_CHUNKS = 16  # stages of a rank
WITH_CHUNKS = tuple(
    name
    for name in SCHEDULES
    if "chunks" in inspect.signature(schedules.builtin_schedules()[name]).parameters
)


@dataclass(frozen=True)
class Candidates:
    """`choices`, and of each the axes that spread experts too: bit i of `spread` is axis i of
    SPREADING. `conventions`: those that left others out; `recomputed`: globs of the modules that
    run again, where they are named."""

    choices: LayoutBatch
    spread: Array
    conventions: frozenset[str] = frozenset()
    recomputed: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.choices)

    def take(self, index: Array) -> Candidates:
        """Those at these places, or where this mask is true."""
        return replace(self, choices=self.choices.take(index), spread=self.spread[index])

    def layout(self, index: int) -> Layout:
        """Of one: axes and their options, less the schedule."""
        c = self.choices
        order = sorted(AXES, key=lambda axis: -c.strides[axis][index])
        live = [(axis, int(c.sizes[axis][index])) for axis in order if c.sizes[axis][index] > 1]
        options: list[tuple[str, str]] = []
        if c.zero[index] != 3:
            options.append((STATE_AXES[0], f"zero{c.zero[index]}"))
        if c.offload[index]:
            options.append((axis_with_option("offload"), "offload"))
        if c.sequence[index]:
            options.append((axis_with_option("sequence"), "sequence"))
        if c.gather[index]:
            options.append((axis_with_option("gather"), "gather"))
        options += [
            (axis, EXPERTS_OPTION)
            for bit, axis in enumerate(SPREADING)
            if self.spread[index] >> bit & 1
        ]
        return Layout(tuple(live) or Layout.single().sizes, tuple(options))

    def recompute(self, index: int) -> str | int | tuple[str, ...]:
        """Of one: as [train] has it."""
        if self.recomputed:
            return self.recomputed
        if self.choices.selective[index]:
            return "selective"
        again = float(self.choices.again[index])
        return "none" if again == 0 else "full" if again == 1 else round(1 / again)

    def schedule(self, index: int) -> tuple[str, dict[str, int]]:
        """Of one: a schedule's name and options; no name where there is one stage."""
        c = self.choices
        if c.stage_ranks[index] == 1:
            return "", {}
        name = c.schedules[int(c.schedule[index])]
        return name, {"chunks": int(c.chunks[index])} if name in WITH_CHUNKS else {}

    @cached_property
    def kinds(self) -> Array:
        """A number for each: the same for those of one layout."""
        c = self.choices
        columns = [
            *(c.sizes[axis] for axis in AXES),
            c.zero,
            c.offload.astype(np.int64),
            c.sequence.astype(np.int64),
            c.gather.astype(np.int64),
            self.spread,
        ]
        return number_rows(columns)


def number_rows(columns: Iterable[Array]) -> Array:
    """A number for each row of these columns of equal length, whose entries are small and not
    negative: the same for equal rows."""
    numbers, count = np.zeros((), dtype=np.int64), 1
    for column in columns:
        present = np.zeros(int(column.max(initial=0)) + 1, dtype=bool)
        present[column] = True
        values = int(present.sum())
        if count * values > np.iinfo(np.int64).max:
            distinct, numbers = np.unique(numbers, return_inverse=True)
            count = len(distinct)
        place = np.cumsum(present) - 1
        numbers, count = numbers * values + place[column], count * values
    return numbers


def join_candidates(parts: Sequence[Candidates]) -> Candidates:
    """All of these, one after the other."""
    conventions = frozenset[str]().union(*(part.conventions for part in parts))
    spread = np.concatenate([part.spread for part in parts])
    return Candidates(LayoutBatch.joined([part.choices for part in parts]), spread, conventions)


# ---- enumerating ---------------------------------------------------------------------------------


class _Table:
    """Columns of equal length."""

    def __init__(self, question: PlanQuery, rules: Iterable[Constraint]):
        self.columns: dict[str, Array] = {}
        self.question, self.rules, self.conventions = question, tuple(rules), set[str]()

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()))) if self.columns else 1

    def cross(self, new: Mapping[str, Array]) -> None:
        """Every row with every entry of these columns, which are of equal length; then what the
        rules leave."""
        count, rows = len(next(iter(new.values()))), len(self)
        self.columns = {name: np.repeat(column, count) for name, column in self.columns.items()}
        self.columns |= {name: np.tile(column, rows) for name, column in new.items()}
        self.held(new)

    def keep(self, mask: Array) -> None:
        self.columns = {name: column[mask] for name, column in self.columns.items()}

    def held(self, new: Iterable[str]) -> None:
        """Drop the rows that break a rule which could not be asked before there were these
        columns."""
        for rule in self.rules:
            if set(rule.needs) & set(new) and set(rule.needs) <= set(self.columns):
                mask = np.asarray(rule.holds(self.columns, self.question))
                if not mask.all():
                    self.keep(np.broadcast_to(mask, len(self)))
                    self.conventions |= (
                        {rule.reason({}, self.question)} if rule in CONVENTIONS else set()
                    )


def constraints_for(pattern: LayoutPattern, exhaustive: bool) -> tuple[Constraint, ...]:
    """Those that a search asks. Habits are not asked of an axis whose size is given, of an option
    that is, and of none where it is `exhaustive`."""

    def given(about: str) -> bool:
        axis, _, option = about.partition("+")
        return pattern.fixes(axis) or option in pattern.given(axis)

    return (*LEGAL, *(rule for rule in CONVENTIONS if not (exhaustive or given(rule.about))))


def find_candidates(
    question: PlanQuery, devices: int, pattern: LayoutPattern = ANY, exhaustive: bool = False
) -> Candidates:
    """All that the rules allow of a pattern on so many devices, pipelines with the schedule that
    the pattern names, or 1F1B, which needs the least memory: `scheduled` gives the others."""
    table = _Table(question, constraints_for(pattern, exhaustive))
    fit = divisors(devices)
    # axes that divide the model before those that divide the batch, the innermost first
    table_of = axis_table().traits
    order = sorted(AXES, key=lambda axis: (axis in DATA_AXES, -table_of[axis].order))
    for axis in order:
        table.cross({axis: np.array(pattern.of(axis, fit, exhaustive), dtype=np.int64)})
        ranks = np.prod([table.columns[a] for a in AXES if a in table.columns], axis=0)
        table.keep(ranks == devices if axis == order[-1] else devices % ranks == 0)
    written = [option for _, option in pattern.options]
    levels = [int(option[4:]) for option in written if option.startswith("zero")]
    sequence = [True] if "sequence" in written else [False, True]
    asked = sum(
        1 << bit for bit, axis in enumerate(SPREADING) if (axis, EXPERTS_OPTION) in pattern.options
    )
    folds = [bits for bits in range(1 << len(SPREADING)) if bits & asked == asked]
    if not any(block.experts for block in question.work.blocks):
        folds = [asked]
    elif not exhaustive:
        folds = [bits for bits in folds if bits == asked or bits.bit_count() <= 2]
    table.cross({"sequence": np.array(sequence)})
    method_axis = axis_with_option("gather")
    methods = [
        option == "gather" for option in pattern.given(method_axis) if option != EXPERTS_OPTION
    ]
    table.cross({"gather": np.array(methods or [False, True])})
    table.keep((table.columns[method_axis] > 1) | ~table.columns["gather"])
    table.cross({"spread": np.array(folds)})
    offload = "offload" in written
    table.cross(
        {"zero": np.repeat(levels or [1, 2, 3], 1), "offload": np.repeat(offload, len(levels) or 3)}
    )
    if not levels and offload:  # what a pattern asks for is not dropped for what it does not name
        table.keep(axis_product(table.columns, *STATE_AXES) > 1)
    _add_microbatches(table)
    return _add_schedules(table, pattern.given(STAGE_AXIS) or SCHEDULES[:1])


def with_schedules(
    found: Candidates, question: PlanQuery, pattern: LayoutPattern = ANY, exhaustive: bool = False
) -> Candidates:
    """The pipelines among these, with every other schedule that the rules allow."""
    table = _Table(question, constraints_for(pattern, exhaustive))
    table.columns = _columns(found)
    table.keep(found.choices.stage_ranks > 1)
    return _add_schedules(table, [] if pattern.given(STAGE_AXIS) else SCHEDULES[1:])


def layout_variants(
    one: Candidates, question: PlanQuery, schedules: Sequence[tuple[str, int]]
) -> Candidates:
    """One layout as it is, with every number of microbatches and all recomputation that the rules
    allow, and each of these schedules with so many stages of a rank."""
    table = _Table(question, LEGAL)
    open_ = ("microbatch", "accumulate", "again", "selective")
    table.columns = {name: column for name, column in _columns(one).items() if name not in open_}
    table.held(tuple(table.columns))
    _add_microbatches(table)
    known = tuple(dict.fromkeys(name for name, _ in schedules))
    _with_schedules(table, [(known.index(name), chunks) for name, chunks in schedules])
    c = table.columns
    same = one.take(np.zeros(len(table), dtype=np.int64))
    chosen: Any = {name: c[name] for name in (*open_, "schedule")}
    chunks = np.where(c[STAGE_AXIS] > 1, c["chunks"], 1)
    laid = replace(same.choices, schedules=known, chunks=chunks, **chosen)
    return replace(same, choices=laid, recomputed=())


def schedule_variants(names: Iterable[str]) -> list[tuple[str, int]]:
    """Each of these schedules with the numbers of stages of a rank that it may have."""
    several = range(2, MOST_CHUNKS + 1)
    return [
        (name, chunks)
        for name in names
        for chunks in (several if name in WITH_CHUNKS else (STAGES[name],))
    ]


def _columns(found: Candidates) -> dict[str, Array]:
    """All that rules ask of a choice, less its schedule."""
    c = found.choices
    names = (
        "zero",
        "offload",
        "sequence",
        "gather",
        "microbatch",
        "accumulate",
        "again",
        "selective",
    )
    return {**c.sizes, **{name: getattr(c, name) for name in names}, "spread": found.spread}


def _add_microbatches(table: _Table) -> None:
    """Rows with every number of microbatches, and all recomputation."""
    table.cross({"microbatch": np.array(divisors(table.question.batch), dtype=np.int64)})
    data = np.prod([table.columns[axis] for axis in DATA_AXES], axis=0)
    table.columns["accumulate"] = table.question.batch // (data * table.columns["microbatch"])
    table.held(["accumulate"])
    again, selective = zip(*RECOMPUTE)
    table.cross({"again": np.array(again), "selective": np.array(selective)})


def _with_schedules(table: _Table, pairs: Sequence[tuple[int, int]]) -> None:
    """Rows with each of these schedules and stages of a rank: where there are several, as far as
    they are sensible."""
    depth = table.question.work.depth
    kinds, chunks = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    table.cross({"schedule": kinds, "chunks": chunks})
    c = table.columns
    even = (
        (depth % (c[STAGE_AXIS] * c["chunks"]) == 0)
        | (c["chunks"] & (c["chunks"] - 1) == 0)
        | (len(pairs) == 1)
    )
    first = (c["schedule"] == pairs[0][0]) & (c["chunks"] == pairs[0][1]) if pairs else even
    table.keep(np.where(c[STAGE_AXIS] > 1, even, first))


def _add_schedules(table: _Table, names: Sequence[str]) -> Candidates:
    """Rows with each of these schedules."""
    _with_schedules(
        table, [(SCHEDULES.index(name), chunks) for name, chunks in schedule_variants(names)]
    )
    c = table.columns
    ranks, strides = np.ones(len(table), dtype=np.int64), {}
    for axis in reversed(AXES):
        strides[axis], ranks = ranks, ranks * c[axis]
    choices = LayoutBatch(
        sizes={axis: c[axis] for axis in AXES},
        strides=strides,
        experts=expert_ranks(c, of_features=False),
        sequence=c["sequence"],
        gather=c["gather"],
        zero=c["zero"],
        shards=axis_product(c, *STATE_AXES),
        offload=c["offload"],
        schedule=c["schedule"],
        schedules=SCHEDULES,
        chunks=np.where(c[STAGE_AXIS] > 1, c["chunks"], 1),
        microbatch=c["microbatch"],
        accumulate=c["accumulate"],
        again=c["again"],
        selective=c["selective"],
    )
    return Candidates(choices, c["spread"], frozenset(table.conventions))


def fewer_devices(
    question: PlanQuery, pattern: LayoutPattern, devices: int, most: int
) -> list[int]:
    """The largest numbers of ranks below this that are products of sizes which the rules allow
    alone, and of these the largest that fills nodes."""
    none, node = dict.fromkeys(AXES, 1) | {"chunks": 1}, question.cluster.hardware.node
    found = {1}
    for axis in AXES:
        sizes = [size for size in pattern.of(axis, list(range(1, devices + 1))) if size <= devices]
        allowed = _allowed_sizes(none, axis, np.array(sizes, dtype=np.int64), question)
        found = {ranks * size for ranks in found for size in allowed if ranks * size < devices}
    ordered = sorted(found, reverse=True)
    full = [count for count in ordered if count % node == 0]
    return sorted({*ordered[:most], *full[:1]}, reverse=True)


def _allowed_sizes(
    none: Mapping[str, int], axis: str, sizes: Array, question: PlanQuery
) -> list[int]:
    """Those of these sizes that no rule forbids alone."""
    columns = {name: np.full(len(sizes), value) for name, value in none.items()} | {axis: sizes}
    mask = np.ones(len(sizes), dtype=bool)
    for rule in LEGAL:
        if set(rule.needs) <= set(columns):
            mask &= np.broadcast_to(np.asarray(rule.holds(columns, question)), len(sizes))
    return sizes[mask].tolist()


def divisors(number: int) -> list[int]:
    """From 1 to the number itself."""
    found = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*found, *(number // n for n in found)})


# ---- what was left out ---------------------------------------------------------------------------


@dataclass(frozen=True)
class LeftOut:
    """Sizes of one axis that one rule does not allow alone; `why`, of the first."""

    axis: str
    sizes: tuple[int, ...]
    why: str


def find_left_out(question: PlanQuery, devices: int, pattern: LayoutPattern = ANY) -> list[LeftOut]:
    """What no layout of so many devices can have."""
    found: dict[tuple[str, Constraint], list[int]] = {}
    for axis in AXES:
        for size in pattern.of(axis, divisors(devices)):
            rule = (
                first_broken(dict.fromkeys(AXES, 1) | {axis: size}, question) if size > 1 else None
            )
            if rule is not None:
                found.setdefault((axis, rule), []).append(size)
    return [
        LeftOut(
            axis, tuple(sizes), rule.reason(dict.fromkeys(AXES, 1) | {axis: sizes[0]}, question)
        )
        for (axis, rule), sizes in found.items()
    ]


def first_broken(row: Mapping[str, Any], question: PlanQuery) -> Constraint | None:
    """The first rule that does not allow what these columns say of one choice."""
    arrays = {name: np.array([value]) for name, value in row.items()}
    asked = (rule for rule in LEGAL if set(rule.needs) <= set(row))
    return next((rule for rule in asked if not np.all(rule.holds(arrays, question))), None)


def refusal(row: Mapping[str, Any], question: PlanQuery) -> str:
    """Why the rules do not allow it; empty if they do."""
    rule = first_broken(row, question)
    return rule.reason(row, question) if rule is not None else ""
