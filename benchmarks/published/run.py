"""Predicts published runs with weft's cost model, and scores the predictions.

    python benchmarks/published/run.py  # the repository's own rows, by source
    python benchmarks/published/run.py --runs FILE.csv --out OUT.csv  # any rows with these columns
    python benchmarks/published/run.py --runs FILE.csv --out OUT.csv --measured ROWS.csv

Of FILE.csv every row that the model covers gets a line in OUT.csv: row_id, predicted_iter_time_s,
predicted_peak_mem_gib, fits, and the interval that holds the step's seconds in 80 of 100 cases;
which rows are not covered, and why, is said on stderr. Rows that have the measurement too are
scored. Rows of ROWS.csv, a few with their measured seconds, say how fast the machine and the
software of the same source_id are.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import rows as published
from cells import Uncovered, flag, number
from measured import believed, speaks_of

from weft.core.errors import Refusal
from weft.planner.cost.belief import Z80
from weft.planner.cost.hardware import Era

HERE = Path(__file__).parent
GIB = 2.0**30
# In a group, everything is the same but how the devices are used.
GROUP = (
    "source_id",
    "model",
    "layers",
    "hidden",
    "heads",
    "seq_len",
    "gbs",
    "n_accel",
    "accelerator",
    "dtype",
    "framework",
    "attn_kernel",
)


class Predicted:
    """One covered row beside its measurement, where it has one."""

    def __init__(self, row: published.Row, estimate: Any, place: int, spread: float | None = None):
        """`spread`: the standard deviation of the log of its seconds."""
        self.spread = spread
        self.row, self.source = row, row.get("source_id") or "rows"
        self.step_s = float(estimate.step_s[place])
        self.fits = bool(estimate.fits[place])
        kind = (row.get("mem_kind") or "").lower()
        whole = any(word in kind for word in ("smi", "driver", "process", "max first"))
        # nanotron restarts the peak of what is allocated after each of the first batches: what it
        # prints is reserved
        reserved = (
            estimate.reserved_bytes
            if "reserved" in kind or "nanotron" in kind
            else estimate.peak_bytes
        )
        nbytes = estimate.process_bytes if whole else reserved
        self.peak_gib = float(nbytes[place]) / GIB
        self.measured_s = measured_s(row)
        self.measured_gib = measured(row, "peak_mem_gib")
        self.oom = measured(row, "oom", labelled)

    @property
    def error(self) -> float:
        """Relative, of the step's seconds."""
        assert self.measured_s is not None
        return self.step_s / self.measured_s - 1

    @property
    def interval_s(self) -> tuple[float, float]:
        """Seconds between which the step is in 80 of 100 cases."""
        assert self.spread is not None
        factor = float(np.exp(Z80 * self.spread))
        return self.step_s / factor, self.step_s * factor


def measured_s(row: published.Row) -> float | None:
    """Seconds of a step, where a row has them."""
    return measured(row, "d_iter_time_s") or measured(row, "iter_time_s")


def labelled(row: published.Row, name: str) -> bool:
    """Whether a row says that it ran out of memory."""
    return bool(flag(row, name))


def measured(
    row: published.Row, name: str, read: Callable[[published.Row, str], Any] = number
) -> Any:
    """None for a cell that is no measurement."""
    try:
        return read(row, name)
    except Uncovered as problem:
        print(f"{row['row_id']} is not scored: {problem}", file=sys.stderr)
        return None


def covered(
    rows: Sequence[published.Row],
) -> tuple[list[tuple[published.Row, published.Case]], Counter[str]]:
    """Rows as the model takes them, and how many are not covered for which reason."""
    found: list[tuple[published.Row, published.Case]] = []
    reasons = Counter[str]()
    for row in rows:
        try:
            # names of rows may repeat
            found.append((row, replace(published.case(row), row_id=str(len(found)))))
        except (Uncovered, Refusal) as error:
            reasons[f"{row.get('source_id') or 'rows'}: {error}"] += 1
            print(f"{row['row_id']} is not covered: {error}", file=sys.stderr)
    for note, count in Counter(note for _, one in found for note in one.notes).items():
        print(f"{count} rows: {note}", file=sys.stderr)
    return found, reasons


