"""Every schedule of the folder over 1 to 8 ranks and 1 to 32 microbatches: what it says of itself
holds. And what is wrong with a broken one is named."""

from __future__ import annotations

import importlib
import pkgutil
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from weft.core.action_costs import ActionCosts
from weft.core.errors import ConfigError
from weft.core.schedule import Action, Kind, Schedule, from_csv, messages, peak_live, to_csv
from weft.pipeline import schedules
from weft.pipeline.simulator import simulate
from weft.pipeline.validate import find_faults
from weft.pipeline.weight_versions import versions_used, weight_updates

SIZES = [(ranks, microbatches) for ranks in range(1, 9) for microbatches in range(1, 33)]
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ("naive", "gpipe", "1f1b", "zb-h1", "zb-h2", "zb-v", "dualpipev")),
    *(
        (name, {"chunks": v})
        for name in ("interleaved", "bfs", "interleaved-zb")
        for v in (1, 2, 3)
    ),
    *(("pipedream", {"versions": versions}) for versions in ("stash", "vertical", "2bw")),
]
each_variant = pytest.mark.parametrize(("name", "options"), VARIANTS, ids=lambda x: str(x))


def action(text: str) -> Action:
    stage, kind, microbatch = re.fullmatch(r"(\d+)([A-Z])(\d+)", text).groups()  # type: ignore[union-attr]
    return Action(kind, int(stage), int(microbatch))  # type: ignore[arg-type]


def rows(*lines: str) -> tuple[tuple[Action, ...], ...]:
    return tuple(tuple(map(action, line.split())) for line in lines)


