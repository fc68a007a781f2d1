"""Every model family of transformers, in small, on every axis: equal to one device, or refused.

    python benchmarks/families/run.py  # all; about two hours on 2 cores
    python benchmarks/families/run.py --families llama "t5 seq2seq-lm" --layouts tp2 cp2
    python benchmarks/families/run.py --first-step --layouts tp2

A cell is compared with one device, then trained for a step: what differs is refused there, by the
trial before the first step, or it is "different". --first-step compares no cell again that was
equal before.

Writes results/families.json (cells that were measured before and are not measured now stay), the
tables in README.md, and the counts in the README.md of the project.
"""

from __future__ import annotations

import argparse
import io
import math
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import torch
import transformers

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]

import family_cells  # noqa: E402
from families import (  # noqa: E402
    Family,
    all_families,
    build_alone,
    has_experts,
    small_config,
    write_run,
)
from family_cells import LAYOUTS, Cell, shorter  # noqa: E402

from weft.core import Plan, Refusal, RunConfig, WorkerDied, load_run  # noqa: E402
from weft.launch import Pool  # noqa: E402
from weft.train import check_run, train  # noqa: E402
from weft.verification.compare import check_layout  # noqa: E402
from weft.verification.layout_result import LayoutResult  # noqa: E402
from weft.verification.reference import Reference, run_reference  # noqa: E402
from weft.verification.verify_run import make_case  # noqa: E402

STEPS, TIMEOUT_S = 2, 600.0


def measure(
    family: Family, layouts: list[str], pool: Pool, equal: Mapping[str, Cell]
) -> Iterator[Cell]:
    """A cell for each layout. `equal`: by layout the cells that are not compared again."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            path = write_run(family, Path(folder))
            layouts = [name for name in layouts if name != "ep2" or has_experts(family)]
        except Exception as error:
            why = f"{type(error).__name__}: {error}".splitlines()[0]
            yield from (Cell(family.name, layout, "not built", why) for layout in layouts)
            return
        for options, several in by_options(layouts):
            options |= {"folder": str(HERE)}
            exact = {**options, "precision.compute": "fp64"}
            reference: Reference | Refusal | WorkerDied | None = None
            for layout in several:
                cell = equal.get(layout)
                if cell is None:
                    run = load_run(path, {**exact, "layout.axes": layout})
                    cell = planned(family, Cell(family.name, layout, "equal"), run)
                    if cell.state == "equal" and reference is None:
                        reference = reference_of(load_run(path, exact), pool)
                    if cell.state == "equal":
                        assert reference is not None
                        cell = compared(cell, run, reference, pool)
                if cell.state in ("equal", "different"):
                    own = {"layout.axes": layout, "output": f"{folder}/{layout}"}
                    run = load_run(path, {**options, **own, "train.steps": "1"})
                    cell = trained(cell, run, pool)
                yield cell


def planned(family: Family, cell: Cell, run: RunConfig) -> Cell:
    """The cell after its layout was planned: before any process starts."""
    try:
        [plan] = check_run(run)
        cell = replace(cell, cut=cut_share(plan))
        if cell.layout == "tp2" and (found := attentions(family)):
            cell = replace(cell, attention=attention_share(plan, found))
        return cell
    except Exception as problem:
        no_share = 0.0 if cell.layout == "tp2" and attentions(family) else None
        return replace(failed(cell, problem), attention=no_share)


def reference_of(run: RunConfig, pool: Pool) -> Reference | Refusal | WorkerDied:
    """The run on one device, or why it does not run there."""
    try:
        return pool.run(run_reference, make_case(run), STEPS, world=1, timeout=TIMEOUT_S)[0]
    except (Refusal, WorkerDied) as problem:
        return problem


def compared(
    cell: Cell, run: RunConfig, reference: Reference | Refusal | WorkerDied, pool: Pool
) -> Cell:
    """The cell after its layout ran beside the reference."""
    if not isinstance(reference, Reference):
        return failed(cell, reference)
    begin, case = time.perf_counter(), make_case(run)
    try:
        results = pool.run(
            check_layout, case, cell.layout, reference, world=run.world, timeout=TIMEOUT_S
        )
        cell = judge(cell, results[0])
    except Exception as problem:
        cell = failed(cell, problem)
    return replace(cell, seconds=round(time.perf_counter() - begin, 1))


def trained(cell: Cell, run: RunConfig, pool: Pool) -> Cell:
    """The cell after a step of `weft train`, which tries before whether the layout changes what the
    model computes: it is to refuse what differs, and nothing that is equal."""
    try:
        pool.run(first_step, run, world=run.world, timeout=TIMEOUT_S)
    except Exception as problem:
        return replace(failed(cell, problem), trained=False)
    return replace(cell, trained=True)


def first_step(run: RunConfig) -> None:
    """What a rank of `weft train` does. Raises Refusal, WeftError."""
    with redirect_stdout(io.StringIO()):
        train(run, resume=False)


def failed(cell: Cell, problem: Exception) -> Cell:
    """The cell that has raised this."""
    if isinstance(problem, Refusal):
        return replace(cell, state="refused", why=str(problem))
    if isinstance(problem, WorkerDied):
        return replace(cell, state="crashed", why=last_line(problem))
    # a traceback, which weft should not show
    return replace(cell, state="crashed", why=f"{type(problem).__name__}: {problem}")


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


def attention_share(plan: Plan, found: list[list[str]]) -> float:
    """The share of these attentions of which tp divides a matrix."""
    table = plan.params()
    divided = [own for own in found if any("tp" in table.get(name, ()) for name in own)]
    return round(len(divided) / len(found), 3)


def cut_share(plan: Plan) -> float:
    """The share of parameters of which a rank of tp or ep holds a part."""
    table, whole = plan.params(), plan.weights
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


def save(measured: list[Cell], command: str) -> None:
    """These cells, and those of other families and layouts that were measured before."""
    names = [family.name for family in all_families()]
    found = {cell.key: cell for cell in (*family_cells.read(), *measured) if cell.family in names}
    known = sorted(
        found.values(), key=lambda cell: (names.index(cell.family), LAYOUTS.index(cell.layout))
    )
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    family_cells.write(known, versions, command)


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
    parser.add_argument(
        "--first-step", action="store_true", help="compare no cell again that was equal before"
    )
    asked = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    measured: list[Cell] = []
    equal: dict[str, dict[str, Cell]] = {}
    for cell in family_cells.read() if asked.first_step else ():
        if cell.state == "equal":
            equal.setdefault(cell.family, {})[cell.layout] = cell
    command = f"python benchmarks/families/run.py {' '.join(sys.argv[1:])}".strip()
    try:
        with Pool(2) as pool:
            for name in asked.families:
                known = equal.get(name, {})
                for cell in measure(families[name], asked.layouts, pool, known):
                    measured.append(cell)
                    print(*cell.key, cell.state, shorter(cell.why), flush=True)
    finally:  # what was measured stays, where the rest is stopped
        save(measured, command)
    bad = Counter(cell.state for cell in measured)
    return int(any(bad[state] for state in ("flagged", "different", "crashed")))


if __name__ == "__main__":
    sys.exit(main())
