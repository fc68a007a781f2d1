"""Parts of a benchmark: measured, kept in results/PART.json with environment and command, shown in
README.md."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

BEGIN, END = "<!-- results: written by run.py -->", "<!-- end of results -->"
Results = dict[str, dict[str, Any]]  # part -> what its file holds, the measurement under "runs"


def parser(text: str | None, parts: Mapping[str, Any]) -> argparse.ArgumentParser:
    """For the command line of a benchmark: the parts that are wanted, all if none is named, "table"
    for none."""

    def part(name: str) -> str:
        if name not in (*parts, "table"):
            raise argparse.ArgumentTypeError(
                f"no part {name}: choose from {', '.join(parts)}, table"
            )
        return name

    made = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "parts", nargs="*", metavar="PART", type=part, help=", ".join([*parts, "table"])
    )
    return made


def measure(
    folder: Path,
    wanted: list[str],
    parts: Mapping[str, Callable[[], Any]],
    tables: Callable[[Results], tuple[list[str], bool]],
) -> int:
    """Measure what is wanted, and write the tables of all parts that have results; 1 if a target is
    missed."""
    results, readme = folder / "results", folder / "README.md"
    for part in (part for part in wanted or parts if part != "table"):
        environment = {
            "cpus": os.cpu_count(),
            "machine": platform.machine(),
            "system": platform.system(),
            "python": platform.python_version(),
            "torch": torch.__version__,
        }
        command = " ".join([f"python benchmarks/{folder.name}/run.py", *sys.argv[1:]])
        found = {"environment": environment, "command": command, "runs": parts[part]()}
        results.mkdir(exist_ok=True)
        (results / f"{part}.json").write_text(json.dumps(found, indent=1) + "\n")
    lines, held = tables(
        {path.stem: json.loads(path.read_text()) for path in sorted(results.glob("*.json"))}
    )
    text = readme.read_text(encoding="utf-8")
    head, tail = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    readme.write_text("\n".join([head, "", *lines, tail]), encoding="utf-8")
    print("\n".join(lines))
    return 0 if held else 1
