"""Every model family of transformers, in small, on every axis: equal to one device, or refused.

    python benchmarks/families/run.py  # all; about two hours on 2 cores
    python benchmarks/families/run.py --families llama "t5 seq2seq-lm" --layouts tp2 cp2

Writes results/families.json (cells that were measured before and are not measured now stay) and the
tables in README.md.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import transformers

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import parts  # noqa: E402
from families import (  # noqa: E402
    Family,
    all_families,
    build_alone,
    has_experts,
    small_config,
    write_run,
)

from weft.core import Layout, Refusal, RunConfig, WorkerDied, load_run  # noqa: E402
from weft.engine import Engine  # noqa: E402
from weft.launch import Pool  # noqa: E402
from weft.parallel import DATA_AXES  # noqa: E402
from weft.train import check_run  # noqa: E402
from weft.verification.case import Case  # noqa: E402
from weft.verification.compare import check_layout  # noqa: E402
from weft.verification.layout_result import LayoutResult  # noqa: E402
from weft.verification.reference import Reference, run_reference  # noqa: E402
from weft.verification.verify_run import make_case  # noqa: E402

RESULTS, README = HERE / "results" / "families.json", HERE / "README.md"
LAYOUTS = ("dp2", "fsdp2", "tp2", "pp2", "cp2", "ep2")
STEPS, TIMEOUT_S = 2, 120.0
STATES = ("equal", "flagged", "refused", "different", "crashed", "not built")


@dataclass(frozen=True)
class Cell:
    """One family under one layout. `state`: one of STATES; "flagged": loss, gradients and weights
    are equal, but a module, or the collectives, differ. `why` it is not equal. `cut`: share of the
    parameters that tp or ep divides. `attention`: share of the attention modules that tp divides;
    None: the model has none. `error`: the worst relative one."""

    family: str
    layout: str
    state: str
    why: str = ""
    error: float | None = None
    cut: float | None = None
    attention: float | None = None
    seconds: float = 0.0

    @property
    def key(self) -> tuple[str, str]:
        return self.family, self.layout


def measure(family: Family, layouts: list[str], pool: Pool) -> Iterator[Cell]:
    """A cell for each layout."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            path = write_run(family, Path(folder))
            layouts = [name for name in layouts if name != "ep2" or has_experts(family)]
        except Exception as error:
            why = f"{type(error).__name__}: {error}".splitlines()[0]
            yield from (Cell(family.name, layout, "not built", why) for layout in layouts)
            return
        fixed = {"folder": str(HERE), "precision.compute": "fp64"}
        for options, several in by_options(layouts):
            base = make_case(load_run(path, {**fixed, **options}))
            try:
                reference = pool.run(run_reference, base, STEPS, world=1, timeout=TIMEOUT_S)[0]
            except (Refusal, WorkerDied) as problem:
                state, why = (
                    "refused" if isinstance(problem, Refusal) else "crashed",
                    last_line(problem),
                )
                yield from (Cell(family.name, layout, state, why) for layout in several)
                continue
            for layout in several:
                run = load_run(path, {**fixed, "layout.axes": layout, **options})
                yield compared(family, Cell(family.name, layout, "equal"), run, reference, pool)


def compared(family: Family, cell: Cell, run: RunConfig, reference: Reference, pool: Pool) -> Cell:
    """The cell after its layout ran beside the reference."""
    begin, cut = time.perf_counter(), None
    attention = 0.0 if cell.layout == "tp2" and attentions(family) else None
    try:
        [plan] = check_run(run)
        cut = cut_share(plan)
        if attention is not None:
            attention = attention_share(plan, attentions(family))
        case, world = make_case(run), Layout.parse(cell.layout).world
        results = pool.run(
            check_layout, case, cell.layout, reference, world=world, timeout=TIMEOUT_S
        )
        cell = judge(cell, results[0])
        # weft verify says what differs; training may refuse it, and is to refuse nothing else
        pool.run(first_step, case, cell.layout, world=world, timeout=TIMEOUT_S)
    except Refusal as problem:
        cell = replace(cell, state="refused", why=str(problem))
    except WorkerDied as problem:
        cell = replace(cell, state="crashed", why=last_line(problem))
    except Exception as problem:  # a traceback, which weft should not show
        cell = replace(cell, state="crashed", why=f"{type(problem).__name__}: {problem}")
    seconds = round(time.perf_counter() - begin, 1)
    return replace(cell, cut=cut, attention=attention, seconds=seconds)


def first_step(case: Case, layout: str) -> None:
    """The first step of training, which tries before whether the layout changes what the model
    computes. Raises Refusal."""
    model = case.model()
    plan = case.lay(model, layout)
    engine = Engine(
        model,
        plan,
        optimizer=case.optimizer,
        loss=case.loss,
        inputs=case.inputs,
        seed=case.seed,
        device="cpu",
    )
    with case.mode():
        engine.step(case.batch_of(0, engine.mesh.index(*DATA_AXES), plan.data_size))


def by_options(layouts: list[str]) -> list[tuple[dict[str, str], list[str]]]:
    """The layouts that have the same settings, and so one reference."""
    staged = [layout for layout in layouts if layout.startswith("pp")]
    others = [layout for layout in layouts if layout not in staged]
    both = [({}, others), ({"train.accumulate": "2"}, staged)]
    return [(options, several) for options, several in both if several]


