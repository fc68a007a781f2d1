"""What is predicted of this machine beside what it does: step time, memory and traffic of two processes.

    python benchmarks/local/run.py [runs]

`runs`: calibrations and training steps in turn. Written to results/runs.json; the tables in README.md are made from it.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import runs  # noqa: E402

from weft.calibrate import command  # noqa: E402
from weft.launch import processes  # noqa: E402

ROUNDS = 3


def measured() -> dict[str, Any]:
    """In each round a calibration, and then every case in new processes: what disturbs a while meets all alike."""
    rows: dict[str, dict[str, Any]] = {}
    sheets, load = [], []
    for number in range(ROUNDS):
        load.append(os.getloadavg()[0])
        with tempfile.TemporaryDirectory() as folder:
            path, _, _ = command.calibrate(Path(folder) / "sheet.toml", lambda part: None)
            sheets.append(path.read_text(encoding="utf-8"))
        for case in runs.CASES:
            seen = runs.found(case, processes.run(runs.steps, 2, case))
            row = rows.setdefault(str(case), seen | {"rounds": [], "load": []})
            row["rounds"].append(statistics.median(seen.pop("step_s")))
            row["memory_bytes"] = max(row["memory_bytes"], seen["memory_bytes"])
            print(f"{number} {case}: {row['rounds'][-1]:.4f} s", flush=True)
    return {"rows": list(rows.values()), "sheets": sheets, "load_before": load}


if __name__ == "__main__":
    print(measured())