def predictions(
    rows: Sequence[published.Row], eras: Mapping[tuple[str, str], Era] | None = None
) -> tuple[list[Predicted], Counter[str]]:
    """Covered rows, and how many are not covered for which reason. `eras`: (sheet, era) ->
    constants, not a sheet's."""
    kept, reasons = covered(rows)
    found = published.predict([case for _, case in kept], eras)
    return [Predicted(row, *found[case.row_id]) for row, case in kept], reasons


def predictions_with_intervals(
    rows: Sequence[published.Row], given: Sequence[published.Row]
) -> tuple[list[Predicted], Counter[str]]:
    """As `predictions`, after the rows that are given, each with the spread of its seconds."""
    kept, reasons = covered(rows)
    told = [(row, case, took) for row, case in covered(given)[0] if (took := measured_s(row))]
    if given and not told:
        raise SystemExit("--measured: no row has seconds of a step, d_iter_time_s, and is covered")
    by_source = defaultdict(list)
    for row, case in kept:
        by_source[row.get("source_id") or ""].append((row, case))
    made: dict[str, Predicted] = {}
    for source, those in by_source.items():
        own = [(case, took) for row, case, took in told if speaks_of(row, source)]
        cases = [case for _, case in those]
        eras, spread = believed(cases, own, published.sites())
        if given:
            print(f"{source or 'rows'}: {len(own)} measured rows", file=sys.stderr)
        found = published.predict(cases, eras)
        for (row, case), size in zip(those, spread, strict=True):
            made[case.row_id] = Predicted(row, *found[case.row_id], float(size))
    return [made[case.row_id] for _, case in kept], reasons


def score(found: Sequence[Predicted]) -> dict[str, Any]:
    """Errors of time and memory, of choosing, and of what fits."""
    timed = [one for one in found if one.measured_s is not None]
    errors = [abs(one.error) for one in timed]
    made: dict[str, Any] = {"rows": len(found), "timed": len(timed)}
    if errors:
        made |= {"median": median(errors), "mean": mean(errors), "worst": max(errors)}
        made["bias"] = median(one.error for one in timed)
    groups = defaultdict(list)
    for one in timed:
        groups[tuple(one.row.get(key, "") for key in GROUP)].append(one)
    several = [
        group
        for group in groups.values()
        if len({round(one.measured_s or 0, 6) for one in group}) >= 5
    ]
    if several:
        ranked = [
            _spearman([o.step_s for o in g], [o.measured_s or 0.0 for o in g]) for g in several
        ]
        lost = []
        for group in several:
            picked = min(group, key=lambda one: one.step_s)
            lost.append((picked.measured_s or 0) / min(one.measured_s or 0 for one in group) - 1)
        made |= {"groups": len(several), "spearman": mean(ranked), "regret": mean(lost)}
    held = [one.peak_gib / one.measured_gib - 1 for one in found if one.measured_gib]
    if held:
        made |= {
            "peaks": len(held),
            "peak_median": median(map(abs, held)),
            "peak_bias": median(held),
        }
    told = [one for one in found if one.oom or (one.oom is False and one.measured_s is not None)]
    if told:
        made["fit_called_impossible"] = sum(not one.fits and not one.oom for one in told)
        made["told"] = len(told)
        made["oom"] = sum(one.oom for one in told)
        made["oom_found"] = sum(one.oom and not one.fits for one in told)
    return made


def _spearman(a: Sequence[float], b: Sequence[float]) -> float:
    return float(np.corrcoef(_ranks(a), _ranks(b))[0, 1])