def attentions(family: Family) -> list[list[str]]:
    """The matrices of each attention of a family: the innermost modules that are called so and hold
    two or more."""
    model = build_alone(family, small_config(family))
    found: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        kind = type(module).__name__.lower()
        own = [f"{name}.{key}" for key, p in module.named_parameters() if p.ndim > 1]
        if ("attention" in kind or "attn" in kind) and len(own) > 1:
            found[name] = own
    outer = {name for name in found for other in found if other.startswith(f"{name}.")}
    return [own for name, own in found.items() if name not in outer]


def attention_share(plan: object, found: list[list[str]]) -> float:
    """The share of these attentions of which tp divides a matrix."""
    table = plan.params()  # type: ignore[attr-defined]
    divided = [own for own in found if any("tp" in table.get(name, ()) for name in own)]
    return round(len(divided) / len(found), 3)


def cut_share(plan: object) -> float:
    """The share of parameters of which a rank of tp or ep holds a part."""
    table, whole = plan.params(), plan.weights  # type: ignore[attr-defined]
    total = sum(math.prod(weight.shape) for weight in whole)
    divided = [w for w in whole if {"tp", "ep"} & set(table.get(w.name, ()))]
    return round(sum(math.prod(weight.shape) for weight in divided) / max(1, total), 3)


def judge(cell: Cell, result: LayoutResult) -> Cell:
    worst = max(result.loss_rel_err, result.grad_rel_err, result.param_rel_err)
    error = worst if math.isfinite(worst) else None
    if result.passed:
        return replace(cell, error=error)
    numbers = (result.loss_rel_err, result.grad_rel_err, result.param_rel_err)
    bounds = (result.bounds.loss, result.bounds.gradient, result.bounds.weight)
    equal = all(e < bound for e, bound in zip(numbers, bounds, strict=True))
    why = result.problem or result.first or result.stray or result.worst
    return replace(cell, state="flagged" if equal else "different", why=str(why), error=error)


def last_line(problem: Exception) -> str:
    report = getattr(problem, "report", "") or str(problem)
    return report.strip().splitlines()[-1]


# ---- results and README --------------------------------------------------------------------------


def tables(cells: list[Cell]) -> str:
    """Counts by layout; then the cells that are not equal, with the reason."""
    layouts = [name for name in LAYOUTS if any(cell.layout == name for cell in cells)]
    lines = ["| layout | families |" + "".join(f" {state} |" for state in STATES[:-1])]
    lines.append("| --- |" + " ---: |" * len(STATES))
    for name in layouts:
        here = Counter(c.state for c in cells if c.layout == name and c.state != "not built")
        counts = "".join(f" {here[state]} |" for state in STATES[:-1])
        lines.append(f"| `{name}` | {sum(here.values())} |{counts}")
    shares = [c.attention for c in cells if c.attention is not None]
    if shares:
        whole = sum(share == 1 for share in shares)
        lines += [
            "",
            f"Of {len(shares)} families with attention, `tp2` divides all of it in {whole}"
            f" ({whole / len(shares):.0%}).",
        ]
    built = {c.family for c in cells if c.state != "not built"}
    missing = sorted({c.family for c in cells} - built)
    if missing:
        lines += ["", f"transformers does not build in small: {', '.join(missing)}."]
    for state in STATES[1:-1]:
        found: dict[str, dict[str, list[str]]] = {}
        for cell in cells:
            if cell.state == state:
                why = found.setdefault(cell.layout, {})
                why.setdefault(shorter(cell.why), []).append(cell.family)
        for layout in (name for name in layouts if name in found):
            lines += ["", f"**{state}, `{layout}`**", ""]
            lines += [f"- {', '.join(names)}: {why}" for why, names in found[layout].items()]
    return "\n".join(lines)


def shorter(why: str) -> str:
    line = " ".join(why.split()).replace("|", "\\|")
    return line if len(line) < 240 else f"{line[:240]} ..."


def write(cells: list[Cell], command: str) -> None:
    if RESULTS.exists():
        before = [Cell(**kept) for kept in json.loads(RESULTS.read_text())["cells"]]
        cells = list({cell.key: cell for cell in (*before, *cells)}.values())
    names = [family.name for family in all_families()]
    known = [cell for cell in cells if cell.family in names]
    known.sort(key=lambda cell: (names.index(cell.family), LAYOUTS.index(cell.layout)))
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    found = {"versions": versions, "command": command, "cells": [asdict(cell) for cell in known]}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(found, indent=0) + "\n")
    head, rest = README.read_text().split(parts.BEGIN)
    README.write_text(
        f"{head}{parts.BEGIN}\n\n{tables(known)}\n\n{parts.END}{rest.split(parts.END)[1]}"
    )


def main() -> int:
    families = {family.name: family for family in all_families()}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--families", nargs="+", choices=families, default=list(families), metavar="FAMILY"
    )
    parser.add_argument(
        "--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), metavar="LAYOUT"
    )
    asked = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    cells: list[Cell] = []
    command = f"python benchmarks/families/run.py {' '.join(sys.argv[1:])}".strip()
    try:
        with Pool(2) as pool:
            for name in asked.families:
                for cell in measure(families[name], asked.layouts, pool):
                    cells.append(cell)
                    print(*cell.key, cell.state, shorter(cell.why), flush=True)
    finally:  # what was measured stays, where the rest is stopped
        write(cells, command)
    bad = Counter(cell.state for cell in cells)
    return int(any(bad[state] for state in ("flagged", "different", "crashed")))


if __name__ == "__main__":
    sys.exit(main())
