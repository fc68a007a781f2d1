"""Which tests `./test.sh` runs, and which CI does, of those that `./test.sh --all` has.

Two marks, both for tests that are many or long, never for the only test of something:

- `slow`: left out of the short run. A quicker or smaller test of the same thing stays in it.
- `grid`: a test with many cases, such as layouts by models. The short run takes the fewest cases
  in which every word of every case's name occurs: every axis, option, schedule, codec and model at
  least once, but not each with each. `grid(n)`: n of these cases, where each takes long.

CI (`./test.sh --slow`) runs the slow tests too, and half of the cases that a grid's words need, or
m of a `grid(n, ci=m)`. What is `slow(ci=False)` takes 40 s or more, and runs with `--all` alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any


def words(case: str) -> set[str]:
    """The words of a case's name: `gpt2-pp2.tp2+sequence` has gpt2, pp2, tp2 and sequence."""
    return set(filter(None, re.split(r"[-.+\s]", case)))


def cover(cases: Sequence[str], most: int | None = None) -> list[int]:
    """Indices of few cases whose words are all words, in order, or of the `most` that have the most
    of them: greedy, the first of equally good ones."""
    missing = set().union(*map(words, cases)) if cases else set()
    taken: list[int] = []
    while missing and (most is None or len(taken) < most):
        best = max(range(len(cases)), key=lambda i: (len(words(cases[i]) & missing), -i))
        taken.append(best)
        missing -= words(cases[best])
    return sorted(taken)


def sample(items: Sequence[Any], slow: bool) -> tuple[list[Any], list[Any]]:
    """(kept, left out) of collected pytest items, with slow tests or without."""
    grids: dict[str, list[Any]] = {}
    for item in items:
        if item.get_closest_marker("grid") and hasattr(item, "callspec"):
            grids.setdefault(item.nodeid.partition("[")[0], []).append(item)
    chosen = set()
    for cases in grids.values():
        mark, names = cases[0].get_closest_marker("grid"), [case.callspec.id for case in cases]
        most = mark.kwargs.get("ci") if slow else next(iter(mark.args), None)
        if slow and most is None:
            most = -(-len(cover(names)) // 2)
        chosen |= {cases[i].nodeid for i in cover(names, most)}
    kept, left_out = [], []
    for item in items:
        in_grid = item.nodeid.partition("[")[0] in grids
        mark = item.get_closest_marker("slow")
        quick = mark is None or (slow and mark.kwargs.get("ci", True))
        (kept if quick and (not in_grid or item.nodeid in chosen) else left_out).append(item)
    return kept, left_out
