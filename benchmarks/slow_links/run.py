"""Replicas over slow links: how soon each way to agree reaches the loss that plain DDP has after
600 steps.

    python benchmarks/slow_links/run.py  # all of it: about three hours on 2 idle cores
    python benchmarks/slow_links/run.py time --rates 25 --sides "torch ddp" "weft int4"
    python benchmarks/slow_links/run.py train --sides "torch ddp" --steps 600

`train` runs each side once without a limit, for its loss by steps. What a step computes does not
depend on the link, so `time` measures seconds and bytes of a step on each link alone, and the
tables multiply: steps to the loss x seconds of a step, the median over all runs of `time`. Each
part adds to results/PART.json, then the tables in README.md are written anew; `table` does only
that. Exit code 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import testbed  # noqa: E402
import torch  # noqa: E402
from sides import PERIOD, SIDES, WARMUP  # noqa: E402

RESULTS, README = HERE / "results", HERE / "README.md"
BEGIN, END = "<!-- results: written by run.py -->", "<!-- end of results -->"
RATES = (1000.0, 100.0, 25.0)  # Mbit/s
STEPS, EVERY, TARGET = 900, 25, 600  # of DDP, 600 are enough
WARM, TIMED = 4, 12  # steps before those that are timed, and at least so many of them
ASKED = {
    25.0: (15.0, 2.0),
    100.0: (5.0, 1.3),
    1000.0: (1.0, None),
}  # times sooner than DDP, than torch's best hook
PLAIN = "torch ddp"
MARKS = (TARGET, 400, 200, 100)  # steps of DDP whose losses are looked for


def train(side: str, replicas: int, steps: int) -> dict[str, Any]:
    """Loss by steps, with all replicas on one host."""
    found = _worker(side, replicas, steps, EVERY, timeout_s=20.0 * steps, apart=False)
    return {"val_loss": found["val_loss"], "loss": found["loss"]}


def timed(side: str, replicas: int, rate: float, python: str) -> dict[str, Any]:
    """Seconds and bytes of a step on links of this rate, as means over whole periods: exchanges
    come now and then."""
    testbed.limit(replicas, rate)
    sync = SIDES[side].weft
    period = int(sync[2].get("period", 1)) if sync is not None else PERIOD if "local" in side else 1
    # torch's hooks begin later than the first step, and weft's exchanges with the first period
    warm = WARM + (period if sync is not None else 0 if side == PLAIN else WARMUP)
    count = period * -(-TIMED // period) * (2 if period > 1 and sync is not None else 1)
    found = _worker(side, replicas, warm + count, 10**6, timeout_s=1800, apart=True, python=python)
    sent = found["sent_bytes"]
    return {
        "step_s": max(statistics.mean(own[warm:]) for own in found["step_s"]),
        "sent_bytes": (sent[-1] - sent[warm - 1]) / count,
        "steps": count,
        "median_s": max(statistics.median(own[warm:]) for own in found["step_s"]),
        "elsewhere": found["elsewhere"],
    }


def _worker(
    side: str,
    replicas: int,
    steps: int,
    every: int,
    timeout_s: float,
    apart: bool,
    python: str = sys.executable,
) -> dict[str, Any]:
    script = HERE / ("others.py" if SIDES[side].other else "worker.py")
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "out.json"
        command = [python, str(script), side, str(steps), str(every), str(output)]
        elsewhere = testbed.run(replicas, command, timeout_s, apart=apart)
        return {"elsewhere": elsewhere, **json.loads(output.read_text())}


def steps_to(losses: dict[str, float], target: float) -> float | None:
    """The steps after which the validation loss is first at most the target, between two
    evaluations by a line."""
    before: tuple[int, float] | None = None
    for step, loss in sorted((int(s), loss) for s, loss in losses.items()):
        if loss <= target:
            if before is None:
                return float(step)
            return before[0] + (step - before[0]) * (before[1] - target) / (before[1] - loss)
        before = step, loss
    return None


def _median(measured: list[dict[str, float]]) -> dict[str, float]:
    """Of measurements of the same, made at other times."""
    return {
        key: statistics.median(each[key] for each in measured) for key in ("step_s", "sent_bytes")
    }


class Found:
    """What was measured with so many replicas. The target is the loss that DDP has after `mark`
    steps."""

    def __init__(self, results: dict[str, dict[str, Any]], replicas: str, mark: int = TARGET):
        self.mark = mark
        trained = results.get("train", {}).get("runs", {})
        # DDP's losses are those of the batch, on however many replicas
        plain = {PLAIN: trained["2"][PLAIN]} if PLAIN in trained.get("2", {}) else {}
        self.train: dict[str, Any] = plain | trained.get(replicas, {})
        self.time: dict[str, Any] = {
            rate: {side: _median(entry["measured"]) for side, entry in sides.items()}
            for rate, sides in results.get("time", {}).get("runs", {}).get(replicas, {}).items()
        }
        self.target: float | None = self.train.get(PLAIN, {}).get("val_loss", {}).get(str(mark))

    def steps(self, side: str) -> float | None:
        """To the target."""
        if side == PLAIN or self.target is None:
            return float(self.mark) if self.target is not None else None
        return steps_to(self.train.get(self.curve(side), {}).get("val_loss", {}), self.target)

    def curve(self, side: str) -> str:
        """The side whose losses this one has."""
        same = SIDES[side].same
        return same if same and side not in self.train else side

    def seconds(self, side: str, rate: float) -> float | None:
        """To the target."""
        steps, took = self.steps(side), self.time.get(f"{rate:g}", {}).get(side)
        return None if steps is None or took is None else steps * took["step_s"]

    def at_least(self, side: str, rate: float) -> float | None:
        """Seconds to the target, or those that were not enough."""
        took, losses = (
            self.time.get(f"{rate:g}", {}).get(side),
            self.train.get(self.curve(side), {}).get("val_loss"),
        )
        if took is None or not losses:
            return None
        return (self.steps(side) or max(map(int, losses))) * took["step_s"]

    def best(self, rate: float, weft: bool) -> tuple[float, str] | None:
        """The side that is there first, of weft's or of torch's hooks, and when. A hook that is not
        there in all steps that were trained counts as being there after the last of them."""
        seconds = self.seconds if weft else self.at_least
        sides = [side for side in SIDES if (SIDES[side].weft is not None) == weft and side != PLAIN]
        found = [
            (took, side)
            for side in sides
            if (took := seconds(side, rate)) is not None and not SIDES[side].other
        ]
        return min(found) if found else None


def tables(results: dict[str, dict[str, Any]]) -> tuple[list[str], bool]:
    """The tables of README.md, in Markdown; whether all targets that could be looked at are met."""
    lines: list[str] = []
    held = True
    for replicas in ("2", "4"):
        found = Found(results, replicas)
        if not found.train and not found.time:
            continue
        lines += [f"### {replicas} replicas", ""]
        mark, verdicts = _furthest(results, replicas)
        held &= mark == TARGET and all(verdict for *_, verdict in verdicts)
        if mark != TARGET:
            lines += [
                f"FAIL: no side of weft is trained as far as DDP's loss at {TARGET} steps, so no"
                " target is met."
            ]
            lines += [f"To DDP's loss at {mark} steps:" if verdicts else "", ""]
        if verdicts:
            lines += [
                "| Mbit/s | weft's first | s to the loss | beside | s to the loss | times sooner |"
                " asked | |"
            ]
            lines += ["| ---: | --- | ---: | --- | ---: | ---: | ---: | --- |"]
            for rate, (own, side), (other, beside), asked, verdict in verdicts:
                lines.append(
                    f"| {rate:g} | {side} | {own:.0f} | {beside} | {other:.0f} | {other / own:.2f}"
                    f" | {asked:g} | {'holds' if verdict else 'FAIL'} |"
                )
            lines.append("")
        lines += [*_losses(found), "", *_times(found), ""]
    return lines, held


Rival = tuple[float, str]


def _furthest(results: dict[str, dict[str, Any]], replicas: str) -> tuple[int, list[tuple]]:
    """The last of these steps of DDP whose loss a side of weft is known to reach, and the verdicts
    for that loss."""
    for mark in MARKS:
        if verdicts := _verdicts(Found(results, replicas, mark)):
            return mark, verdicts
    return 0, []


def _verdicts(found: Found) -> list[tuple[float, Rival, Rival, float, bool]]:
    """(rate, weft's first, whom it is held against, times sooner that is asked, whether it is)."""
    rows = []
    for rate, (than_plain, than_hooks) in ASKED.items():
        own, plain, hooks = (
            found.best(rate, weft=True),
            found.seconds(PLAIN, rate),
            found.best(rate, weft=False),
        )
        if own is not None and plain is not None:
            rows.append((rate, own, (plain, PLAIN), than_plain, plain / own[0] >= than_plain))
        if own is not None and hooks is not None and than_hooks is not None:
            rows.append((rate, own, hooks, than_hooks, hooks[0] / own[0] >= than_hooks))
    return rows


def _losses(found: Found) -> list[str]:
    at, marks = [100, 200, 300, 400, 500, TARGET], MARKS[::-1]
    curve = found.train.get(PLAIN, {}).get("val_loss", {})
    lines = [
        "| validation loss after steps | "
        + " | ".join(map(str, at))
        + " | steps to DDP's loss at "
        + " | at ".join(map(str, marks))
        + " | trained |",
        "| --- |" + " ---: |" * (len(at) + len(marks) + 1),
    ]
    for side in (side for side in SIDES if side in found.train):
        losses = found.train[side]["val_loss"]
        cells = [f"{losses[str(n)]:.3f}" if str(n) in losses else "" for n in at]
        for mark in marks:
            reached = steps_to(losses, curve[str(mark)]) if str(mark) in curve else None
            cells.append("" if reached is None else f"{reached:.0f}")
        lines.append(f"| {side} | " + " | ".join(cells) + f" | {max(map(int, losses))} |")
    return lines


def _times(found: Found) -> list[str]:
    lines = [
        "| side | steps |"
        + "".join(f" {rate:g} Mbit/s: MB a step | s a step | s to the loss |" for rate in RATES),
        "| --- | ---: |" + " ---: |" * 3 * len(RATES),
    ]
    for side in SIDES:
        steps, cells = found.steps(side), []
        for rate in RATES:
            took, seconds = found.time.get(f"{rate:g}", {}).get(side), found.seconds(side, rate)
            cells += (
                ["", ""]
                if took is None
                else [f"{took['sent_bytes'] / 1e6:.2f}", f"{took['step_s']:.2f}"]
            )
            cells.append("" if seconds is None else f"{seconds:.0f}")
        if any(cells):
            lines.append(
                f"| {side} | {'' if steps is None else f'{steps:.0f}'} | "
                + " | ".join(cells)
                + " |"
            )
    return lines


def load() -> dict[str, dict[str, Any]]:
    return {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}


def _measured(where: Sequence[str]) -> list[dict[str, float]]:
    """What earlier runs have measured there."""
    place: dict[str, Any] = load().get("time", {}).get("runs", {})
    for key in where:
        place = place.get(key, {})
    return place.get("measured", [])


def keep(part: str, where: Sequence[str], entry: dict[str, Any]) -> None:
    """Puts one measurement, with how it was made, in results/PART.json."""
    path = RESULTS / f"{part}.json"
    results = json.loads(path.read_text()) if path.exists() else {"runs": {}}
    results["environment"] = {
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    place = results["runs"]
    for key in where[:-1]:
        place = place.setdefault(key, {})
    arguments = " ".join(f'"{a}"' if " " in a else a for a in sys.argv[1:])
    place[where[-1]] = {
        **entry,
        "command": f"python benchmarks/slow_links/run.py {arguments}".strip(),
    }
    RESULTS.mkdir(exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help="train, time or table; all if none is named"
    )
    parser.add_argument("--sides", nargs="+", choices=[*SIDES], default=[*SIDES], metavar="SIDE")
    parser.add_argument("--rates", nargs="+", type=float, default=[*RATES], metavar="MBIT")
    parser.add_argument("--replicas", nargs="+", type=int, default=[2])
    parser.add_argument("--others", metavar="PYTHON", help="a Python that has torchft")
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    if unknown := set(options.parts) - {"train", "time", "table"}:
        parser.error(f"no part {', '.join(sorted(unknown))}: choose from train, time, table")
    parts = options.parts or ["train", "time"]
    for replicas in options.replicas if "train" in parts else ():
        for side in (side for side in options.sides if SIDES[side].same is None):
            keep("train", [str(replicas), side], train(side, replicas, options.steps))
    missing = testbed.lacking() if "time" in parts else None
    if missing is not None:
        print(f"time: skipped: {missing}")
    for replicas in options.replicas if "time" in parts and missing is None else ():
        with testbed.hosts(replicas):
            for rate in options.rates:
                for side in options.sides:
                    if SIDES[side].other and options.others is None:
                        print(f"{side}: skipped: name a Python that has torchft with --others")
                        continue
                    python = options.others if SIDES[side].other else sys.executable
                    found = timed(side, replicas, rate, python)
                    place = [str(replicas), f"{rate:g}", side]
                    keep("time", place, {"measured": [*_measured(place), found]})
                    print(f"{side}, {replicas} replicas, {rate:g} Mbit/s: {found}", flush=True)
    lines, held = tables(load())
    text = README.read_text(encoding="utf-8")
    head, tail = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    README.write_text("\n".join([head, "", *lines, tail]), encoding="utf-8")
    print("\n".join(lines))
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
