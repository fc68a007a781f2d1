"""benchmarks/gpu runs on the CPU with tiny sizes: all that it calls is there, and what it holds to
one device agrees."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

RUN = Path(__file__).parents[2] / "benchmarks" / "gpu" / "run.py"


@pytest.mark.slow(ci=False)
@pytest.mark.timeout(900)  # 40 s of work, on a machine that may do other things
def test_every_part_runs_small(tmp_path: Path) -> None:
    command = [sys.executable, str(RUN), "--small", "--out", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "cpu-x-2.json").read_text())
    parts = ["parity", "speed", "overlap", "float8", "memory", "offload", "launches", "stall"]
    assert list(found) == parts
    parity = found["parity"]["runs"]
    overlapped = [row for row in parity if row["async_tp"]]  # needs GPUs
    assert len(overlapped) == 2 and all("train.async_tp" in row["refused"] for row in overlapped)
    assert all("loss" in row for row in parity if row not in overlapped), parity
    sides = found["overlap"]["runs"]
    assert ["step_s" in row for row in sides] == [True, False]
    assert "train.async_tp" in sides[1]["refused"]
    assert {row["precision"] for row in parity if row["compiled"]} == {"fp64", "bf16"}
    [speed] = found["speed"]["runs"]
    assert speed["plain"]["losses"] != speed["weft"]["losses"]  # each draws its own weights
    assert all(row["predicted"]["peak"] > 0 for row in found["memory"]["runs"])
    [offload] = found["offload"]["runs"]
    assert offload["host"]["predicted_bytes"] <= offload["device"]["predicted_bytes"]
    assert all(row["operators"] > 0 for row in found["launches"]["runs"])
    assert all(row["call_s"] > 0 for row in found["stall"]["runs"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    done = subprocess.run([sys.executable, str(RUN)], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "there is no GPU here: --small tries the same code on the CPU\n"
