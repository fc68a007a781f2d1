"""Everything that only a GPU shows, on all GPUs that this process sees, one process each.

    python benchmarks/gpu/run.py                    # all parts; minutes
    python benchmarks/gpu/run.py parity speed       # or some
    python benchmarks/gpu/run.py --small            # the same code on the CPU, tiny; no figures

Writes results/DEVICE.json (parts that were measured before and are not now stay) and the tables in
README.md; --small and --out write elsewhere.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
sys.path.insert(0, str(HERE.parent))

import float8  # noqa: E402
import launches  # noqa: E402
import memory  # noqa: E402
import offload  # noqa: E402
import overlap  # noqa: E402
import parity  # noqa: E402
import speed  # noqa: E402
import stall  # noqa: E402
import torch  # noqa: E402
from parts import BEGIN, END, parser  # noqa: E402
from setting import Setting  # noqa: E402

PARTS: dict[str, ModuleType] = {
    "parity": parity,
    "speed": speed,
    "overlap": overlap,
    "float8": float8,
    "memory": memory,
    "offload": offload,
    "launches": launches,
    "stall": stall,
}
TITLES = {
    "parity": "Relative differences from one device on the CPU in float64",
    "speed": "A step beside plain torch",
    "overlap": "tp+sequence overlapped with matmuls",
    "float8": "A step with linears in float8",
    "memory": "Memory beside what is predicted",
    "offload": "Activations in the host's memory",
    "launches": "Launches of a step",
    "stall": "Saves in the background",
}


def environment(setting: Setting) -> dict[str, Any]:
    found: dict[str, Any] = {
        "device": setting.title,
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if not setting.small:
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        found |= {"cuda": torch.version.cuda, "nccl": nccl}
    return found


def kept(file: Path, part: str, found: dict[str, Any]) -> None:
    """Put one part into the device's file."""
    every = json.loads(file.read_text()) if file.exists() else {}
    every[part] = found
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({p: every[p] for p in PARTS if p in every}, indent=1) + "\n")


def tables(file: Path) -> tuple[list[str], bool]:
    """Of one device; whether all is as it has to be."""
    every = json.loads(file.read_text())
    lines, right = [f"### {next(iter(every.values()))['environment']['device']}", ""], True
    for part, found in every.items():
        module = PARTS[part]
        lines += [f"{TITLES[part]}, `{found['command']}`, {found['seconds']:.0f} s:", ""]
        lines += [*module.table(found["runs"]), ""]
        right &= all(module.passed(row) for row in found["runs"])
    return lines, right


def write_readme(results: Path) -> None:
    readme = HERE / "README.md"
    text = readme.read_text(encoding="utf-8")
    head, tail = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    lines = [line for file in sorted(results.glob("*.json")) for line in tables(file)[0]]
    readme.write_text("\n".join([head, "", *lines, tail]), encoding="utf-8")


def main(arguments: Sequence[str] = tuple(sys.argv[1:])) -> int:
    asked: argparse.ArgumentParser = parser(__doc__, PARTS)
    asked.add_argument("--small", action="store_true", help="tiny, on the CPU, to try the code")
    asked.add_argument("--out", type=Path, help="folder for DEVICE.json in place of results")
    options = asked.parse_args(arguments)
    results = HERE / "results"
    if options.parts == ["table"]:
        write_readme(results)
        return 0
    setting = Setting.found(options.small)
    if setting is None:
        print("there is no GPU here: --small tries the same code on the CPU", file=sys.stderr)
        return 2
    if not setting.small:
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    file = (options.out or (None if setting.small else results) or Path()) / f"{setting.file}.json"
    keeps = options.out is not None or not setting.small
    command = " ".join(["python benchmarks/gpu/run.py", *arguments])
    right = True
    for part in (part for part in options.parts or PARTS if part != "table"):
        began = time.perf_counter()
        found: dict[str, Any] = {"environment": environment(setting), "command": command}
        try:
            found["runs"] = PARTS[part].measure(setting)
        except Exception as problem:  # the other parts are worth their minutes
            print(f"{part} failed: {problem}", file=sys.stderr)
            right = False
            continue
        found["seconds"] = time.perf_counter() - began
        right &= all(PARTS[part].passed(row) for row in found["runs"])
        if keeps:
            kept(file, part, found)
        print("\n".join(PARTS[part].table(found["runs"])), flush=True)
    if not setting.small and options.out is None:
        write_readme(results)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
