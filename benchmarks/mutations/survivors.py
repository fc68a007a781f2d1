"""Which mutants that verify does not see do the tests see?

    python benchmarks/mutations/survivors.py --sample 40

Runs the tests on all that are "missed", and on a sample of "plan" and "none", with the mutant
written into a copy of the source: the test files that name its module, then those of its package, a
sample of each as ./test.sh takes. Writes results/tests.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "src"), str(HERE.parents[1]), str(HERE)]

from mutants import ROOT, Mutant  # noqa: E402

MUTANTS, TESTED = HERE / "results" / "mutants.jsonl", HERE / "results" / "tests.jsonl"
FIELDS = ("module", "function", "place", "line", "rule", "old", "new")
LIMIT_S = 150.0


def files_of(module: str) -> list[str]:
    """The test files of a module: those that name it, then those of its package."""
    package, stem = module.split(".")[1], module.rpartition(".")[2]
    name = re.compile(
        rf"{re.escape(module)}\b|\b{re.escape(module.rpartition('.')[0])} import .*\b{stem}\b"
    )
    named = [p for p in sorted((ROOT / "tests").rglob("test_*.py")) if name.search(p.read_text())]
    of_stem = [p for p in (ROOT / "tests").rglob(f"test_{stem}.py") if p not in named]
    folder = ROOT / "tests" / package
    found = [*of_stem, *named]
    if folder.is_dir():
        found += [p for p in sorted(folder.glob("test_*.py")) if p not in found]
    return [str(p.relative_to(ROOT)) for p in found]


def failed_test(source: Path, files: list[str], limit_s: float) -> str:
    """The first test that fails with this source; "" if none does in the time that there is."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
    ]
    command += ["--timeout", "60", "-o", f"testpaths={' '.join(files)}"]
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        found = re.search(r"^(?:FAILED|ERROR) (\S+)", output.read(), re.MULTILINE)
    return found[1] if found else ""


def by_tests(mutant: Mutant) -> str:
    """The test that sees a mutant, if one does."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "src")
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        (source / mutant.file.relative_to(ROOT / "src")).write_text(mutant.text())
        test = failed_test(source, files_of(mutant.module), LIMIT_S)
    if test and failed_test(ROOT / "src", [test.partition("::")[0]], LIMIT_S) == test:
        return ""  # it fails without the mutant, too
    return test


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rows, done = rows_of(MUTANTS), {row["key"] for row in rows_of(TESTED)}
    others = [row for row in rows if row["effect"] in ("plan", "none")]
    others.sort(key=lambda row: random.Random(f"{args.seed} {row['key']}").random())
    chosen = [row for row in rows if row["effect"] == "missed"] + others[: args.sample]
    for number, row in enumerate(chosen):
        mutant = Mutant(**{name: row[name] for name in FIELDS})
        if row["key"] in done or not mutant.stands:
            continue
        test = by_tests(mutant)
        with TESTED.open("a") as file:
            file.write(json.dumps({"key": row["key"], "test": test}) + "\n")
        print(
            f"{number + 1}/{len(chosen)} {row['effect']} {row['key']}: {test or 'no test'}",
            flush=True,
        )


if __name__ == "__main__":
    main()
