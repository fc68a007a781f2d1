"""What each pair runs and does without a change; kept in a file, as tracing takes minutes."""

from __future__ import annotations

import hashlib
import pickle
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from observed import Died, Outcome, in_a_process, observed
from subjects import PAIRS, Pair
from traces import Line, Place, traced

import weft
from weft.core.errors import WeftError
from weft.launch.local_workers import Pool

TIMEOUT_S = 300.0


@dataclass
class Reached:
    """By index of PAIRS: seconds, what it does, and where in the model its lines run. `lines`: the
    pairs that run each line."""

    seconds: dict[int, float]
    clean: dict[int, Outcome]
    places: dict[int, dict[Line, Place]]
    lines: dict[Line, list[int]]

    def place(self, index: int, line: Line) -> Place | None:
        """The modules in whose forwards a pair runs a line first and last; None where it runs
        outside of them, or in the model's own."""
        found = self.places[index].get(line)
        return None if found is None or "" in found else found

    def in_modules(self) -> set[Line]:
        """The lines that run in forwards of modules."""
        each = self.places.items()
        return {at for i, places in each for at in places if self.place(i, at) is not None}

    def chosen(self, line: Line, late: bool) -> list[int]:
        """The pairs that run a line: of each kind the quickest, those first. `late`: with late
        messages alone where they run it."""
        pairs = sorted(self.lines[line], key=lambda index: self.seconds[index])
        if late:
            wanted = [i for i in pairs if PAIRS[i].way == "late"]
            return wanted or [i for i in pairs if PAIRS[i].way != "late"]
        of_kind: dict[str, list[int]] = defaultdict(list)
        for index in pairs:
            if PAIRS[index].way != "late":
                of_kind[PAIRS[index].kind].append(index)
        rest = [index for each in of_kind.values() for index in each[1:]]
        return [each[0] for each in of_kind.values()] + rest


def reached_lines(pool: Pool, pairs: Sequence[Pair]) -> Reached:
    """Of the source as it is. `pairs`: some of PAIRS, in their order."""
    source = hashlib.sha256()
    here = Path(__file__).parent
    files = [*Path(weft.__file__).parent.rglob("*.py"), here / "subjects.py", here / "training.py"]
    for path in sorted(files):
        source.update(path.read_bytes())
    folder = Path(tempfile.gettempdir(), f"weft-mutations-{source.hexdigest()[:16]}")
    folder.mkdir(exist_ok=True)
    found = Reached({}, {}, {}, {})
    for pair in pairs:
        index = PAIRS.index(pair)
        kept = folder / str(pair)
        if not kept.exists():
            kept.write_bytes(pickle.dumps(_traced(pool, pair)))
        seconds, clean, lines, places = pickle.loads(kept.read_bytes())
        print(f"{pair}: {clean.says or 'equal'} {seconds:.1f} s", flush=True)
        if clean.says:
            raise SystemExit(f"{pair} is not equal without a change")
        found.seconds[index] = seconds
        found.clean[index] = clean
        found.places[index] = places
        for line in lines:
            found.lines.setdefault(line, []).append(index)
        if pair.way == "late":  # it runs the lines of the same pair without late messages
            before = PAIRS.index(Pair("verify", pair.model, pair.layout))
            for those in found.lines.values():
                those += [index] if before in those else []
    return found


def _traced(pool: Pool, pair: Pair) -> tuple[float, Outcome, set[Line], dict[Line, Place]]:
    lines, places = set[Line](), dict[Line, Place]()
    if pair.way == "deep":
        lines, _ = in_a_process(traced, pair, timeout=TIMEOUT_S)
    elif pair.way == "verify":
        for ran, of_rank in pool.run(traced, pair, world=pair.world, timeout=TIMEOUT_S):
            lines |= ran
            for line, (first, last) in of_rank.items():
                places[line] = places.get(line, (first, ""))[0], last
    start = time.perf_counter()
    try:
        if pair.way == "deep":
            clean = in_a_process(observed, pair, timeout=TIMEOUT_S)
        else:
            clean = pool.run(observed, pair, world=pair.world, timeout=TIMEOUT_S)[0]
    except (WeftError, Died) as error:
        raise SystemExit(f"{pair}: {error}") from None
    return time.perf_counter() - start, clean, lines, places
