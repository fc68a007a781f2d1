"""A Plan as text: its tables, which a person reads."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from math import prod

from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from .float8 import Float8Linears
from .schedule import Schedule
from .stages import Staging
from .step import COPY, SUM, Boundary, Step, Weight, collective
from .text_table import text_table


def _letter(placement: Placement) -> str:
    if isinstance(placement, Shard):
        return f"S({placement.dim})"
    return "R" if placement == COPY else "P"


def step_row(step: Step) -> tuple[str, str, str, str, str]:
    def crossing(boundary: Boundary | None, entry: bool) -> str:
        if boundary is None:
            return ""
        cells = []
        for axis, forward, backward in boundary.moves(entry):
            ops = " / ".join(collective(*move) or "-" for move in (forward, backward))
            cells.append(f"{axis}: {_letter(forward[0])}->{_letter(forward[1])} ({ops})")
        return ", ".join(cells)

    kinds: dict[str, int] = {}
    for param in step.params:
        leaf = param.name.removeprefix(step.module + ".") if step.module else ""
        moved = "" if param.stored == param.compute else f"->{_letter(param.compute)}"
        text = f"{param.axis}:{_letter(param.stored)}{moved}" + (
            " grad P" if param.grad == SUM else ""
        )
        text = f"{leaf} {text}" if leaf and "." not in leaf else text
        kinds[text] = kinds.get(text, 0) + 1
    params = ", ".join(text if n == 1 else f"{n} x {text}" for text, n in kinds.items())
    if step.gather is not None:
        params += f" gathered per {step.gather.gathered}, reduced per {step.gather.reduced}"
        params += f", divided by {step.gather.copies}" if step.gather.copies > 1 else ""
        params += ", offloaded" if step.gather.offload else ""
    if step.dispatch is not None:
        beside = (
            f", {step.dispatch.beside.rpartition('.')[2]} beside the exchange"
            if step.dispatch.beside
            else ""
        )
        params += f", {step.dispatch.experts} experts{beside}"
    if step.sequence is not None:
        params += f", sequence by {step.sequence.method}"
    if step.whole_sequence:
        params += "whole sequences, on every rank"
    return (
        step.by,
        step.module or "(model)",
        params,
        crossing(step.input, True),
        crossing(step.output, False),
    )


def fold_rows(
    rows: Iterable[tuple[str, ...]],
) -> list[tuple[str, ...]]:
    """One row for all rows that differ only in a number within the module's name."""
    folded: dict[tuple[str, ...], list[str]] = {}
    for by, module, *rest in rows:
        key = (by, re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", module), *rest)
        folded.setdefault(key, []).append(module)
    return [
        (key[0], modules[0] if len(modules) == 1 else f"{key[1]} [{len(modules)}]", *key[2:])
        for key, modules in folded.items()
    ]


def stage_table(staging: Staging, schedule: Schedule, weights: Iterable[Weight]) -> list[str]:
    """A table of the stages: where each runs, what it holds, what it sends on."""
    sizes = {w.name: prod(w.shape) for w in weights}
    kept = f", weight versions: {schedule.versions}" if schedule.versions else ""
    rows = [("stage", "rank", "parameters", "modules", "sends")]
    for stage in staging.stages:
        first, last = (
            stage.modules[0] if stage.modules else "",
            stage.modules[-1] if stage.modules else "",
        )
        sent = [
            f"{v.name} -> {', '.join(map(str, v.targets))}"
            for v in staging.values
            if v.source == stage.index
        ]
        rows.append(
            (
                str(stage.index),
                str(schedule.placement[stage.index]),
                f"{sum(sizes[n] for n in stage.weights):,}",
                first if first == last else f"{first} .. {last}",
                "; ".join(sent),
            )
        )
    head = f"pipeline {schedule.name}: {schedule.stages} stages on {schedule.ranks} ranks{kept}"
    return [head, *text_table(rows)]


def float8_table(products: Float8Linears) -> list[str]:
    """A table of the linears: which multiply in float8, and why the others do not."""
    rows = [("float8", name, "") for name in products.linears]
    rows += [("bf16", name, why) for name, why in products.others]
    how = ", emulated in float32" if products.emulated else ""
    head = (
        f"float8 {products.recipe}{how}: {len(products.linears)} of {len(rows)} linears, by torchao"
    )
    return [head, *text_table([("multiplies in", "linear", "why"), *fold_rows(rows)])]


def plan_tables(
    stages: Sequence[str], steps: Sequence[Step], products: Sequence[str], notes: Iterable[str]
) -> Iterable[str]:
    """The lines below a plan's head. `stages`: the table of stages, if there are several;
    `products`: that of products in float8, if there are any."""
    tables = [stages] if stages else []
    if steps or not tables:
        head = ("by", "module", "parameters", "enters", "leaves")
        tables.append(text_table([head, *fold_rows(map(step_row, steps))]))
    tables.append([*products])
    tables.append([f"note: {note}" for note in notes])
    return [line for table in tables if table for line in ("", *table)]
