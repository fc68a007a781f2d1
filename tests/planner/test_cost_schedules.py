"""The closed form of every schedule, against the simulation of its real order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.pipeline.test_schedules import BUBBLES, VARIANTS, Three, bubble
from weft.core.action_costs import ActionCosts
from weft.core.schedule import Schedule, peak_live
from weft.pipeline import schedules
from weft.pipeline.schedules._parts import ScheduleSummary
from weft.pipeline.simulator import simulate
from weft.planner.cost.schedule_replay import replay_schedule

SIZES = [(p, m) for p in (2, 4, 8) for m in (1, 2, 3, 4, 7, 8, 16, 17)]
TIMES: list[Three] = [
    (1, 1, 1),
    (1, 2, 0.5),
    (1, 1.1, 0.6),
    (1, 1, 0.1),
    (1, 0.9, 1.1),
    (1, 2, 1),
    (3, 1, 2),
]
EXACT = {"naive", "gpipe", "1f1b", "bfs"}  # of any size and times
# Step over the simulated one, at the least: elsewhere than where it holds, the closed form is a
# lower bound.
LEAST = {"zb-h1": 0.85, "zb-h2": 0.8, "interleaved-zb": 0.75, "zb-v": 0.7, "dualpipev": 0.65}


def briefly(made: Schedule, times: Three) -> ScheduleSummary:
    numbers = (made.ranks, made.microbatches, made.stages // made.ranks, *times)
    found = schedules.summarize(made.name)(*(np.array([float(n)]) for n in numbers))
    return ScheduleSummary(*(float(np.broadcast_to(each, 1)[0]) for each in found))


def variants(name: str) -> list[dict[str, Any]]:
    return [options for each, options in VARIANTS if each == name]


@pytest.mark.parametrize(
    ("name", "costs", "holds"), [(n, c, h) for n, _, c, h in BUBBLES], ids=[b[0] for b in BUBBLES]
)
def test_idle_time_is_exact_where_it_holds(name: str, costs: list[Three], holds: Any) -> None:
    for options in variants(name):
        for ranks, microbatches in (size for size in SIZES if holds(*size)):
            made = schedules.make_schedule(name, ranks, microbatches, **options)
            for times in costs:
                # pipedream goes on without a flush: what it waits at the ends of a call is not a
                # step's
                want = 0.0 if name == "pipedream" else bubble(made, times)
                assert briefly(made, times).idle_s == pytest.approx(want, abs=1e-9), (
                    ranks,
                    microbatches,
                    times,
                )


@pytest.mark.parametrize("name", [each[0] for each in BUBBLES if each[0] != "pipedream"])
def test_idle_time_elsewhere(name: str) -> None:
    """Never below 0; never longer than simulated, but for interleaved's incomplete groups, and not
    much shorter."""
    for options in variants(name):
        for ranks, microbatches in SIZES:
            made = schedules.make_schedule(name, ranks, microbatches, **options)
            for times in TIMES:
                idle, work = briefly(made, times).idle_s, microbatches * sum(times)
                ratio = (work + idle) / (work + bubble(made, times))
                assert idle >= 0
                if name in EXACT:
                    assert ratio == pytest.approx(1), (ranks, microbatches, times)
                elif name == "interleaved":
                    assert 1 - 1e-9 <= ratio <= 1.1, (ranks, microbatches, times)
                else:
                    assert LEAST[name] <= ratio <= 1 + 1e-9, (ranks, microbatches, times)


@pytest.mark.parametrize("name", [each[0] for each in BUBBLES])
def test_live_microbatches(name: str) -> None:
    """Of the first and last rank: exact with enough microbatches, and never fewer than there
    are."""
    for options in variants(name):
        for ranks, microbatches in SIZES:
            made = schedules.make_schedule(name, ranks, microbatches, **options)
            lives = simulate(made, ActionCosts()).peak_live
            assert lives == peak_live(made)
            brief = briefly(made, (1, 1, 1))
            want = lives[0], lives[-1]
            if microbatches >= 2 * ranks:
                assert (brief.first, brief.last) == pytest.approx(want), (ranks, microbatches)
            else:
                least = [one - 1e-9 for one in want]
                assert (
                    least[0] <= brief.first <= microbatches
                    and least[1] <= brief.last <= microbatches
                )


@pytest.mark.parametrize(
    ("name", "chunks"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zb-h1", 1)]
)
def test_what_has_no_closed_form_is_walked_through(
    name: str, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedules, "_registered", {})
    options = {"chunks": chunks} if chunks > 1 else {}
    schedules.register(
        lambda ranks, microbatches: schedules.make_schedule(name, ranks, microbatches, **options),
        "own",
    )
    p, m = np.array([2, 4, 4, 1]), np.array([4, 8, 16, 8])
    v, times = np.full(4, float(chunks)), [np.full(4, each) for each in (1.0, 1.5, 0.5)]
    there = p > 1
    found, want = (
        replay_schedule("own", there, p, m, v, *times),
        schedules.summarize(name)(p, m, v, *times),
    )
    assert schedules.summarize("own") is None
    for each, closed in zip(found, want, strict=True):
        assert each[there] == pytest.approx(np.broadcast_to(closed, 4)[there])
    assert (found.idle_s[3], found.first[3], found.last[3]) == (0, 1, 1)


def test_arrays_are_priced_at_once() -> None:
    grid = [(p, m, 2) for p, m in SIZES]
    p, m, v = (np.array(column) for column in zip(*grid, strict=True))
    one = np.ones(len(grid))
    for name in schedules.builtin_schedules():
        together = np.broadcast_arrays(*schedules.summarize(name)(p, m, v, one, 2 * one, 0.5 * one))
        for i, (ranks, microbatches, chunks) in enumerate(grid):
            alone = schedules.summarize(name)(
                *(np.array([n]) for n in (ranks, microbatches, chunks, 1.0, 2.0, 0.5))
            )
            assert [each[i] for each in together] == [
                np.broadcast_to(each, 1)[0] for each in alone
            ], name
