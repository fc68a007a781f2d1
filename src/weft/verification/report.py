"""What `weft verify` prints."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from weft.core import VERIFIED, ConfigError, replace_file, translate

from .coverage import Covered
from .difference import Bounds
from .layout_result import LayoutResult
from .rounding import FACTOR
from .training_check import TrainingResult

Totals = dict[tuple[str, str], tuple[int, int]]


@dataclass(frozen=True)
class VerifyReport:
    """The results of all layouts. `training`: of runs as `weft train` makes them, if they were
    compared. `covered`: what that checks of a run."""

    results: tuple[LayoutResult, ...]
    steps: int
    training: tuple[TrainingResult, ...] = ()
    covered: tuple[Covered, ...] = ()
    reads_later: bool = False  # as of the reference

    @property
    def passed(self) -> bool:
        return all(result.passed for result in self.results) and all(
            result.passed for result in self.training
        )

    def text(self) -> str:
        """A table per layout, and a last line that says whether all agree."""
        return "\n\n".join(
            [*(result_table(result, self.steps) for result in self.results), *self.told()]
        )

    def told(self) -> list[str]:
        """What is printed after the tables."""
        said = [self.verdict()]
        if self.reads_later:
            note = translate(
                "note: the model's output at a position changes with the tokens after it, which are"
                " its labels: give attention is_causal=True, or use another loss"
            )
            said.insert(0, note)
        return said

    def verdict(self) -> str:
        """Whether all agree, in one line, in the language of the locale."""
        bad = [
            f"{result.layout} (refused)" if result.refused else result.layout
            for result in self.results
            if not result.passed
        ]
        count = len(self.results)
        said = translate(f"{count - len(bad)} of {count} layouts equal one device")
        if any(result.delayed for result in self.results):
            said += translate(" (with the same delays: asynchronous)")
        if any(result.definition for result in self.results):
            said += translate(" (by the definitions of their synchronisers)")
        found = (result.bounds for result in self.results)
        bounds = max(found, key=lambda each: each.gradient, default=Bounds())
        if bad:
            said += translate(f"; these do not: {', '.join(bad)}")
        else:
            said += translate(f" below {bounds} in {bounds.precision}")
        if not bad and any(result.widened for result in self.results):
            said += translate(", or below the measured rounding where rounding grows")
        trained = [result.layout for result in self.training if not result.passed]
        if trained:
            said += translate(f"; weft train differs from one device in: {', '.join(trained)}")
        return said

    def json(self) -> str:
        """One object: the layouts' errors and collectives, and `passed`."""
        layouts = [
            {
                "layout": r.layout,
                **({"workers": list(r.workers)} if r.workers else {}),
                "passed": r.passed,
                **({"refused": r.refused} if r.refused else {}),
                **({"definition": r.definition} if r.definition else {}),
                "loss_rel_err": _number(r.loss_rel_err),
                "grad_rel_err": _number(r.grad_rel_err),
                "param_rel_err": _number(r.param_rel_err),
                "worst": r.worst,
                "first_difference": r.first or r.problem or r.stray,
                **({"widened": r.widened} if r.widened else {}),
                **({"compiled": asdict(r.compiled)} if r.compiled else {}),
                "comms_predicted": _comms(r.comms_predicted),
                "comms_seen": _comms(r.comms_seen),
            }
            for r in self.results
        ]
        found: dict[str, Any] = {"layouts": layouts}
        if self.training:
            found["training"] = [
                {**asdict(result), "passed": result.passed} for result in self.training
            ]
        if self.reads_later:
            found["reads_later_tokens"] = True
        if self.covered:
            found["covered"] = [asdict(row) for row in self.covered]
        return json.dumps({**found, "passed": self.passed}, indent=2)


def write_verified(
    folder: Path, report: VerifyReport, settings: Mapping[str, Any], precision: str
) -> Path:
    """Keep the table in a run folder, which is made: verify.json has what `report.json` has, and
    what was verified. Returns the file. Raises ConfigError.

    Args:
        folder: the run folder.
        report: the table.
        settings: the run file's tables.
        precision: what was compared in, as `--precision` names it.
    """
    found = json.loads(report.json()) | {
        "time": time.time(),
        "steps": report.steps,
        "precision": precision,
        "settings": dict(settings),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / VERIFIED, json.dumps(found, indent=2) + "\n")
    except OSError as error:
        problem = f"cannot be written to ({error.strerror or error})"
        raise ConfigError("output", str(folder), problem, "name another --output") from None
    return folder / VERIFIED


def _number(error: float) -> float | None:
    return error if isfinite(error) else None


def _comms(totals: Totals) -> list[dict[str, object]]:
    return [
        {"kind": kind, "axis": axis, "count": count, "bytes": nbytes}
        for (kind, axis), (count, nbytes) in totals.items()
    ]


def result_table(result: LayoutResult, steps: int) -> str:
    """What one layout's run showed."""
    if result.refused is not None:
        return f"{result.layout}: REFUSED\n  {result.refused}"
    mark = "equal" if result.passed else "DIFFERENT"
    if result.definition:
        of = "its own sequential definition on one device"
        mark += f" {'to' if result.passed else 'from'} {of}: {result.definition}"
    steps = result.steps or steps
    lines = [
        (
            f"{result.layout}{', workers ' + ', '.join(result.workers) if result.workers else ''}:"
            f" {mark}"
        ),
        f"  loss              {result.loss_rel_err:9.2e}",
        f"  worst gradient    {result.grad_rel_err:9.2e}",
        (
            f"  worst weight      {result.param_rel_err:9.2e}   after {steps} steps, optimizer"
            " state and buffers included"
        ),
        f"  worst of all      {result.worst}",
    ]
    if result.widened:
        lines.append(f"  rounding          {_told(result)}")
    if result.first is not None:
        lines.append(f"  first difference  {result.first}")
    if result.problem is not None:
        lines.append(f"  problem           {result.problem}")
    if result.workers:
        return "\n".join(
            [*lines, "  not audited       messages of calls between the driver and its workers"]
        )
    if result.apart:
        lines.append("  not audited       messages of replicas that step independently")
    if result.compiled is not None:
        lines.append(f"  compiled          {result.compiled}, after the first step")
    lines.append("  collectives of a step      predicted                 seen")
    for key in sorted({**result.comms_predicted, **result.comms_seen}):
        want, seen = result.comms_predicted.get(key, (0, 0)), result.comms_seen.get(key, (0, 0))
        note = "" if want == seen else "   <- differ"
        lines.append(f"    {key[0]:<15}{key[1]:<10} {_cell(want)}   {_cell(seen)}{note}")
    if not {**result.comms_predicted, **result.comms_seen}:
        lines.append("    none                          none")
    return "\n".join(lines)


def _told(result: LayoutResult) -> str:
    name, bound = max(result.widened.items(), key=lambda each: each[1])
    return (
        f"grows in this run: {len(result.widened)} bounds are {FACTOR:g} times the measured"
        f" difference of one device from itself, at most {bound:.2g} ({name})"
    )


def _cell(total: tuple[int, int]) -> str:
    return f"{total[0]:>5} x {total[1]:>12,} B"