def _ranks(values: Sequence[float]) -> np.ndarray:
    """Equal values share the mean of their ranks."""
    _, places, counts = np.unique(np.round(values, 9), return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[places]


def write(found: Sequence[Predicted], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file)
        lines.writerow(
            [
                "row_id",
                "predicted_iter_time_s",
                "predicted_peak_mem_gib",
                "fits",
                "iter_time_s_low",
                "iter_time_s_high",
            ]
        )
        for one in found:
            low, high = one.interval_s
            lines.writerow(
                [
                    one.row["row_id"],
                    f"{one.step_s:.6g}",
                    f"{one.peak_gib:.4f}",
                    "Y" if one.fits else "N",
                    f"{low:.6g}",
                    f"{high:.6g}",
                ]
            )


def table(name: str, scores: dict[str, dict[str, Any]]) -> list[str]:
    lines = [
        f"**{name}**",
        "",
        (
            "| source | rows | timed | median | mean | worst | bias | Spearman | regret | groups |"
            " peak, median | peak, bias | ran, but called impossible | out of memory, found |"
        ),
        "| --- | --: | --: | --: | --: | --: | --: | --: | --: | --: | --: | --: | --: | --: |",
    ]

    def cell(value: float | None, signed: bool = False) -> str:
        return "" if value is None else f"{value:+.1%}" if signed else f"{value:.1%}"

    for source, s in scores.items():
        spearman = f"{s['spearman']:.2f}" if "spearman" in s else ""
        oom = f"{s['oom_found']} of {s['oom']}" if s.get("oom") else ""
        lines.append(
            f"| {source} | {s['rows']} | {s['timed']} | {cell(s.get('median'))} |"
            f" {cell(s.get('mean'))} | {cell(s.get('worst'))} | {cell(s.get('bias'), True)} |"
            f" {spearman} | {cell(s.get('regret'))} | {s.get('groups', '')} |"
            f" {cell(s.get('peak_median'))} | {cell(s.get('peak_bias'), True)} |"
            f" {s.get('fit_called_impossible', '')} | {oom} |"
        )
    return [*lines, ""]


def rewrite(script: str, lines: Sequence[str]) -> None:
    """Puts these lines into the part of README.md that this script writes."""
    begin, end = (
        f"<!-- results: written by {script}.py -->",
        f"<!-- end of {script}.py's results -->",
    )
    path = HERE / "README.md"
    text = path.read_text(encoding="utf-8")
    head, tail = text[: text.index(begin) + len(begin)], text[text.index(end) :]
    path.write_text("\n".join([head, "", *lines, tail]), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, metavar="FILE.csv")
    parser.add_argument("--out", type=Path, metavar="OUT.csv")
    parser.add_argument("--measured", type=Path, metavar="ROWS.csv")
    asked = parser.parse_args()
    if asked.runs is not None and not asked.runs.is_file():
        parser.error(f"--runs {asked.runs}: there is no such file")
    if asked.out is not None and not asked.out.resolve().parent.is_dir():
        parser.error(f"--out {asked.out}: there is no such folder")
    if asked.measured is not None and not asked.measured.is_file():
        parser.error(f"--measured {asked.measured}: there is no such file")
    if asked.measured is not None and asked.runs is None:
        parser.error("--measured goes with --runs FILE.csv")
    rows = published.own() if asked.runs is None else published.read(asked.runs)
    given = [] if asked.measured is None else published.read(asked.measured)
    if given or asked.out is not None:
        found, reasons = predictions_with_intervals(rows, given)
    else:
        found, reasons = predictions(rows)
    if asked.out is not None:
        write(found, asked.out)
    by_source = defaultdict(list)
    for one in found:
        by_source[one.source].append(one)
    if asked.runs is not None:
        lines = table(
            asked.runs.name, {source: score(those) for source, those in by_source.items()}
        )
        print("\n".join(lines))
    else:
        alone, _ = predictions([one.row for one in found], published.constants())
        for one, bare in zip(found, alone, strict=True):
            if bare.step_s != one.step_s:
                by_source[f"{one.source}, constants alone"].append(bare)
        classic = [one for one in found if one.source in CLASSIC and one.row["row_id"] != UNLIKE]
        parts = {"18 Megatron rows": score(classic)}
        results: dict[str, Any] = {"classic": parts}
        lines = table("The 18 classic rows", parts)
        for half in ("fitted on", "held out"):
            scores = {}
            for source, those in by_source.items():
                scores[source] = score(
                    [one for one in those if published.held(one.row) == (half == "held out")]
                )
            results[half] = scores
            lines += table(half, scores)
        lines += [f"Not covered: {count} rows, {reason}." for reason, count in reasons.items()]
        print("\n".join(lines))
        (HERE / "results").mkdir(exist_ok=True)
        command = "python benchmarks/published/run.py"
        (HERE / "results" / "own.json").write_text(
            json.dumps({"command": command, "runs": results}, indent=1) + "\n"
        )
        rewrite("run", lines)
    return 0


CLASSIC = ("mlm_sc21_table1", "korthikanti2022_table5")
# the one of that table with data parallelism, which the 18 leave out
UNLIKE = "korthikanti2022_table5-0009"


if __name__ == "__main__":
    sys.exit(main())
