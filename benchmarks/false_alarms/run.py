"""Does `weft verify` ever say that a right run is wrong? Compares models, layouts, optimizers and
seeds, drawn at random, with one device.

    python benchmarks/false_alarms/run.py --count 1000
    python benchmarks/false_alarms/run.py --again 725 840

Writes results/verifies.jsonl (what is there already is not run again) and the table in README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE), str(HERE.parent)]

from draws import Draw  # noqa: E402
from parts import BEGIN, END  # noqa: E402

from weft.core.errors import Refusal, WorkerDied  # noqa: E402
from weft.core.layout import Layout  # noqa: E402
from weft.launch.local_workers import Pool  # noqa: E402
from weft.verification.compare import check_layout  # noqa: E402
from weft.verification.reference import run_reference  # noqa: E402
from weft.verification.rounding import (  # noqa: E402
    may_be_rounding,
    measure_rounding,
    within_rounding,
)

RESULTS, README = HERE / "results" / "verifies.jsonl", HERE / "README.md"
STEPS, TIMEOUT_S = 3, 300.0


def verified(number: int) -> dict[str, Any]:
    """Both sides in this process group: every rank makes the reference by itself."""
    _, layout, case = Draw(number).case()
    alone = run_reference(case, STEPS)
    result = check_layout(case, layout, alone)
    if may_be_rounding(result, case, alone):
        result = within_rounding(result, measure_rounding(case, layout, alone))
    worst = max(result.loss_rel_err, result.grad_rel_err, result.param_rel_err)
    says = result.first or result.problem or result.stray
    found = {"passed": result.passed, "worst": worst, "says": says}
    return found | ({"widened": max(result.widened.values())} if result.widened else {})


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--count", type=int, default=1000, help="how many verifies")
    arguments.add_argument("--again", type=int, nargs="+", default=(), help="numbers to run anew")
    given = arguments.parse_args()
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.touch()
    done = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    done = [one for one in done if one["number"] not in given.again]
    RESULTS.write_text("".join(json.dumps(one) + "\n" for one in done))
    known = {one["number"] for one in done}
    with Pool(4) as pool, open(RESULTS, "a") as file:
        for number in (n for n in range(given.count) if n not in known):
            what, layout, _ = Draw(number).case()
            began = time.perf_counter()
            try:
                world = Layout.parse(layout).world
                found = pool.run(verified, number, world=world, timeout=TIMEOUT_S)[0]
            except Refusal as error:
                found = {"passed": None, "says": str(error)}
            except WorkerDied as error:
                found = {"passed": False, "says": error.report.strip().splitlines()[-1]}
            one = {"number": number, "what": what, **found}
            one["seconds"] = round(time.perf_counter() - began, 2)
            done.append(one)
            file.write(json.dumps(one) + "\n")
            file.flush()
            if found["passed"] is False:
                print(number, what, found["says"], flush=True)
    write_table(done)


def write_table(done: list[dict[str, Any]]) -> None:
    lines = [
        "| model | equal | by a wider bound | refused | false alarms | worst of the others |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    kinds = Counter(one["what"].split()[0] for one in done)
    for kind in (*sorted(kinds), ""):
        some = [one for one in done if one["what"].startswith(f"{kind} ") or not kind]
        verdicts = Counter(one["passed"] for one in some)
        worst = max(
            (one["worst"] for one in some if one["passed"] and "widened" not in one), default=0.0
        )
        name = kind or "**all**"
        wider = sum("widened" in one for one in some)
        cells = f"{verdicts[True]} | {wider} | {verdicts[None]} | {verdicts[False]} | {worst:.0e}"
        lines.append(f"| {name} | {cells} |")
    text = README.read_text()
    before, rest = text.split(BEGIN)
    README.write_text(f"{before}{BEGIN}\n\n" + "\n".join(lines) + f"\n\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
