"""A timeline's figures, on ones small enough to work out by hand."""

from __future__ import annotations

import json
from array import array

import pytest

from weft.core.errors import ConfigError
from weft.core.schedule import Action, peak_live
from weft.pipeline import schedules
from weft.pipeline.simulator import simulate
from weft.pipeline.timeline import Lane, Span, Timeline

# Two ranks, one stage each, split backward; rank 1 also waits, and its reduction overlaps with
# computing.
RANKS: list[list[Span]] = [
    [
        (Action("F", 0, 0), 5.0, 6.0),
        (Action("B", 0, 0), 9.0, 10.0),
        (Action("W", 0, 0), 10.0, 12.0),
    ],
    [
        ("recv-wait", 5.0, 6.5),
        (Action("F", 1, 0), 6.5, 7.5),
        (Action("B", 1, 0), 7.5, 8.5),
        ("reduce", 8.0, 11.0),
        (Action("W", 1, 0), 8.5, 10.5),
    ],
]


def test_figures() -> None:
    timeline = Timeline.of(RANKS)
    assert timeline.makespan_s == 7.0
    assert timeline.ideal_s == 4.0
    assert timeline.bubble_s == 3.0
    assert timeline.bubble_fraction == 3 / 7
    assert timeline.idle_s == (3.0, 3.0)
    assert timeline.lanes[1].seconds == {
        "recv-wait": 1.5,
        "F": 1.0,
        "B": 1.0,
        "reduce": 3.0,
        "W": 2.0,
    }
    assert json.loads(json.dumps(timeline.summary()))["idle_s"] == [3.0, 3.0]


def test_what_follows_the_last_action_is_no_bubble() -> None:
    timeline = Timeline.of([[*RANKS[0], ("reduce", 12.0, 14.0)], RANKS[1]])
    assert (timeline.makespan_s, timeline.acted_s, timeline.bubble_s) == (9.0, 7.0, 3.0)


def test_the_first_span_begins_at_0_and_order_is_that_of_starts() -> None:
    timeline = Timeline.of([list(reversed(RANKS[0])), RANKS[1]])
    assert list(timeline.lanes[0].start_s) == [0.0, 4.0, 5.0]
    assert timeline == Timeline.of(RANKS)


def test_an_activation_lives_to_the_end_of_its_last_backward() -> None:
    timeline = Timeline.of(RANKS, activation_bytes=(100.0, 10.0))
    assert timeline.memory(0) == ([0.0, 7.0], [100.0, 0.0])
    assert timeline.memory(1) == ([0.0, 1.5, 5.5], [0.0, 10.0, 0.0])
    assert timeline.peak_memory == (100.0, 10.0)
    assert timeline.peak_live == (1.0, 1.0)

    freed = Timeline(timeline.lanes, timeline.activation_bytes, freed_by_b=0.25)
    assert freed.memory(0) == ([0.0, 5.0, 7.0], [100.0, 75.0, 0.0])

    whole = Timeline.of([RANKS[0][:2]])
    assert whole.memory(0) == ([0.0, 5.0], [1.0, 0.0]), (
        "no W: B frees it; sizes not known: microbatches"
    )


def test_a_rank_that_does_nothing() -> None:
    timeline = Timeline.of([RANKS[0], []])
    assert timeline.idle_s == (3.0, 7.0) and timeline.peak_live == (1.0, 0.0)
    empty = Timeline.of([[], []])
    assert empty.makespan_s == empty.bubble_fraction == 0.0


@pytest.mark.parametrize("name", [name for name in schedules.registry() if name != "solved"])
def test_live_activations_are_those_of_the_order(name: str) -> None:
    made = schedules.make_schedule(name, 4, 6)
    timeline = simulate(made)
    assert timeline.peak_live == peak_live(made)
    assert all(timeline.memory(rank)[1][-1] == 0 for rank in range(4))


def test_json_and_back() -> None:
    timeline = Timeline(Timeline.of(RANKS).lanes, (100.0, 10.0), 0.5)
    back = Timeline.from_json(timeline.json())
    assert back == timeline
    assert isinstance(back.lanes[0].labels[0], Action) and back.lanes[1].labels[0] == "recv-wait"
    assert isinstance(back.lanes[0], Lane) and isinstance(back.lanes[0].start_s, array)


@pytest.mark.parametrize("text", ["", "[]", '{"ranks": [{"spans": ["0F0"]}]}', '{"ranks": 3}'])
def test_text_that_is_no_timeline(text: str) -> None:
    with pytest.raises(ConfigError, match="not a timeline"):
        Timeline.from_json(text)
