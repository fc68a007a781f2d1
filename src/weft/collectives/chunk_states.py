"""Runs an algorithm on chunks: what each rank holds after every step, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Iterator

from .algorithm import CollectiveAlgorithm, Held, Message, held_after, held_before


def run_steps(algorithm: CollectiveAlgorithm) -> list[list[Held]]:
    """What each rank holds before the first step and after every step: chunk -> the ranks whose
    input is summed in it. Messages that cannot be sent are left out; `find_algorithm_faults` names
    them."""
    return _run(algorithm)[0]


def find_algorithm_faults(algorithm: CollectiveAlgorithm) -> list[str]:
    """What is wrong: messages of chunks that are not there, inputs that are added twice or lost,
    and what a rank does not hold at the end. Empty for a correct algorithm."""
    states, faults = _run(algorithm)
    promised = held_after(algorithm.kind, algorithm.ranks, algorithm.chunks)
    for rank, (held, wanted) in enumerate(zip(states[-1], promised, strict=True)):
        for chunk, ranks in wanted.items():
            if held.get(chunk) != ranks:
                found = sorted(held.get(chunk, ()))
                faults.append(
                    f"at the end rank {rank} holds of chunk {algorithm.chunk_name(chunk)} the input"
                    f" of ranks {found}, not of {sorted(ranks)}"
                )
    return faults


def _run(algorithm: CollectiveAlgorithm) -> tuple[list[list[Held]], list[str]]:
    faults: list[str] = []
    states = [held_before(algorithm.kind, algorithm.ranks, algorithm.chunks)]
    for number, step in enumerate(algorithm.steps, 1):
        before = states[-1]
        after = [dict(held) for held in before]
        written: set[tuple[int, int]] = set()
        for message in step:
            problems = [*_problems(message, algorithm.ranks, before, after, written)]
            faults += [f"step {number}: {problem}" for problem in problems]
            if not problems:
                _, target, chunk, op = message
                came = before[message.source][chunk]
                after[target][chunk] = after[target][chunk] | came if op == "add" else came
                if op == "copy":
                    written.add((target, chunk))
        states.append([*after])
    return states, faults


def _problems(
    message: Message,
    ranks: int,
    before: list[Held],
    after: list[dict[int, frozenset[int]]],
    written: set[tuple[int, int]],
) -> Iterator[str]:
    """Why a message cannot be sent, or what it spoils."""
    source, target, chunk, op = message
    if not (0 <= source < ranks and 0 <= target < ranks) or source == target:
        yield f"no message goes from rank {source} to rank {target}"
    elif chunk not in before[source]:
        yield f"rank {source} sends chunk {chunk}, which it does not hold"
    elif (target, chunk) in written:
        yield f"rank {target} gets chunk {chunk} twice"
    elif op == "add":
        own = after[target].get(chunk)
        if own is None:
            yield f"rank {target} adds to chunk {chunk}, which it does not hold"
        elif twice := own & before[source][chunk]:
            yield f"rank {target} adds the input of ranks {sorted(twice)} to chunk {chunk} twice"
    elif lost := after[target].get(chunk, frozenset()) - before[source][chunk]:
        yield f"rank {target} loses the input of ranks {sorted(lost)} in chunk {chunk}"
