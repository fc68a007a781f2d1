"""Parts of a model that only some axes of the layout divide: found, checked, and told of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from math import prod

from torch import nn

from weft.core import (
    REPLICA_AXIS,
    ConfigError,
    Layout,
    LayoutError,
    Part,
    PartAxes,
    Step,
    Sync,
    UnsupportedModel,
    Weight,
    field_of_part,
    is_inside,
    line_of,
    nearest,
)

from .axes import FEATURE_AXES, STATE_AXES, VOCABULARY_AXES

CUTTING = tuple(dict.fromkeys((*FEATURE_AXES, *VOCABULARY_AXES)))  # by roles
DIVIDING = (*STATE_AXES, *CUTTING)  # the axes that a part can name


def find_parts(
    model: nn.Module, weights: Sequence[Weight], lines: Mapping[str, str]
) -> tuple[Part, ...]:
    """The parts that `[layout.parts]` names, in its order.

    Args:
        model: the module as written for one device.
        weights: its parameters, each once.
        lines: glob of module names -> axes, as in "fsdp", "fsdp.tp", "fsdp+tp" or "whole".

    Raises:
        ConfigError: A value does not parse, or a pattern matches nothing that is left.
        UnsupportedModel: Two parts hold one weight.
    """
    named = [name for name, _ in model.named_modules(remove_duplicate=False)] if lines else []
    owner = {name: line_of(name, lines) for name in named}
    held: dict[str, set[str]] = {}
    for weight in weights if lines else ():
        line = owner[weight.name.rpartition(".")[0]]
        for alias in weight.aliases:
            other = owner[alias.rpartition(".")[0]]
            if other != line:
                known = str(line if line is not None else other)
                raise UnsupportedModel(
                    field_of_part(known),
                    lines[known],
                    f"{weight.name} and {alias} are one tied weight, and this pattern matches"
                    " only one of the names",
                    "write a line above it that matches both modules",
                )
        if line is not None:
            held.setdefault(line, set()).add(weight.name)
    for pattern in lines:
        if pattern not in held:
            matched = any(line_of(name, [pattern]) is not None for name in named)
            problem, fix = "no module with weights has such a name", nearest(pattern, named)
            if matched:
                problem, fix = "the lines above it hold all its weights", "write it above them"
            raise ConfigError(field_of_part(pattern), lines[pattern], problem, fix)
    return tuple(
        Part(
            pattern,
            PartAxes.parse(pattern, value),
            _outermost(owner, pattern),
            frozenset(held[pattern]),
        )
        for pattern, value in lines.items()
    )


def _outermost(owner: Mapping[str, str | None], pattern: str) -> tuple[str, ...]:
    """The modules that belong to a part with all that is in them, less those inside of others."""
    mixed = {""} if len({*owner.values()}) > 1 else set()  # hold something of another part
    for name in (name for name, line in owner.items() if line != pattern):
        while name and name not in mixed:
            mixed.add(name)
            name = name.rpartition(".")[0]
    found: list[str] = []
    for name, line in owner.items():
        inside = found and is_inside(name, found[-1])  # a module comes before what is in it
        if line == pattern and name not in mixed and not inside:
            found.append(name)
    return tuple(found)


def parts_on(
    layout: Layout, parts: Iterable[Part], weights: Iterable[Weight], sync: Sync | None
) -> tuple[Part, ...]:
    """The parts, less the axes that have one rank here.

    Raises:
        LayoutError: A part names an axis that cannot divide it, or that the layout has not; or
            parts leave an axis nothing to divide.
        ConfigError: Gradients go through a synchroniser of their own.
    """
    found = []
    for part in parts:
        _check_axes(part, layout)
        if sync is not None and not sync.plain:
            problem = f"[layout.parts] works only without {sync.name} and without a codec"
            fix = "leave [sync] out, or the parts"
            raise ConfigError(field_of_part(part.pattern), str(part.placed), problem, fix)
        found.append(replace(part, placed=part.placed.within(layout)))
    elsewhere = {name for part in found for name in part.weights}
    if found and all(w.name in elsewhere for w in weights):
        for axis in layout.active_axes(*DIVIDING):
            if not any(axis in part.placed.axes for part in found):
                value = {part.pattern: str(part.placed) for part in found}
                fix = f"name {axis} in one, or leave it out of the layout"
                if axis in STATE_AXES:
                    fix = f"name {axis} in one, or write {REPLICA_AXIS} in its place"
                raise LayoutError(
                    "layout.parts", value, f"no part is left for {axis} to divide", fix
                )
    return tuple(found)


def _check_axes(part: Part, layout: Layout) -> None:
    placed, sharding = part.placed, STATE_AXES[0]

    def refuse(problem: str, fix: str) -> LayoutError:
        return LayoutError(field_of_part(part.pattern), str(placed), problem, fix)

    for axis in (*placed.axes, *placed.beside):
        if axis not in DIVIDING:
            fix = f'write those of {", ".join(DIVIDING)} that divide the part, or "whole"'
            raise refuse(f"{axis} is not an axis that a part can name", fix)
        if axis not in layout.axes:
            fix = f'leave {axis} out ("whole" if no axis is left), or use a layout with it'
            if axis in STATE_AXES:
                rest = next((a for a in CUTTING if a in layout.axes), "whole")
                fix += f" in place of {REPLICA_AXIS}, with"
                fix += f' "*" = "{rest}" as the last line for what is to be replicated'
            raise refuse(f"the layout {layout} has no axis {axis}", fix)
    for axis in placed.beside:
        first = placed.axes[0]
        if first not in STATE_AXES or axis not in CUTTING:
            problem = f"rows are not sharded over the ranks of {first} and {axis} together"
            raise refuse(problem, f"write {sharding}+{CUTTING[0]}")
        if layout.size(first) == 1 < layout.size(axis):
            problem = f"{first} has one rank, so it cannot shard rows over the ranks of {axis}"
            raise refuse(problem, f"use {first}2, or leave +{axis} out")


def roles_with_parts(
    model: nn.Module, parts: Iterable[Part], roles: Mapping[str, object] | None
) -> Mapping[str, object] | None:
    """[roles], with "whole" for the modules of parts that name no axis which cuts by roles.

    Raises:
        ConfigError: A line of [roles] is for such modules alone.
    """
    left = [part for part in parts if not {*part.placed.axes} & {*CUTTING}]
    if not left:
        return roles
    named = [name for name, _ in model.named_modules() if name]
    lines = {pattern: [n for n in named if fnmatchcase(n, pattern)] for pattern in roles or ()}
    whole: dict[str, object] = {}
    for part in left:
        inside = [n for n in named if any(is_inside(n, outer) for outer in part.modules)]
        for pattern, matched in lines.items():
            declared = (roles or {})[pattern]
            if matched and {*matched} <= {*inside} and declared != "whole":
                problem = f"it is kept whole by {field_of_part(part.pattern)}"
                fix = f"leave one of the two lines out, or name {CUTTING[0]} there"
                raise ConfigError(f'roles."{pattern}"', declared, problem, fix)
        declared_too = {name for matched in lines.values() for name in matched}
        outer = [n for n in named if "." not in n] if part.modules == ("",) else part.modules
        kept = [n for n in inside if n in outer or n in declared_too]
        whole |= dict.fromkeys(kept, "whole")
    return {**(roles or {}), **whole}


def check_parts(parts: Iterable[Part], steps: Iterable[Step]) -> None:
    """Refuse a part that an axis would divide although it does not name it, and one that lies on
    ranks with other gradients.

    Raises:
        UnsupportedModel: A part cannot lie as it says.
    """
    placed = [(param, step) for step in steps for param in step.params]
    for part in parts:
        for param, step in placed:
            if param.name not in part.weights or param.axis not in CUTTING:
                continue
            problem = ""
            if param.cut is not None and param.axis not in part.placed.axes:
                problem = (
                    f"{param.name} is sharded over {param.axis} together with the module around it"
                )
            elif param.axis in part.placed.beside:
                problem = f"{param.name} has a different gradient on each rank of {param.axis}, in"
                problem += f" {step.module or 'the model'}"
            if problem:
                raise UnsupportedModel(
                    field_of_part(part.pattern),
                    str(part.placed),
                    problem,
                    f"name the whole module around it, or {param.axis} without +",
                )


def part_notes(parts: Iterable[Part], weights: Iterable[Weight], layout: Layout) -> Iterator[str]:
    """What a plan says of each part."""
    sizes = {w.name: prod(w.shape) for w in weights}
    for part in parts:
        count = sum(sizes[name] for name in part.weights)
        active = layout.active_axes(*DIVIDING)
        others = [a for a in active if a not in (*part.placed.axes, *part.placed.beside)]
        lies = f"divided over {part.placed}" if part.placed.axes else "whole on every rank"
        lies += f", not over {' and '.join(others)}" if part.placed.axes and others else ""
        yield (f"part {part.pattern}: {len(part.weights)} weights, {count:,} elements, {lies}")
