"""What a search found, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len, set_cell_size

from weft.core import Refusal, text_table, translate

from ..cluster_sim.report import hours_text
from ..cost.belief import Belief
from ..cost.hardware import GIB
from .baselines import Baseline, limits
from .candidates import LeftOut
from .certainty import Certainty
from .comparison import comparison_table, divided_by
from .explain import excess_text, recompute_text
from .query import PlanQuery
from .ranking import RankedLayout, Ranking

WIDTH = 120
WITHIN = "80 %"  # the interval that holds so many of the steps that are measured


@dataclass(frozen=True)
class PlanReport:
    """`best`: the first row that weft itself would lay so; `refused`: those before it; `left_out`
    by the rules. `took_s`: seconds of the search. `era`: what the software is priced as. `steps` of
    the run. `belief` about the constants of `question.era`. `notes`: what else is to be known.
    `explained`: what was asked about."""

    question: PlanQuery
    ranked: Ranking
    best: RankedLayout
    losers: Sequence[Baseline]
    refused: Sequence[tuple[RankedLayout, Refusal]]
    left_out: Sequence[LeftOut]
    era: str
    took_s: float
    steps: int
    belief: Belief
    notes: Sequence[str] = ()
    explained: RankedLayout | None = None

    def rows(self) -> list[RankedLayout]:
        """The best first, then as ranked, without those refused."""
        refused = {row.layout for row, _ in self.refused}
        return [row for row in self.ranked.rows if row.layout not in refused]

    @property
    def run_s(self) -> float:
        """Seconds of all steps in the best layout."""
        return self.steps * self.best.step_s

    def shown(self, top: int) -> list[RankedLayout]:
        """The rows that the report shows: all of layouts that were given to be compared, in the
        order given; else the first of `rows`."""
        return [*self.ranked.compared] or self.rows()[:top]

    @property
    def _each(self) -> str:
        return "tokens" if self.question.work.tokens > 1 else "samples"

    def text(self, top: int) -> str:
        """As wide as WIDTH, in the language of the locale."""
        shown = self.shown(top)
        sure = Certainty.of(self.question, self.belief, shown)
        compared = comparison_table(shown, self._each, sure) if self.ranked.compared else ""
        parts = [self._head(), compared or self._table(shown, sure)]
        if said := sure.text(numbered=not compared):
            parts.append(translate(said))
        if self.losers:
            parts.append(self._losers())
        if self.refused:
            parts.append(
                "\n".join(
                    translate(f"refused: {row.layout}: {problem.problem}")
                    for row, problem in self.refused
                )
            )
        return "\n\n".join(parts)

    def json(self, top: int) -> dict[str, Any]:
        """Everything: seconds, bytes, shares."""
        cluster, work = self.question.cluster, self.question.work
        rows = self.rows()[:top]
        sure = Certainty.of(self.question, self.belief, rows)
        figures = [
            row_figures(row) | sure.interval(place) | {"as_fast_as": sure.as_fast_as(place)}
            for place, row in enumerate(rows)
        ]
        return {
            "cluster": str(cluster),
            "era": self.era,
            "devices": self.ranked.devices,
            "device_bytes": self.question.memory_bytes,
            "model": {
                "name": work.name,
                "params": work.params,
                "trained_params": work.trained_params,
                "tokens": work.tokens,
                "flops": work.model_flops,
            },
            "batch": self.question.batch,
            "precision": self.question.practice.compute,
            "priced": self.ranked.priced,
            "simulated": self.ranked.simulated,
            "wide": self.ranked.exhaustive,
            "took_s": self.took_s,
            "best": figures[0],
            "steps": self.steps,
            "run_s": self.run_s,
            "rows": figures,
            "losers": [
                {
                    "name": one.name,
                    "pattern": one.pattern,
                    "why": one.why,
                    "row": one.row and self.figures_of(one.row),
                }
                for one in self.losers
            ],
            "refused": [
                {"layout": row.layout, "why": str(problem)} for row, problem in self.refused
            ],
            "left_out": [
                {"axis": one.axis, "sizes": one.sizes, "why": one.why} for one in self.left_out
            ],
            "habits": sorted(self.ranked.conventions),
            "notes": list(self.notes),
        }

    def figures_of(self, row: RankedLayout) -> dict[str, Any]:
        """One layout's seconds, with their interval, and bytes."""
        sure = Certainty.of(self.question, self.belief, [row])
        return row_figures(row) | sure.interval(0)

    # ---- text ------------------------------------------------------------------------------------

    def _head(self) -> str:
        q, found = self.question, self.ranked
        hardware = q.cluster.hardware
        tokens = f" of {q.work.tokens:,.0f} tokens" if q.work.tokens > 1 else ""
        all_trained = q.work.trained_params == q.work.params
        trained = "" if all_trained else f" ({short_count(q.work.trained_params)} trained)"
        used = "" if found.devices == q.cluster.devices else f", {found.devices} of them in use"
        rows = [
            (
                "model",
                f"{short_count(q.work.params)} parameters{trained} in {q.work.depth} blocks,"
                f" {q.practice.compute}; batch {q.batch:,} samples{tokens}",
            ),
            (
                "cluster",
                f"{q.cluster}: {hardware.title}, {hardware.device.memory_gib:g} GiB{used};"
                f" software: {self.era}",
            ),
            (
                "search",
                f"{found.priced:,} choices priced, {found.simulated} simulated,"
                f" {self.took_s:.1f} s",
            ),
        ]
        if self.best.fits:
            took = hours_text(self.run_s)
            rows.append(("run", f"{self.steps:,} steps in {took}, with {self.best.layout}"))
        lines = [set_cell_size(translate(word), 9) + translate(said) for word, said in rows]
        if found.conventions:
            lines += wrap_parts("only", [*sorted(found.conventions), "see --exhaustive"])
        if self.left_out:
            lines += wrap_parts("without", [left_out_text(one) for one in self.left_out])
        for note in self.notes:
            lines += wrap_parts("note", [note])
        return "\n".join(lines)

    def _table(self, rows: Sequence[RankedLayout], sure: Certainty) -> str:
        titles = [
            translate("layout"),
            translate("schedule"),
            translate("micro"),
            translate("recompute"),
            translate("step s"),
            WITHIN,
            f"{self._each}/s",
            "MFU",
            "GiB",
        ]
        lines = [["  ", *titles, f" {translate('limited by')}"]]
        for place, row in enumerate(rows):
            lines.append(
                [
                    f"{place + 1:>2}",
                    row.layout,
                    row.schedule + "".join(f" x{value}" for value in row.options.values()),
                    str(row.microbatch),
                    recompute_text(row),
                    f"{row.step_s:>7.4g}",
                    sure.interval_text(place),
                    short_count(row.tokens_per_s),
                    f"{row.mfu:>3.0%}",
                    f"{row.held_bytes / GIB:>5.1f}",
                    f" {self._limit(row)}",
                ]
            )
        return "\n".join(text_table(lines, left=(1, 2, len(titles) + 1), gap=" "))

    def _limit(self, row: RankedLayout) -> str:
        most = translate(limits(row))
        if not row.fits:
            return f"{most}; {translate(excess_text(row))}"
        share = row.held_bytes / self.question.memory_bytes
        return most + (f", {translate(f'memory {share:.0%}')}" if share > 0.9 else "")

    def _losers(self) -> str:
        rows = [
            [
                f"   {translate(one.name)}",
                one.row.layout if one.row is not None else one.pattern,
                translate(one.why),
            ]
            for one in self.losers
        ]
        return "\n".join([translate("why not"), *text_table(rows)])


