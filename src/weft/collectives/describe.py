"""What all pictures of an algorithm say in words, and which chunks of a rank they show."""

from __future__ import annotations

from collections.abc import Sequence

from weft.core import ConfigError
from weft.pipeline import bytes_text, seconds_text

from .algorithm import Held, held_after
from .chunk_states import run_steps
from .traffic import Traffic

DRAWN = 10  # ranks at most: as many as colours and digits


def headline(traffic: Traffic) -> str:
    """What it does, over how many ranks, of how much."""
    made, size = traffic.algorithm, bytes_text(traffic.size_bytes)
    cut = f" in {made.parts} chunks of {bytes_text(traffic.chunk_bytes)}" if made.parts > 1 else ""
    own = " on each" if made.kind == "all_to_all" else ""
    kind = "" if made.name == made.kind else f"{made.kind} "
    return f"{made.name}: {kind}over {made.ranks} ranks, {size}{own}{cut}"


def time_lines(traffic: Traffic) -> list[str]:
    """Steps and time: by the formula, with its values, or of each phase where there is none."""
    steps = len(traffic.step_s)
    took = f"{steps} {'steps' if steps > 1 else 'step'}, {seconds_text(traffic.seconds)}"
    found = traffic.formula()
    return [took] if found is None else [took, f"= {found[0]}", f"= {found[1]}"]


def traffic_line(traffic: Traffic) -> str:
    """What ranks send and get; who does more than the others."""
    pairs = [*zip(traffic.sent_bytes, traffic.received_bytes, strict=True)]
    if len(set(pairs)) == 1:
        return f"each rank sends {bytes_text(pairs[0][0])} and gets {bytes_text(pairs[0][1])}"
    total = [sent + got for sent, got in pairs]
    busiest = total.index(max(total))
    sent, got = pairs[busiest]
    share = total[busiest] / (sum(total) / len(total))
    return (
        f"rank {busiest} sends {bytes_text(sent)} and gets {bytes_text(got)}:"
        f" {share:.2g} times the mean of all ranks"
    )


def shown_chunks(traffic: Traffic) -> list[list[int]]:
    """Of each rank the chunks that it ever holds, in order."""
    states = run_steps(traffic.algorithm)
    return [
        sorted({chunk for held in states for chunk in held[rank]})
        for rank in range(traffic.algorithm.ranks)
    ]


def is_final(traffic: Traffic, rank: int, chunk: int, held: Held) -> bool:
    """Whether a rank holds a chunk as the collective promises it."""
    made = traffic.algorithm
    wanted = held_after(made.kind, made.ranks, made.chunks)[rank]
    return chunk in wanted and held.get(chunk) == wanted[chunk]


def require_drawable(drawn: Sequence[Traffic]) -> None:
    """Raises ConfigError for more ranks than a picture shows."""
    for traffic in drawn:
        if (ranks := traffic.algorithm.ranks) > DRAWN:
            fix = "use --json for the figures of more"
            raise ConfigError("--ranks", ranks, f"a picture shows at most {DRAWN}", fix)
