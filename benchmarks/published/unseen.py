"""Each source predicted by constants that were fitted to all other sources.

    python benchmarks/published/unseen.py [SOURCE ...]  # scipy; five minutes for all

Writes results/unseen.json, where sources that are not named keep their scores, and the table in
README.md.

This is what a user meets whose machine and software nobody fitted. An era that other sources tell
of is fitted to these alone; a constant that only the source itself could tell has a prior: what the
other fits say of it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from statistics import mean, median
from typing import Any

import numpy as np
import rows as published
from fit import FITS, Fitted, fitted
from run import HERE, predictions, rewrite, score, table

from weft.planner.cost.hardware import Era, named_sheet


def sources(rows: Sequence[published.Row]) -> list[str]:
    return sorted({row.get("source_id") or "rows" for row in rows})


def without(source: str, rows: list[published.Row]) -> dict[tuple[str, str], Era]:
    """(sheet, era) -> constants, of those that this source was fitted for, without it."""
    found = {}
    for one in FITS.values():
        if source not in one.sources:
            continue
        others = {name: weight for name, weight in one.sources.items() if name != source}
        start = one.start.model_copy(update=prior(source, one))
        layers = tuple(name for name in one.layers if name != source)
        era = (
            fitted(replace(one, sources=others, start=start, layers=layers), rows)
            if others
            else start
        )
        found.update({(sheet, one.era): era for sheet in one.sheets})
    return found


def prior(source: str, one: Fitted) -> dict[str, float]:
    """The median that other fits, which know nothing of this source, found for each constant."""
    found = {}
    for name in one.free:
        told = [
            getattr(shipped(other), name)
            for other in FITS.values()
            if source not in other.sources and name in other.free
        ]
        if told:
            found[name] = float(np.exp(np.median(np.log(told))))
    return found


def shipped(one: Fitted) -> Era:
    """What stands in weft's sheets, or in eras.toml."""
    sheet = one.sheets[0]
    return named_sheet(sheet).eras[one.era] if one.ours else published.sites()[sheet, one.era]


def summary(scores: dict[str, dict[str, Any]]) -> str:
    """Over sources, each of the same weight."""

    def of(key: str) -> list[float]:
        return [one[key] for one in scores.values() if one.get(key) is not None]

    short = [one for one in scores.values() if one.get("oom")]  # some of whose runs did not fit
    told = sum(one["told"] for one in short)
    wrong = sum(one["fit_called_impossible"] + one["oom"] - one["oom_found"] for one in short)
    return (
        f"Step time: {median(of('median')):.1%}, the median over {len(of('median'))} sources of"
        f" their median errors. Layouts of one model, in {len(of('groups'))} sources: Spearman"
        f" {mean(of('spearman')):.2f}, and the first pick loses {mean(of('regret')):.1%}. Whether"
        f" a run fits: right for {1 - wrong / told:.0%} of {told} rows, of the {len(short)} sources"
        f" that name runs which do not. Peaks: {median(of('peak_median')):.1%}, over"
        f" {len(of('peak_median'))} sources."
    )


def main() -> int:
    rows = published.own()
    path, command = HERE / "results" / "unseen.json", "python benchmarks/published/unseen.py"
    scores = json.loads(path.read_text())["runs"] if path.exists() else {}
    for source in sys.argv[1:] or sources(rows):
        those = [row for row in rows if row["source_id"] == source]
        if not those:
            print(f"no row is of {source}; known: {', '.join(sources(rows))}", file=sys.stderr)
            return 2
        scores[source] = score(predictions(those, without(source, rows))[0])
        print("\n".join(table(source, {source: scores[source]})), flush=True)
    scores = dict(sorted(scores.items()))
    path.write_text(json.dumps({"command": command, "runs": scores}, indent=1) + "\n")
    rewrite(
        "unseen",
        [summary(scores), "", *table("each source, by constants fitted to all others", scores)],
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
