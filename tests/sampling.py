"""Which tests `./test.sh` runs, and which CI does, of those that `./test.sh --all` has.

Two marks, both for tests that are many or long, never for the only test of something:

- `slow`: left out of the short run. A quicker or smaller test of the same thing stays in it.
- `grid`: a test with many cases, such as layouts by models. The short run takes the fewest cases
  in which every word of every case's name occurs: every axis, option, schedule, codec and model at
  least once, but not each with each. `grid(n)`: n of these cases, where each takes long.
  CI (`./test.sh --pairs`) takes the fewest in which every pair of words occurs that occurs at all:
  most faults need one value, nearly all of the rest two (Kuhn, Wallace and Gallo 2004, "Software
  Fault Interactions and Implications for Software Testing").
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence
from itertools import combinations
from typing import Any


def words(case: str) -> set[str]:
    """The words of a case's name: `gpt2-pp2.tp2+sequence` has gpt2, pp2, tp2 and sequence."""
    return set(filter(None, re.split(r"[-.+\s]", case)))


def pairs(case: str) -> set[tuple[str, ...]]:
    """Each two words of a case's name, and each alone."""
    of = sorted(words(case))
    return {(word,) for word in of} | set(combinations(of, 2))


def cover(cases: Sequence[str], parts: Callable[[str], set[Any]] = words) -> list[int]:
    """Indices of few cases whose `parts` are the parts of all, in order: greedy, the first of
    equally good ones."""
    found = [parts(case) for case in cases]
    missing: set[Hashable] = set().union(*found)
    taken = []
    while missing:
        best = max(range(len(cases)), key=lambda i: (len(found[i] & missing), -i))
        taken.append(best)
        missing -= found[best]
    return sorted(taken)


def short_run(items: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """(kept, left out) of collected pytest items in the short run."""
    chosen, in_grids = _of_grids(items, words)
    for item in items:
        if item.get_closest_marker("slow"):
            chosen.discard(item.nodeid)
            in_grids.add(item.nodeid)
    return _split(items, in_grids - chosen)


def paired_run(items: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """(kept, left out) of collected pytest items in CI."""
    chosen, in_grids = _of_grids(items, pairs)
    return _split(items, in_grids - chosen)


def _of_grids(items: Sequence[Any], parts: Callable[[str], set[Any]]) -> tuple[set[str], set[str]]:
    """The cases of grids that are taken, and all of them."""
    grids: dict[str, list[Any]] = {}
    for item in items:
        if item.get_closest_marker("grid") and hasattr(item, "callspec"):
            grids.setdefault(item.nodeid.partition("[")[0], []).append(item)
    chosen = set()
    for cases in grids.values():
        most = cases[0].get_closest_marker("grid").args if parts is words else ()
        covering = cover([case.callspec.id for case in cases], parts)
        chosen |= {cases[i].nodeid for i in covering[: most[0] if most else None]}
    return chosen, {case.nodeid for cases in grids.values() for case in cases}


def _split(items: Sequence[Any], without: set[str]) -> tuple[list[Any], list[Any]]:
    kept = [item for item in items if item.nodeid not in without]
    return kept, [item for item in items if item.nodeid in without]