def row_figures(row: RankedLayout) -> dict[str, Any]:
    """One choice, as [layout], [train] and [pipeline] have it, and what it takes."""
    names = (
        "layout",
        "schedule",
        "microbatch",
        "accumulate",
        "recompute",
        "step_s",
        "tokens_per_s",
        "mfu",
    )
    found = {name: getattr(row, name) for name in names}
    maps = {name: dict(getattr(row, name)) for name in ("options", "time", "memory", "traffic")}
    return found | {
        "held_bytes": row.held_bytes,
        "process_bytes": row.process_bytes,
        "over_bytes": row.over_bytes,
        "simulated": row.simulated,
        "limited_by": limits(row),
        "divides": divided_by(row.layout),
        **maps,
    }


def left_out_text(one: LeftOut) -> str:
    """As in `tp16, ..., tp64: 8 heads`."""
    names = [f"{one.axis}{size}" for size in one.sizes]
    named = ", ".join(names if len(names) < 3 else [names[0], "...", names[-1]])
    return f"{named}: {translate(one.why)}"


def wrap_parts(word: str, parts: Sequence[str]) -> list[str]:
    """In lines of WIDTH, under a word."""
    lines, line = [], set_cell_size(translate(word), 9)
    for part in map(translate, parts):
        if cell_len(line) > 9 and cell_len(line) + cell_len(part) > WIDTH:
            lines.append(line.rstrip())
            line = " " * 9
        line += part + "; "
    return [*lines, line.rstrip("; ")]


def short_count(number: float) -> str:
    """12345678 -> 12.3M."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"
