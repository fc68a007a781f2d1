"""Which modules `fsdp` gathers and frees together, as `[layout] fsdp_units` says."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from math import prod

from torch import nn

from weft.core import (
    BLOCKS,
    UNIT_CHOICES,
    WHOLE_MODEL,
    ConfigError,
    Layout,
    Staging,
    Step,
    UnitChoice,
    Weight,
    is_inside,
    nearest,
    parse_units,
    stage_runs_module,
)
from weft.nn import callable_blocks, called_by_data

from .axes import STATE_AXES

FIELD = "layout.fsdp_units"


def gathered_units(
    model: nn.Module,
    layout: Layout,
    blocks: Iterable[Sequence[str]],
    weights: Iterable[Weight],
    asked: UnitChoice,
) -> tuple[tuple[str, ...], ...]:
    """The units that a layout gathers, as `choose_units` has them; none without `fsdp`.

    Args:
        model: the module as written for one device.
        layout: of the run.
        blocks: the lists of its repeated blocks.
        weights: its parameters, each once.
        asked: as for `weft.plan`.

    Raises:
        ConfigError: nothing is gathered under this layout, or `asked` names no units of this model.
    """
    if parse_units(asked) is None:
        raise ConfigError(FIELD, asked, "is not a choice of units", UNIT_CHOICES)
    if not layout.active_axes(*STATE_AXES):
        if asked == BLOCKS:
            return ()
        problem = f"has no effect with layout {layout}, which gathers no weights"
        fix = f"leave it out, or use a layout with {STATE_AXES[0]}"
        raise ConfigError(FIELD, _written(asked), problem, fix)
    return choose_units(model, blocks, weights, asked)


def choose_units(
    model: nn.Module,
    blocks: Iterable[Sequence[str]],
    weights: Iterable[Weight],
    asked: UnitChoice,
) -> tuple[tuple[str, ...], ...]:
    """The units, each as its modules, in the model's order. What they leave of the model is one
    more.

    Args:
        model: the module as written for one device.
        blocks: the lists of its repeated blocks.
        weights: its parameters, each once.
        asked: as for `weft.plan`.

    Raises:
        ConfigError: `asked` names no units of this model.
    """
    if asked == WHOLE_MODEL:
        return ()
    if isinstance(asked, tuple):
        return tuple((name,) for name in _named_units(model, weights, asked))
    size = asked if isinstance(asked, int) else 1
    # ranks with other samples may call others of those that data choose
    lists = [
        [block for block in callable_blocks(model, each) if not called_by_data(model, block)]
        for each in blocks
    ]
    if asked != BLOCKS and not any(lists):
        problem = "the model has no list of repeated blocks to count"
        raise ConfigError(FIELD, asked, problem, "hold them in a ModuleList, or name modules")
    return tuple(tuple(each[i : i + size]) for each in lists for i in range(0, len(each), size))


def _written(asked: UnitChoice) -> object:
    return [*asked] if isinstance(asked, tuple) else asked


def _named_units(
    model: nn.Module, weights: Iterable[Weight], patterns: Sequence[str]
) -> tuple[str, ...]:
    """The outermost modules that each glob matches. Raises ConfigError."""
    containers = nn.ModuleList | nn.ModuleDict  # nobody calls them
    named = {n: m for n, m in model.named_modules() if n and not isinstance(m, containers)}
    matched: dict[str, str] = {}
    for pattern in patterns:
        found = [n for n in named if fnmatchcase(n, pattern)]
        if not found:
            near = get_close_matches(pattern, named, n=5, cutoff=0.0)
            raise ConfigError(FIELD, pattern, "matches no module", nearest(pattern, near))
        found = [n for n in found if next(named[n].parameters(), None) is not None]
        if not found:
            fix = "leave it out, or name modules with weights"
            raise ConfigError(FIELD, pattern, "matches no module with weights", fix)
        for name in found:
            if not any(is_inside(name, other) for other in found if other != name):
                matched.setdefault(name, pattern)
    for name, pattern in matched.items():
        around = next(
            (other for other in matched if other != name and is_inside(name, other)), None
        )
        if around is not None:
            problem = f"{name} is inside of {around}, which {matched[around]!r} makes one unit"
            raise ConfigError(FIELD, pattern, problem, "leave one of the two patterns out")
        path = name.split(".")
        if any(called_by_data(model, ".".join(path[: i + 1])) for i in range(len(path))):
            problem = f"{name} is called only for some data, and ranks have different samples"
            raise ConfigError(FIELD, pattern, problem, "name the module around it that always runs")
    _check_ties(weights, matched)
    return tuple(name for name in named if name in matched)


def _check_ties(weights: Iterable[Weight], matched: dict[str, str]) -> None:
    """Refuse a unit with a weight that belongs to a module outside of it too. Raises
    ConfigError."""
    for weight in weights:
        names = (weight.name, *weight.aliases)
        owners = {n: next((u for u in matched if is_inside(n, u)), None) for n in names}
        unit = next((u for u in owners.values() if u is not None), None)
        other = next((n for n, u in owners.items() if u != unit), None)
        if unit is not None and other is not None:
            inside = next(n for n, u in owners.items() if u == unit)
            problem = f"{inside} in {unit} and {other} outside of it are one weight"
            fix = f"leave {unit} out: such a weight is gathered with the rest of the model"
            raise ConfigError(FIELD, matched[unit], problem, fix)


def check_unit_stages(staging: Staging, asked: UnitChoice, steps: Iterable[Step]) -> None:
    """Refuse blocks that are one unit and lie in several stages. Raises ConfigError."""
    for step in steps:
        unit = (step.module, *step.gather.beside) if step.gather is not None else ()
        for one in staging.stages if len(unit) > 1 else ():
            inside = [name for name in unit if stage_runs_module(name, one.modules)]
            if 0 < len(inside) < len(unit):
                problem = f"{' and '.join(unit)} are one unit, and lie in several stages"
                fix = f'cut before {unit[0]} or after {unit[-1]}, or use "{BLOCKS}"'
                raise ConfigError(FIELD, asked, problem, fix)


def heads_for_chunks(
    heads: Sequence[str], steps: Iterable[Step], staged: bool, logits: str
) -> tuple[str, ...]:
    """The heads whose logits a loss may make in chunks: in a pipeline, whose units are freed after
    their forward, none that is in a unit.

    Raises:
        ConfigError: Chunks are asked for there.
    """
    units = [step.module for step in steps if step.gather is not None and step.module]
    freed = [head for head in heads if staged and any(is_inside(head, unit) for unit in units)]
    if freed and logits == "chunks":
        problem = f"a unit of fsdp holds {freed[0]}, whose weight a stage frees after its forward"
        raise ConfigError("train.logits", logits, problem, f"leave it out of {FIELD}")
    return tuple(head for head in heads if head not in freed)


def unit_notes(
    asked: UnitChoice, steps: Iterable[Step], weights: Iterable[Weight]
) -> Iterator[str]:
    """What a plan says of units that are not the blocks."""
    if asked == BLOCKS:
        return
    numel = {w.name: prod(w.shape) for w in weights}
    held = {s.module: sum(numel[p.name] for p in s.params) for s in steps if s.gather is not None}
    rest = held.pop("", 0)
    found = f"fsdp_units {', '.join(asked) if isinstance(asked, tuple) else asked}: "
    if held:
        largest = max(held, key=lambda name: held[name])
        found += f"{len(held)} units, the largest at {largest} of {held[largest]:,} elements; "
    yield f"{found}{rest:,} elements with the rest of the model"