@each_variant
def test_a_schedule_is_correct_at_every_size(name: str, options: dict[str, Any]) -> None:
    stages = {
        ranks: schedules.make_schedule(name, ranks, 1, **options).stages for ranks in range(1, 9)
    }
    for ranks, microbatches in SIZES:
        made = schedules.make_schedule(name, ranks, microbatches, **options)
        assert find_faults(made) == ()
        assert (made.name, made.ranks, made.microbatches) == (name, ranks, microbatches)
        assert made.stages == stages[ranks], (
            "the cut of the model depends on the number of microbatches"
        )
        assert set(Counter(made.placement).values()) == {made.stages // ranks}
        assert from_csv(to_csv(made), name) == made


@each_variant
def test_what_is_sent_is_needed_in_the_same_order(name: str, options: dict[str, Any]) -> None:
    """Between two ranks, of activations and of gradients each; of both together where no rank sends
    both to another.

    With V placements, and where two ranks are neighbours on both sides, a rank may send the other
    an activation and then a gradient that the other needs first.
    """
    for ranks, microbatches in SIZES:
        made = schedules.make_schedule(name, ranks, microbatches, **options)
        needed = first_needs(made)
        sent = messages(made)
        assert sent.keys() == needed.keys()
        for pair in sent:
            for kind in ("F", "B"):
                assert [a for a in sent[pair] if a.kind == kind] == [
                    a for a in needed[pair] if a.kind == kind
                ], pair
            if name not in ("zb-v", "dualpipev") and ranks > 2:
                assert sent[pair] == needed[pair]
                assert len({a.kind for a in sent[pair]}) == 1


def first_needs(made: Schedule) -> dict[tuple[int, int], list[Action]]:
    """(source rank, destination rank) -> what the destination needs from the source, in the order
    of first need."""
    found: dict[tuple[int, int], list[Action]] = {}
    for rank, actions in enumerate(made.order):
        for need in (n for a in actions for n in made.needs(a)):
            if (source := made.placement[need.stage]) != rank:
                found.setdefault((source, rank), []).append(need)
    return found


LIVE: dict[
    str, Callable[[int, int, int, int], float]
] = {  # ranks p, microbatches m, rank i, chunks v
    "naive": lambda p, m, i, v: 1,
    "gpipe": lambda p, m, i, v: m,
    "bfs": lambda p, m, i, v: m,
    "1f1b": lambda p, m, i, v: min(p - i, m),
    "pipedream": lambda p, m, i, v: min(p - i, m),
    "interleaved": lambda p, m, i, v: (
        min((v - 1) * p + 2 * (p - 1 - i) + 1, m * v) / v
    ),  # where p divides m
    "zb-h1": lambda p, m, i, v: min(p, m),
    "zb-h2": lambda p, m, i, v: min(2 * p - 1, m),
    "interleaved-zb": lambda p, m, i, v: min(p, m),
    "zb-v": lambda p, m, i, v: p,  # where m >= 2p
    "dualpipev": lambda p, m, i, v: p + 0.5,
}


@each_variant
def test_live_activations(name: str, options: dict[str, Any]) -> None:
    """The peak on every rank is the table's; no more where the table asks for enough microbatches
    and has fewer."""
    for ranks, microbatches in SIZES:
        made = schedules.make_schedule(name, ranks, microbatches, **options)
        chunks = options.get("chunks", 1)
        table = tuple(LIVE[name](ranks, microbatches, rank, chunks) for rank in range(ranks))
        few = name in ("zb-v", "dualpipev") and microbatches < 2 * ranks
        if few or (name == "interleaved" and microbatches % ranks):
            padded = -(-microbatches // ranks) * ranks
            most = [
                min(microbatches, LIVE[name](ranks, padded, rank, chunks)) for rank in range(ranks)
            ]
            assert all(live <= limit for live, limit in zip(peak_live(made), most, strict=True)), (
                made
            )
        else:
            assert peak_live(made) == pytest.approx(table, abs=1e-12)


Three = tuple[float, float, float]  # F, B, W of a whole rank
ANY: list[Three] = [(1, 1, 1), (1, 2, 0.5), (3, 1, 2), (1, 1.25, 0)]
SMALL_W: list[Three] = [
    (1, 1, 1),
    (1, 1.1, 0.6),
    (3, 2, 2),
    (2, 5, 1),
    (1, 1.25, 0),
]  # W <= min(F, B)
PAIRED: list[Three] = [
    (1, 1, 1),
    (1, 1, 0.5),
    (3, 2, 2),
    (5, 3, 2),
    (1, 1, 0),
]  # W <= B <= F <= B + W
Formula = Callable[
    [int, int, int, float, float, float], float
]  # ranks p, microbatches m, chunks v, F, B, W

BUBBLES: list[tuple[str, Formula, list[Three], Callable[[int, int], bool]]] = [
    ("naive", lambda p, m, v, F, B, W: (p - 1) * m * (F + B + W), ANY, lambda p, m: True),
    ("gpipe", lambda p, m, v, F, B, W: (p - 1) * (F + B + W), ANY, lambda p, m: True),
    ("1f1b", lambda p, m, v, F, B, W: (p - 1) * (F + B + W), ANY, lambda p, m: True),
    ("pipedream", lambda p, m, v, F, B, W: (p - 1) * (F + B + W), ANY, lambda p, m: True),
    (
        "interleaved",
        lambda p, m, v, F, B, W: (p - 1) * (F + B + W) / v,
        ANY,
        lambda p, m: m % p == 0,
    ),
    ("bfs", lambda p, m, v, F, B, W: (p - 1) * (F + B + W) / v, ANY, lambda p, m: m >= p),
    ("zb-h1", lambda p, m, v, F, B, W: (p - 1) * (F + B - W), SMALL_W, lambda p, m: m >= p),
    (
        "zb-h2",
        lambda p, m, v, F, B, W: (p - 1) * max(F, F + B - 2 * W),
        SMALL_W,
        lambda p, m: m >= 2 * p - 1,
    ),
    (
        "interleaved-zb",
        lambda p, m, v, F, B, W: (p - 1) * (F + B - W) / v,
        SMALL_W,
        lambda p, m: m % p == 0,
    ),
    (
        "zb-v",
        lambda p, m, v, F, B, W: (p - 1) * F / 2,
        [(1, 1, 1), (0.3, 0.3, 0.3)],
        lambda p, m: m >= 2 * p - 1,
    ),
    (
        "dualpipev",
        lambda p, m, v, F, B, W: (p - 1) * (F + B - W) / 2,
        PAIRED,
        lambda p, m: m >= 2 * p,
    ),
]


@pytest.mark.parametrize(
    ("name", "formula", "costs", "holds"), BUBBLES, ids=[row[0] for row in BUBBLES]
)
def test_bubble(
    name: str, formula: Formula, costs: list[Three], holds: Callable[[int, int], bool]
) -> None:
    for _, options in (variant for variant in VARIANTS if variant[0] == name):
        for ranks, microbatches in (size for size in SIZES if holds(*size)):
            made = schedules.make_schedule(name, ranks, microbatches, **options)
            chunks = made.stages // ranks
            for times in costs:
                expected = formula(ranks, microbatches, chunks, *times)
                assert bubble(made, times) == pytest.approx(expected, abs=1e-9), (
                    made.name,
                    ranks,
                    microbatches,
                    times,
                )


def bubble(made: Schedule, times: Three) -> float:
    """Makespan beyond the work of one rank, which has `times` in all."""
    forward, backward, weight = (t * made.ranks / made.stages for t in times)
    return simulate(
        made, ActionCosts(forward, backward, weight)
    ).makespan_s - made.microbatches * sum(times)


def test_zb_h2_leaves_no_gap_within_a_rank() -> None:
    """Between its first and last action a rank idles (p-1) max(0, F+B-2W): the bubble of the
    paper."""
    for ranks, microbatches in ((p, m) for p, m in SIZES if m >= 2 * p - 1):
        for times in SMALL_W:
            lanes = simulate(
                schedules.make_schedule("zb-h2", ranks, microbatches), ActionCosts(*times)
            ).lanes
            idle = max(lane.stop_s[-1] - lane.start_s[0] for lane in lanes) - microbatches * sum(
                times
            )
            forward, backward, weight = times
            assert idle == pytest.approx(
                (ranks - 1) * max(0, forward + backward - 2 * weight), abs=1e-9
            )


@pytest.mark.parametrize("chunks", [2, 3])
def test_interleaved_with_an_incomplete_group(chunks: int) -> None:
    """At most (v-1)(p - m % p) chunk times more than with full groups."""
    for ranks, microbatches in ((p, m) for p, m in SIZES if m % p):
        for times in ANY:
            found = bubble(
                schedules.make_schedule("interleaved", ranks, microbatches, chunks=chunks), times
            )
            least = (ranks - 1) * sum(times) / chunks
            more = (chunks - 1) * (ranks - microbatches % ranks) * sum(times) / chunks
            assert least - 1e-9 <= found <= least + more + 1e-9


def test_the_pictures_show_what_is_built() -> None:
    """The picture in the docstring of each file."""
    seen = set()
    for info in pkgutil.iter_modules(schedules.__path__):
        module = importlib.import_module(f"{schedules.__name__}.{info.name}")
        text = module.__doc__ or ""
        if size := re.search(r"(\d+) ranks, (\d+) microbatches", text):
            lines = re.findall(r"rank \d+ +((?:\d+[FBWU]\d+ *)+)$", text, re.MULTILINE)
            if lines:
                assert schedules.make_schedule(
                    module.NAME, int(size[1]), int(size[2])
                ).order == rows(*lines), info.name
                seen.add(module.NAME)
    assert seen >= {name for name, _ in VARIANTS}


def test_interleaved_is_megatrons_order() -> None:
    """Figure 4 of Narayanan et al. 2021: 4 ranks, 8 microbatches, 2 chunks; the last rank."""
    last = rows(
        "3F0 3F1 3F2 3F3 7F0 7B0 7F1 7B1 7F2 7B2 7F3 7B3 3F4 3B0 3F5 3B1 3F6 3B2 3F7 3B3"
        " 7F4 7B4 7F5 7B5 7F6 7B6 7F7 7B7 3B4 3B5 3B6 3B7"
    )[0]
    assert schedules.make_schedule("interleaved", 4, 8).order[3] == last


def test_dualpipev_writes_overlapped_pairs_as_neighbours() -> None:
    """On every rank m - 2p + 1 + rank times: a forward of one chunk, a whole backward of the other,
    and in turn."""
    made = schedules.make_schedule("dualpipev", 4, 20)
    split = {a[1:] for actions in made.order for a in actions if a.kind == "W"}
    for rank, actions in enumerate(made.order):
        chunk = {rank: 0, 7 - rank: 1}
        words = ["." if a[1:] in split else f"{a.kind}{chunk[a.stage]}" for a in actions]
        text = " ".join(
            w if a.kind != "F" else f"F{chunk[a.stage]}"
            for w, a in zip(words, actions, strict=True)
        )
        assert f"{'F0 B1 F1 B0 ' * (20 - 8 + 1 + rank)}" in text + " "


def test_pipedream_updates() -> None:
    for ranks, microbatches in SIZES:
        each = schedules.make_schedule("pipedream", ranks, microbatches)
        assert weight_updates(each) == tuple(range(microbatches))
        ends = weight_updates(
            schedules.make_schedule("pipedream", ranks, microbatches, versions="2bw")
        )
        sizes = [end - start for start, end in zip((-1, *ends), ends)]
        assert sum(sizes) == microbatches
        assert all(ranks <= size < 2 * ranks for size in sizes) or len(sizes) == 1
    used = versions_used(schedules.make_schedule("pipedream", 3, 6))
    assert [used[0, m] for m in range(6)] == [0, 0, 0, 1, 2, 3]
    assert [used[2, m] for m in range(6)] == [0, 1, 2, 3, 4, 5]


def random_schedule(rng: random.Random) -> Schedule:
    """Any placement, any order that can run, any backward whole or split."""
    ranks, stages, microbatches = rng.randint(1, 4), rng.randint(1, 6), rng.randint(1, 5)
    placement = tuple(rng.randrange(ranks) for _ in range(stages))
    waiting = [
        Action(kind, s, m)
        for kind in ("F", "B")
        for s in range(stages)
        for m in range(microbatches)
    ]
    waiting += [
        Action("W", s, m) for s in range(stages) for m in range(microbatches) if rng.random() < 0.5
    ]
    made, done = Schedule("random", placement, ((),) * ranks), set[Action]()
    order: list[list[Action]] = [[] for _ in range(ranks)]
    while waiting:
        chosen = rng.choice([a for a in waiting if done.issuperset(made.needs(a))])
        waiting.remove(chosen)
        done.add(chosen)
        order[placement[chosen.stage]].append(chosen)
    return replace(made, order=tuple(map(tuple, order)))


def runs(made: Schedule) -> bool:
    """Whether the order can be carried out to its end: the definition, by trying again and
    again."""
    left, done, moved = [list(actions) for actions in made.order], set[Action](), True
    while moved:
        moved = False
        for actions in left:
            while actions and done.issuperset(made.needs(actions[0])):
                done.add(actions.pop(0))
                moved = True
    return not any(left)


def with_row(made: Schedule, rank: int, row: list[Action]) -> Schedule:
    return replace(made, order=(*made.order[:rank], tuple(row), *made.order[rank + 1 :]))


CASES = range(150)


def to_break(seed: int) -> tuple[Schedule, random.Random, int, int]:
    """A random schedule and one of its actions: (schedule, source of randomness, rank,
    position)."""
    rng = random.Random(seed)
    made = random_schedule(rng)
    assert find_faults(made) == ()
    rank = rng.choice([r for r, actions in enumerate(made.order) if actions])
    position = rng.randrange(len(made.order[rank]))
    return made, rng, rank, position


@pytest.mark.parametrize("seed", CASES)
def test_a_mutation_is_named(seed: int) -> None:
    made, rng, rank, position = to_break(seed)
    chosen = made.order[rank][position]
    row = list(made.order[rank])
    others = [r for r in range(made.ranks) if r != rank]

    dropped = find_faults(with_row(made, rank, row[:position] + row[position + 1 :]))
    if chosen.kind == "W":
        assert dropped == ()  # its B is now the whole backward
    elif made.microbatches == 1 + max(
        (a.microbatch for a in flat(made) if a != chosen), default=-1
    ):
        assert dropped == (f"{chosen} is missing on rank {rank}",)

    again = rng.randint(position + 1, len(row))
    doubled = find_faults(with_row(made, rank, [*row[:again], chosen, *row[again:]]))
    assert doubled == (f"{chosen} on rank {rank} stands twice: rank {rank} has it before",)

    for other in others[:1]:
        there = list(made.order[other])
        there.insert(rng.randint(0, len(there)), chosen)
        moved = with_row(with_row(made, rank, row[:position] + row[position + 1 :]), other, there)
        assert (
            f"{chosen} on rank {other} is misplaced: stage {chosen.stage} lies on rank {rank}"
            in find_faults(moved)
        )

    for label, words in (
        (chosen._replace(kind="X"), "'X' is not a kind (F, B, W, U)"),  # type: ignore[arg-type]
        (
            chosen._replace(stage=made.stages),
            f"there is no stage {made.stages}, only 0 to {made.stages - 1}",
        ),
        (chosen._replace(microbatch=-1), "there is no microbatch -1"),
        (chosen._replace(kind="U"), None),
    ):
        faults = find_faults(with_row(made, rank, [*row[:position], label, *row[position + 1 :]]))
        if words:
            assert f"{label} on rank {rank}: {words}" in faults
        else:
            assert any("the schedule has no `versions`" in fault for fault in faults)


def flat(made: Schedule) -> list[Action]:
    return [a for actions in made.order for a in actions]


@pytest.mark.parametrize("seed", CASES)
def test_a_wrong_order_is_named(seed: int) -> None:
    """Any two actions of a rank swapped: a fault exactly where the order cannot run, and it is a
    true one."""
    made, rng, rank, position = to_break(seed)
    for other in rng.sample(range(len(made.order[rank])), min(8, len(made.order[rank]))):
        row = list(made.order[rank])
        row[position], row[other] = row[other], row[position]
        swapped = with_row(made, rank, row)
        faults = find_faults(swapped)
        assert (faults == ()) == runs(swapped)
        for fault in faults:
            if found := re.fullmatch(
                r"(\w+) on rank (\d+) stands before (\w+), which it needs", fault
            ):
                actions = swapped.order[int(found[2])]
                early, need = action(found[1]), action(found[3])
                assert need in swapped.needs(early)
                assert actions.index(early) < actions.index(need)
            else:
                holds_up(swapped, fault)


def holds_up(made: Schedule, fault: str) -> None:
    """The circle that a deadlock names is one: each rank waits for what the next one has not
    reached."""
    assert fault.startswith("deadlock: "), fault
    waits = [
        (int(rank), action(at), action(need))
        for rank, at, need in re.findall(r"rank (\d+) waits at (\w+) for (\w+)", fault)
    ]
    assert len(waits) > 1
    for (_, at, need), (rank, blocked, _) in zip(waits, waits[1:] + waits[:1]):
        assert need in made.needs(at)
        assert made.order[rank].index(blocked) <= made.order[rank].index(need)


def test_a_deadlock_in_words() -> None:
    made = Schedule("mine", (0, 1), rows("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"))
    assert find_faults(made) == (
        "deadlock: rank 0 waits at 0B0 for 1B0, rank 1 waits at 1F1 for 0F1",
    )


def test_a_w_without_its_b() -> None:
    made = Schedule("mine", (0,), rows("0F0 0W0"))
    assert find_faults(made) == ("0B0 is missing on rank 0",)


def test_a_placement_beyond_the_ranks() -> None:
    assert (
        find_faults(Schedule("mine", (0, 3), rows("0F0 0B0")))[0]
        == "stage 1 lies on rank 3, and there are 1 ranks"
    )


@pytest.mark.parametrize(
    ("order", "fault"),
    [
        ("0F0 0B0 0U0 0F1 0B1", "0U1 is missing on rank 0"),
        ("0F0 0B0 0U0 0F1 0U1 0B1", "0U1 on rank 0 stands before 0B1, whose gradient it applies"),
        (
            "0F0 0F1 0B0 0B1 0U0 0U1",
            "0U0 on rank 0 stands after 0B1, whose gradient is not its own",
        ),
        (
            "0F0 0B0 0U0 0W0 0F1 0B1 0U1",
            "0U0 on rank 0 stands before 0W0, whose gradient it applies",
        ),
        ("0F0 0B0 0U0 0U0 0F1 0B1 0U1", "0U0 on rank 0 stands twice: rank 0 has it before"),
    ],
)
def test_updates_are_held_to_their_gradients(order: str, fault: str) -> None:
    assert find_faults(Schedule("mine", (0,), rows("0F0 0B0 0U0 0F1 0B1 0U1"), "stash")) == ()
    assert find_faults(Schedule("mine", (0,), rows(order), "stash")) == (fault,)


def test_all_stages_update_after_the_same_microbatches() -> None:
    made = Schedule("mine", (0, 1), rows("0F0 0F1 0B0 0U0 0B1 0U1", "1F0 1B0 1F1 1B1 1U1"), "stash")
    assert find_faults(made) == ("1U0 is missing on rank 1",)


def test_a_version_is_made_before_it_is_used() -> None:
    order = rows("0F0 0B0 0U0 0F1 0B1 0U1", "1F0 1B0 1F1 1U0 1B1 1U1")
    assert find_faults(Schedule("mine", (0, 1), order, "stash")) == ()
    fault = "1F1 on rank 1 stands before version 1 of its weights is made"
    assert find_faults(Schedule("mine", (0, 1), order, "vertical")) == (fault,)


@pytest.mark.parametrize("seed", range(30))
def test_a_random_schedule_survives_csv(seed: int) -> None:
    made = random_schedule(random.Random(seed))
    assert from_csv(to_csv(made), "random") == made


def test_csv_of_other_hands() -> None:
    """Spaces, empty cells (waiting), blank lines, comments; and torch's I, the gradient of the
    input alone."""
    read = from_csv("# made by hand\n0F0, 0F1 ,,0I0,0W0,0B1\n\n,1F0,1I0,1W0,1F1,1B1\n", "mine")
    assert read == Schedule("mine", (0, 1), rows("0F0 0F1 0B0 0W0 0B1", "1F0 1B0 1W0 1F1 1B1"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0F0,0B0\n1F0,1X0\n", "pipeline.schedule = '1X0': mine, line 2, column 2: not an action"),
        (
            "0F0,0B0\n0F1,0B1\n",
            "pipeline.schedule = '0F1': mine, line 2, column 1: stage 0 is on rank 0 already",
        ),
        (
            "# versions = 3bw\n0F0,0B0\n",
            "mine, line 1, column 1: not a way to keep weights. Choose one of stash",
        ),
        ("0F0,0B0\n2F0,2B0\n", "pipeline.schedule = 'mine': no rank runs stage 1"),
        ("\n", "pipeline.schedule = 'mine': no actions"),
    ],
)
def test_bad_csv_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        from_csv(text, "mine")


@pytest.mark.parametrize(
    ("call", "field", "words"),
    [
        (("1f1", 2, 4, {}), "pipeline.schedule", 'did you mean "1f1b"?'),
        (("interleaved", 2, 4, {"chunk": 2}), "pipeline.chunk", 'did you mean "chunks"?'),
        (("gpipe", 2, 4, {"chunks": 2}), "pipeline.chunks", "it takes none"),
        (("interleaved", 2, 4, {"chunks": 0}), "pipeline.chunks", "use 1 or more"),
        (("bfs", 2, 4, {"chunks": True}), "pipeline.chunks", "use 1 or more"),
        (("pipedream", 2, 4, {"versions": "stach"}), "pipeline.versions", 'did you mean "stash"?'),
        (("1f1b", 0, 4, {}), "pipeline.ranks", "use a whole number from 1"),
        (("1f1b", 2, 0, {}), "pipeline.microbatches", "use a whole number from 1"),
    ],
)
def test_what_cannot_be_is_refused(
    call: tuple[str, int, int, dict[str, Any]], field: str, words: str
) -> None:
    name, ranks, microbatches, options = call
    with pytest.raises(ConfigError) as refused:
        schedules.make_schedule(name, ranks, microbatches, **options)
    assert refused.value.field == field
    assert words in refused.value.fix


def test_ones_own_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedules, "_registered", {})

    @schedules.register
    def mine(ranks: int, microbatches: int, *, last: Kind = "B") -> Schedule:
        row = [Action(kind, 0, m) for m in range(microbatches) for kind in ("F", last)]
        return Schedule("mine", (0,), (tuple(row),))

    assert schedules.make_schedule("mine", 1, 2).order == rows("0F0 0B0 0F1 0B1")
    assert schedules.registry()["mine"] is mine
    with pytest.raises(
        ConfigError, match=re.escape("0B0 is missing on rank 0; 0B1 is missing on rank 0;")
    ) as refused:
        schedules.make_schedule("mine", 1, 3, last="W")
    assert refused.value.field == "pipeline.schedule"
    assert schedules.register(mine, "another") is schedules.registry()["another"]
    with pytest.raises(ConfigError, match="Choose another name"):
        schedules.register(mine, "1f1b")
