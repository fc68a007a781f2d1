"""Breaks, graphs and recompilations of compiled blocks, after each of five optimizer steps.

    python benchmarks/compile/run.py                    # a sample of the grid
    python benchmarks/compile/run.py --all              # every combination
    python benchmarks/compile/run.py --backend inductor # another compiler

Each combination begins with nothing compiled; its losses are compared with those of the same run
uncompiled. results/BACKEND.json keeps what was found, and README.md its table.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle, product
from pathlib import Path
from typing import Any

import torch
from models import BATCH, MODELS, batch_of
from torch._dynamo.utils import counters

import weft
from weft.core import CompileOptions, Refusal
from weft.launch import Pool
from weft.losses import next_token

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from parts import Results, measure, parser  # noqa: E402

STEPS, WARM = 5, 2  # after WARM steps nothing may be compiled again
CLOSE = 1e-4  # relative, of losses in float32
LAYOUTS = (
    "dp2",
    "fsdp2",
    "fsdp2+zero1",
    "fsdp2+zero2",
    "tp2",
    "tp2+sequence",
    "pp2",
    "dp2.tp2",
    "fsdp2.tp2+sequence",
    "cp2",
    "ep2",
)
KEPT = tuple(product(("none", "selective", "full"), (0.0, 0.1)))  # recompute, dropout
COUNTS = ("graphs", "breaks", "recompilations")


@dataclass(frozen=True)
class Combination:
    model: str
    layout: str
    recompute: str
    dropout: float


@dataclass(frozen=True)
class Found:
    """What one rank saw after each step; `reasons` of its breaks; how far its losses are from the
    uncompiled run's, relative; `refused`: why weft does not run it, and nothing else is there."""

    graphs: Sequence[int] = ()
    breaks: Sequence[int] = ()
    recompilations: Sequence[int] = ()
    reasons: Sequence[str] = ()
    difference: float = 0.0
    seconds: float = 0.0
    refused: str = ""


def grid(whole: bool) -> Iterator[Combination]:
    """All combinations; or every model on every layout, with what it keeps for backward, and
    dropout, in turn."""
    turns = cycle(KEPT)
    for model, layout in product(MODELS, LAYOUTS):
        if layout.startswith("ep") and model != "mixtral":
            continue
        for recompute, dropout in KEPT if whole else [next(turns)]:
            yield Combination(model, layout, recompute, dropout)


# ---- one combination, on every rank --------------------------------------------------------------


def engine_of(wanted: Combination, compile: Any) -> weft.Engine:
    torch.manual_seed(0)
    model = MODELS[wanted.model](wanted.dropout)
    sample = {key: value[:2] for key, value in batch_of(0).items()}
    plan = weft.plan(
        model,
        wanted.layout,
        batch=BATCH,
        accumulate=2,
        loss=next_token,
        recompute=wanted.recompute,
        sample=sample,
    )
    sgd = partial(torch.optim.SGD, lr=0.1)
    return weft.Engine(
        model, plan, optimizer=sgd, loss=next_token, clip=1.0, device="cpu", compile=compile
    )


def watch(wanted: Combination, backend: str) -> Found:
    torch.compiler.reset()
    counters.clear()  # reasons of other combinations
    try:
        plain, compiled = (
            engine_of(wanted, choice) for choice in ("off", CompileOptions(backend=backend))
        )
    except Refusal as refusal:
        return Found(refused=str(refusal).splitlines()[0])
    assert compiled.compiled is not None
    seen: dict[str, list[int]] = {name: [] for name in COUNTS}
    furthest = 0.0
    for step in range(STEPS):
        losses = [float(e.step(e.local(batch_of(step))).loss) for e in (plain, compiled)]
        furthest = max(furthest, abs(losses[1] / losses[0] - 1))
        for name in COUNTS:
            seen[name].append(getattr(compiled.compiled.counts, name))
    reasons = sorted(set(compiled.compiled.reasons))
    return Found(
        **seen, reasons=reasons, difference=furthest, seconds=compiled.compiled.counts.seconds
    )


def counts_of(backend: str, whole: bool) -> list[dict[str, Any]]:
    """Of each combination, what the rank saw that compiled most."""
    rows = []
    with Pool(4) as pool:
        for wanted in grid(whole):
            world = weft.Layout.parse(wanted.layout).world
            ranks = pool.run(watch, wanted, backend, world=world, timeout=600)
            most = max(ranks, key=lambda each: [sum(getattr(each, name)) for name in COUNTS[::-1]])
            rows.append(asdict(wanted) | asdict(most))
            print(json.dumps(rows[-1]), flush=True)
    return rows


# ---- the table -----------------------------------------------------------------------------------


def after_steps(counts: Sequence[int]) -> str:
    """The count after each step, until it no longer changes."""
    last = max((i for i in range(1, len(counts)) if counts[i] != counts[i - 1]), default=0)
    return ", ".join(map(str, counts[: last + 1]))


def problems(row: dict[str, Any]) -> list[str]:
    """What is not as it should be. Rings and experts are meant to stand between graphs."""
    found = []
    if row["breaks"][-1] and not between_graphs(row):
        found.append("a break")
    if row["recompilations"][-1] > row["recompilations"][WARM - 1]:
        found.append(f"compiled again after step {WARM}")
    if not row["difference"] < CLOSE:
        found.append(f"losses differ by {row['difference']:.0e}")
    return found


def between_graphs(row: dict[str, Any]) -> bool:
    return row["model"] == "mixtral" or row["layout"].startswith("cp")


def tables(results: Results) -> tuple[list[str], bool]:
    lines, right = [], True
    for backend, found in results.items():
        lines += [
            f"By {backend}, `{found['command']}`:",
            "",
            "| model | layout | recompute | dropout | graphs | breaks | recompilations | |",
            "| --- | --- | --- | ---: | ---: | ---: | ---: | --- |",
        ]
        for row in found["runs"]:
            named = [row["model"], f"`{row['layout']}`", row["recompute"], f"{row['dropout']:g}"]
            if row["refused"]:
                lines.append(f"| {' | '.join([*named, '', '', ''])} | refused |")
                continue
            wrong = problems(row)
            counted = [after_steps(row[name]) for name in COUNTS]
            lines.append(f"| {' | '.join([*named, *counted, ', '.join(wrong)])} |")
            right &= not wrong
        worst = max((row["difference"] for row in found["runs"]), default=0.0)
        lines += [
            "",
            f"Losses differ from the uncompiled run's by {worst:.0e} at most, relative.",
            "",
        ]
    return lines, right


def main() -> int:
    made = parser(__doc__, {"aot_eager": None, "inductor": None})
    made.add_argument("--backend", default="aot_eager", help="of torch.compile")
    made.add_argument("--all", action="store_true", help="every combination")
    options = made.parse_args()
    wanted = options.parts or [options.backend]
    parts = {name: partial(counts_of, name, options.all) for name in wanted if name != "table"}
    return measure(HERE, wanted, parts, tables)


if __name__ == "__main__":
    sys.exit(main())
