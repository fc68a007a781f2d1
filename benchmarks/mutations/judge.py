"""What verify says of a mutant, on a few of the pairs that run its line."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from first_name import is_right, names_a_difference
from mutants import ROOT, Mutant, in_place
from observed import Died, Outcome, in_a_process, observed
from pairs import Reached
from subjects import PAIRS, Pair

from weft.core.errors import Refusal, WorkerDied
from weft.launch.local_workers import Pool

TIMEOUT_S = 60.0
MOST_PAIRS, MOST_S = 5, 12.0  # comparisons of one mutant, and what they take without it


@dataclass(frozen=True)
class Verdict:
    """What a mutant does.

    `effect`: "verify", "deep" or "late" if that says something, "missed" (other numbers, and they
    say nothing), "plan" (the same numbers by another plan), "none" on these models. `says`: what is
    said, of `pair`. `first`: "right" or "wrong", of the first name, where a module has the line.
    """

    effect: str
    says: str
    pair: str
    first: str
    seconds: float


def judged(mutant: Mutant | None, pair: Pair) -> Outcome:
    with in_place(mutant):
        return observed(pair)


def outcome(
    pool: Pool, mutant: Mutant | None, pair: Pair, timeout_s: float = TIMEOUT_S
) -> Outcome | str:
    """What a pair does under a mutant, or how it ends."""
    try:
        if pair.way == "deep":
            return in_a_process(judged, mutant, pair, timeout=timeout_s)
        return pool.run(judged, mutant, pair, world=pair.world, timeout=timeout_s)[0]
    except (Refusal, WorkerDied, Died) as error:
        said = str(error).replace(str(ROOT), "").strip().splitlines()
        return f"{type(error).__name__}: {said[-1][-200:] if said else ''}"


def by_verify(pool: Pool, mutant: Mutant, reached: Reached, inside: bool) -> Verdict:
    """`inside`: on pairs alone that run the line in the forward of a module."""
    start, effect = time.perf_counter(), "none"
    line = mutant.module, mutant.line

    def verdict(effect: str, says: str = "", pair: object = "", first: str = "") -> Verdict:
        return Verdict(effect, says, str(pair), first, time.perf_counter() - start)

    spent = 0.0
    pairs = reached.chosen(line, mutant.rule == "skip a wait")
    if inside:
        pairs = [index for index in pairs if reached.place(index, line) is not None]
    for index in pairs[:MOST_PAIRS]:
        pair, clean, spent = PAIRS[index], reached.clean[index], spent + reached.seconds[index]
        if spent > MOST_S and spent > reached.seconds[index]:
            break
        found = outcome(pool, mutant, pair)
        if isinstance(found, str):
            return verdict(pair.way, found, pair)
        if found.says:
            place, right = reached.place(index, line), ""
            if place is not None and names_a_difference(found.says):
                right = "right" if is_right(found.says, place) else "wrong"
            return verdict(pair.way, found.says, pair, right)
        same = len(found.numbers) == len(clean.numbers)
        if not (same and np.allclose(found.numbers, clean.numbers, rtol=1e-8, atol=1e-12)):
            return verdict("missed", pair=pair)
        if found.ran != clean.ran:
            effect = "plan"
    return verdict(effect)
