"""Each algorithm does what its collective promises, in the time of its formula, and sends what
weft's own ring and servers send."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest

from weft.collectives import (
    CollectiveAlgorithm,
    Links,
    Phase,
    algorithms,
    find_algorithm_faults,
    run_steps,
    traffic_of,
)
from weft.core import ConfigError, ReplicaView, RequestSize
from weft.parallel import CHUNK_BYTES, request_traffic

ONE = Links((3e-6, 3e-6), (7e9, 7e9))
TWO = Links((3e-6, 2e-5), (300e9, 7e9))


def variants(ranks: int) -> list[CollectiveAlgorithm]:
    """Every algorithm of the folder over so many ranks, with every value of its option."""
    found = []
    for name, make in algorithms.registry().items():
        _, *options = inspect.signature(make).parameters
        for value in range(1, ranks + 1) if options else [0]:
            if options != ["local"] or ranks % value == 0:
                own = dict.fromkeys(options, value)
                found.append(algorithms.make_algorithm(name, ranks, **own))
    return found


SIZES = range(2, 10)
ALL = [
    pytest.param(one, id=f"{one.name}-{one.ranks}-{i}")
    for p in SIZES
    for i, one in enumerate(variants(p))
]


@pytest.mark.parametrize("made", ALL)
def test_an_algorithm_does_what_its_collective_promises(made: CollectiveAlgorithm) -> None:
    assert not find_algorithm_faults(made)
    assert len(run_steps(made)) == len(made.steps) + 1
    assert all(made.steps), "no step is empty"


@pytest.mark.parametrize("made", ALL)
def test_no_message_is_superfluous(made: CollectiveAlgorithm) -> None:
    """Without any one of its messages it does something else."""
    for place, phase in enumerate(made.phases):
        for number, step in enumerate(phase.steps):
            for left in range(len(step)):
                steps = [*phase.steps]
                steps[number] = step[:left] + step[left + 1 :]
                phases = [*made.phases]
                phases[place] = Phase(phase.name, tuple(steps))
                assert find_algorithm_faults(replace(made, phases=tuple(phases)))


@pytest.mark.parametrize("made", ALL)
def test_the_formula_is_the_time_of_the_steps(made: CollectiveAlgorithm) -> None:
    links = replace(TWO, local=made.symbols["l"]) if "l" in made.symbols else ONE
    traffic = traffic_of(made, 1e8, links)
    found = traffic.formula()
    assert found is not None
    values = {
        "p": made.ranks,
        "size": 1e8,
        "latency": links.latency_s[0],
        "bandwidth": links.bandwidth_bps[0],
        "latency_between": links.latency_s[1],
        "bandwidth_between": links.bandwidth_bps[1],
        **made.symbols,
    }
    assert eval(found[0].replace(" x ", " * "), {}, values) == pytest.approx(traffic.seconds)
    assert eval(found[1].replace(" x ", " * ")) == pytest.approx(traffic.seconds, rel=1e-3)


@pytest.mark.parametrize("ranks", SIZES)
def test_bytes_of_each_rank(ranks: int) -> None:
    """A ring's do not grow with the ranks; a server's do."""
    size = 1e6

    def sent(name: str, **options: int) -> tuple[float, ...]:
        made = algorithms.make_algorithm(name, ranks, **options)
        return traffic_of(made, size, ONE).sent_bytes

    share = (ranks - 1) / ranks
    assert sent("ring") == pytest.approx((2 * share * size,) * ranks)
    for name in ("reduce_scatter", "all_gather", "all_to_all"):
        assert sent(name) == pytest.approx((share * size,) * ranks)
    assert sent("central") == pytest.approx(((ranks - 1) * size, *(size,) * (ranks - 1)))
    even = sent("parameter_server", servers=ranks)
    assert even == pytest.approx((2 * share * size,) * ranks)
    assert sum(sent("tree")) == pytest.approx(2 * (ranks - 1) * size)


@pytest.mark.parametrize("ranks, local", [(2, 1), (4, 1), (5, 1), (4, 2), (6, 3), (8, 2), (9, 3)])
def test_what_is_drawn_is_what_the_ring_of_a_run_sends(ranks: int, local: int) -> None:
    """Message by message of every rank: [sync] name = "ring"."""
    if local == 1:
        made = algorithms.make_algorithm("ring", ranks)
    else:
        made = algorithms.make_algorithm("hierarchical", ranks, local=local)
    each = 256
    assert each * ranks // local * 4 <= CHUNK_BYTES, "a segment is one message"
    asked = RequestSize("sum", ranks * each, 4)
    for rank in range(ranks):
        run = [n for _, n in request_traffic("ring", local, asked, ReplicaView(ranks, rank), 0)]
        counts = [sum(m.source == rank for m in step) for step in made.steps]
        drawn = [count * each * 4 for count in counts]
        # a run tells of both halves of the inner ring first
        assert sorted(drawn) == sorted(run)
        if local == 1:
            assert drawn == run


@pytest.mark.parametrize("ranks", SIZES)
def test_what_is_drawn_is_what_the_server_of_a_run_sends(ranks: int) -> None:
    sent = traffic_of(algorithms.make_algorithm("central", ranks), 4e3, ONE).sent_bytes
    asked = RequestSize("sum", 1000, 4, final=False)
    for rank in range(ranks):
        run = request_traffic("owners", 1, asked, ReplicaView(ranks, rank), 0)
        assert sum(nbytes for _, nbytes in run) == sent[rank]


def test_a_slow_network_counts_where_messages_cross_it() -> None:
    made = algorithms.make_algorithm("tree", 4)
    flat, across = (traffic_of(made, 1e8, replace(TWO, local=n)) for n in (4, 2))
    assert flat.formula() is not None and across.formula() is None
    inside, between = (TWO.latency_s[i] + 1e8 / TWO.bandwidth_bps[i] for i in (0, 1))
    assert flat.step_s == pytest.approx([inside] * 4)
    assert across.step_s == pytest.approx([inside, between, between, inside])


@pytest.mark.parametrize(
    "change, fault",
    [
        ({"chunk": 9}, "step 1: rank 0 sends chunk 9, which it does not hold"),
        ({"target": 0}, "step 1: no message goes from rank 0 to rank 0"),
        ({"target": 7}, "step 1: no message goes from rank 0 to rank 7"),
        ({"op": "copy"}, "step 1: rank 1 loses the input of ranks [1] in chunk 0"),
    ],
)
def test_faults_are_named(change: dict, fault: str) -> None:
    made = algorithms.make_algorithm("ring", 4)
    (first, *others), *rest = made.phases[0].steps
    changed = Phase("x", ((first._replace(**change), *others), *rest))
    found = find_algorithm_faults(replace(made, phases=(changed, *made.phases[1:])))
    assert any(one.startswith(fault) for one in found), found
    assert any(one.startswith("at the end rank") for one in found)


@pytest.mark.parametrize("op", ["add", "copy"])
def test_what_comes_twice_is_named(op: str) -> None:
    made = algorithms.make_algorithm("central" if op == "add" else "broadcast", 4)
    first, *rest = made.phases
    step = (*first.steps[0], first.steps[0][0])
    doubled = replace(made, phases=(Phase("x", (step, *first.steps[1:])), *rest))
    assert "twice" in find_algorithm_faults(doubled)[0]


@pytest.mark.parametrize(
    "arguments, problem",
    [
        (("rings", 4), 'Did you mean "ring"'),
        (("ring", 1), "a collective needs at least two ranks"),
        (("ring", 4, {"servers": 2}), "ring has no such option. It takes none"),
        (("hierarchical", 4, {"local": 3}), "does not divide 4 ranks"),
        (("parameter_server", 4, {"servers": 5}), "give a number from 1 to 4"),
    ],
)
def test_what_cannot_be_made_is_refused(arguments: tuple, problem: str) -> None:
    name, ranks, *options = arguments
    with pytest.raises(ConfigError) as refused:
        algorithms.make_algorithm(name, ranks, **(options[0] if options else {}))
    assert problem.lower() in str(refused.value).lower()
