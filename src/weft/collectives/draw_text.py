"""An algorithm in the terminal: after each step, a row per rank with what it holds and what it got.

step 1             chunks held                what came
rank 0  0...  ...  0..3                       chunk 3 from 3
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.text import Text

from weft.core import translate
from weft.pipeline import seconds_text

from .algorithm import Held, Message
from .chunk_states import run_steps
from .describe import headline, is_final, require_drawable, shown_chunks, time_lines, traffic_line
from .traffic import Traffic


def collective_text(drawn: Sequence[Traffic], *, colour: bool = False) -> Text:
    """All of them, one under the other. A chunk is written as the ranks whose input is in it, as
    `0..3`, or, where nothing is added, as its number. With `colour`, what is as promised at the end
    is green. Raises ConfigError for more ranks than a row shows."""
    require_drawable(drawn)
    lines = [line for traffic in drawn for line in (*_lines(traffic, colour), Text())]
    return Text("\n").join([*lines, Text(_legend(drawn))])


def _lines(traffic: Traffic, colour: bool) -> Iterator[Text]:
    made, states, shown = traffic.algorithm, run_steps(traffic.algorithm), shown_chunks(traffic)
    yield Text(translate(headline(traffic)), style="bold" if colour else "")
    yield from map(Text, map(translate, time_lines(traffic)))
    yield Text(translate(traffic_line(traffic)))
    yield from (Text(), Text(translate("before")))
    yield from _rows(traffic, states[0], (), shown, colour)
    number = 0
    for phase in made.phases:
        for step in phase.steps:
            number += 1
            took = seconds_text(traffic.step_s[number - 1])
            yield from (Text(), Text(translate(f"step {number}, {phase.name}: {took}")))
            yield from _rows(traffic, states[number], step, shown, colour)


def _rows(
    traffic: Traffic,
    state: Sequence[Held],
    step: Sequence[Message],
    shown: Sequence[Sequence[int]],
    colour: bool,
) -> Iterator[Text]:
    made = traffic.algorithm
    every = sorted({chunk for chunks in shown for chunk in chunks})
    wide = made.ranks if made.sums else max(len(made.chunk_name(chunk)) for chunk in every)
    room = max(map(len, shown)) * (wide + 1)
    for rank, held in enumerate(state):
        line = Text(f"  rank {rank}  ")
        for chunk in shown[rank]:
            final = colour and is_final(traffic, rank, chunk, held)
            line.append(_cell(traffic, chunk, held).ljust(wide), "green" if final else "")
            line.append(" ")
        line.append(" " * (room - len(shown[rank]) * (wide + 1)))
        came = [(m.chunk, m.source) for m in step if m.target == rank]
        if came:
            whole = made.chunks == 1
            words = [
                translate(f"from {s}" if whole else f"{made.chunk_name(c)} from {s}")
                for c, s in sorted(came)
            ]
            line.append(f" {translate('gets')} {', '.join(words)}")
        line.rstrip()
        yield line


def _cell(traffic: Traffic, chunk: int, held: Held) -> str:
    made, ranks = traffic.algorithm, held.get(chunk, frozenset())
    if made.sums:
        return "".join(str(rank) if rank in ranks else "." for rank in range(made.ranks))
    return made.chunk_name(chunk) if ranks else "."


def _legend(drawn: Sequence[Traffic]) -> str:
    said = []
    if any(traffic.algorithm.sums for traffic in drawn):
        said.append(translate("0..3: a chunk in which the inputs of ranks 0 and 3 are summed"))
    if any(not traffic.algorithm.sums for traffic in drawn):
        held = "a number is a chunk that the rank holds, a dot one that it lacks"
        said.append(translate(held))
    return "; ".join(said)
