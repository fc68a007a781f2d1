"""Each source predicted by constants that were fitted to all other sources.

    python benchmarks/published/unseen.py [SOURCE ...]  # scipy: fits without each, and scores it
    python benchmarks/published/unseen.py --kept-fits   # scores with constants of the last fits

Writes results/unseen.json, where sources that are not named keep their scores, and the table in
README.md.

This is what a user meets whose machine and software nobody fitted. An era that other sources tell
of is fitted to these alone; a constant that only the source itself could tell has a prior: what the
other fits say of it.

Of each source that has more rows than are given, two rows then move its constants
(`measured.py`). How wide intervals are is chosen on all other sources.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import mean, median
from typing import Any

import numpy as np
import rows as published
from fit import FITS, Fitted, fitted
from kernels import ceiling
from measured import Steps, after_given, chosen_error, residuals
from run import HERE, covered, measured_s, predictions, rewrite, score, table

from weft.planner.cost.hardware import Era, named_sheet

OF_KERNELS = ("matmul_flops", "eight", "attention", "attention_backward")
KEPT = HERE / "results" / "unseen_constants.json"  # of each source, without it


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
    """The median that other fits, which know nothing of this source, found for each constant: of
    matmuls as a share of the card's best. What kernels were measured to reach stays as they do."""
    found = {}
    for name in one.free:
        told = [
            getattr(shipped(other), name) / (best(other) if name == "matmul" else 1.0)
            for other in FITS.values()
            if source not in other.sources and name in other.free and name not in OF_KERNELS
        ]
        if told:
            typical = float(np.exp(np.median(np.log(told))))
            found[name] = typical * (best(one) if name == "matmul" else 1.0)
    return found


def best(one: Fitted) -> float:
    """The share of the peak that the best matmul of its card reaches; of a card that nobody
    measured, as A100's."""
    card = "NVIDIA H100 SXM" if one.sheets[0] == "h100" else "NVIDIA A100 SXM"
    return ceiling(card)


def shipped(one: Fitted) -> Era:
    """What stands in weft's sheets, or in eras.toml."""
    sheet = one.sheets[0]
    return named_sheet(sheet).eras[one.era] if one.ours else published.sites()[sheet, one.era]


def without_kept(source: str, rows: list[published.Row]) -> dict[tuple[str, str], Era]:
    """As `without` found them last."""
    kept = json.loads(KEPT.read_text(encoding="utf-8"))[source]
    return {(sheet, name): Era.model_validate(era) for sheet, name, era in kept}


def keep(source: str, eras: Mapping[tuple[str, str], Era]) -> None:
    """For `--kept-fits`."""
    kept = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}
    kept[source] = [
        (sheet, name, era.model_dump(mode="json")) for (sheet, name), era in eras.items()
    ]
    KEPT.write_text(json.dumps(kept, sort_keys=True) + "\n", encoding="utf-8")


def timed_steps(
    rows: Sequence[published.Row], eras: Mapping[tuple[str, str], Era]
) -> tuple[Steps, np.ndarray]:
    """The rows of a source that have seconds and are covered, and these seconds."""
    timed = [(case, took) for row, case in covered(rows)[0] if (took := measured_s(row))]
    steps = Steps([case for case, _ in timed], {**published.sites(), **eras})
    return steps, np.array([took for _, took in timed])


def score_given(those: Mapping[str, tuple[Steps, np.ndarray]]) -> dict[str, dict[str, float]]:
    """Source -> its figures after rows of it are given."""
    left = {source: residuals(*timed) for source, timed in those.items()}
    print(f"sizes of errors that score best over all: {chosen_error([*left.values()])}")
    found = {}
    for source, (steps, measured) in those.items():
        error = chosen_error([one for other, one in left.items() if other != source])
        found[source] = after_given(steps, left[source], measured, error)
        print(source, found[source], flush=True)
    return found


def given_table(scores: Mapping[str, dict[str, Any]]) -> list[str]:
    lines = [
        "**each source, after two of its rows are given**",
        "",
        "| source | median before | median after | held by intervals before | after |",
        "| --- | --: | --: | --: | --: |",
    ]
    lines += [
        f"| {source} | {s['median']:.1%} | {s['after']:.1%} | {s['held']:.0%} |"
        f" {s['held_after']:.0%} |"
        for source, s in scores.items()
        if "after" in s
    ]
    return [*lines, ""]


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
    ) + (given_summary(of) if of("after") else "")


def given_summary(of: Callable[[str], list[float]]) -> str:
    return (
        f" After two rows of a source are given: {median(of('after')):.1%}, over"
        f" {len(of('after'))} sources. Intervals of 80 % hold {mean(of('held')):.0%} of a source's"
        f" rows, and {mean(of('held_after')):.0%} after two rows."
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sources", nargs="*", metavar="SOURCE")
    parser.add_argument("--kept-fits", action="store_true")
    asked = parser.parse_args()
    rows = published.own()
    known = sources(rows)
    for source in asked.sources:
        if source not in known:
            parser.error(f"no row is of {source}; known: {', '.join(known)}")
    fits = without_kept if asked.kept_fits else without
    path, command = HERE / "results" / "unseen.json", "python benchmarks/published/unseen.py"
    scores = json.loads(path.read_text())["runs"] if path.exists() else {}
    timed = {}
    for source in known if asked.kept_fits else asked.sources or known:
        eras = fits(source, rows)
        keep(source, eras)
        those = [row for row in rows if row["source_id"] == source]
        scores[source] = score(predictions(those, eras)[0])
        print("\n".join(table(source, {source: scores[source]})), flush=True)
        timed[source] = timed_steps(those, eras)
    if not asked.sources:
        for source, found in score_given(timed).items():
            scores[source] |= found
    scores = dict(sorted(scores.items()))
    path.write_text(json.dumps({"command": command, "runs": scores}, indent=1) + "\n")
    rewrite(
        "unseen",
        [
            summary(scores),
            "",
            *table("each source, by constants fitted to all others", scores),
            *given_table(scores),
        ],
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
