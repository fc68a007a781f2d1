"""What a run leaves for a report: its events, what each rank holds, the prediction."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.commands import children
from tests.train.test_failures import begun, steps_of
from tests.train.test_trainer import RUN
from weft.cli.train_run import train_and_compare
from weft.cli.verify import _run_folder
from weft.core import load_run
from weft.report import read_run
from weft.verification import VerifyReport, write_verified
from weft.verification.layout_result import LayoutResult


def trained(pool: Any, folder: Path, axes: str, **settings: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.toml").write_text(RUN)
    keys = {"layout.axes": axes, "output": str(folder / "out"), **settings}
    run = load_run(folder / "run.toml", {key: json.dumps(value) for key, value in keys.items()})
    pool.run(train_and_compare, run, False, world=run.world)
    return folder / "out"


def test_what_each_rank_holds_is_what_the_model_has(pool: Any, tmp_path: Path) -> None:
    whole = json.loads((trained(pool, tmp_path / "dp", "dp2") / "ranks.json").read_text())
    parts, elements = whole["parts"], sum(whole["parts"].values())
    assert whole["holdings"] == [parts] and len(whole["ranks"]) == 2
    for rank in whole["ranks"]:
        assert rank["parameters"] == elements and rank["weights_bytes"] == 4 * elements
        assert rank["gradients_bytes"] >= 4 * elements and rank["peak_bytes"] > 0
    sharded = json.loads((trained(pool, tmp_path / "fsdp", "fsdp2") / "ranks.json").read_text())
    assert sharded["parts"] == parts
    held = [sharded["holdings"][rank["holding"]] for rank in sharded["ranks"]]
    assert {part: sum(one.get(part, 0) for one in held) for part in parts} == parts
    assert all(rank["parameters"] < elements for rank in sharded["ranks"])
    kinds = {(comm["kind"], comm["axis"]) for comm in sharded["collectives"]}
    assert ("reduce_scatter", "fsdp") in kinds and ("all_gather", "fsdp") in kinds


def test_memory_is_predicted_without_the_sheet_of_this_machine(pool: Any, tmp_path: Path) -> None:
    """Bytes do not depend on how fast a machine is."""
    folder = trained(pool, tmp_path, "dp2")
    found = json.loads((folder / "prediction.json").read_text())
    rank = json.loads((folder / "ranks.json").read_text())["ranks"][0]
    assert found["memory"]["weights"] == rank["weights_bytes"]
    collectives = json.loads((folder / "ranks.json").read_text())["collectives"]
    sent = sum(comm["sent_bytes"] for comm in collectives if comm["axis"] == "dp")
    assert found["traffic"]["dp"] == pytest.approx(sent, rel=0.1)
    events = [json.loads(line) for line in (folder / "events.jsonl").open()]
    assert [each["event"] for each in events] == ["started", "finished"]
    assert events[1]["rows"]["report"] == f"weft report {folder}"


def test_a_rank_that_dies_is_an_event(tmp_path: Path) -> None:
    with begun(tmp_path, "dp2") as process:
        while len(steps_of(tmp_path)) < 5:
            time.sleep(0.01)
        os.kill(children(process.pid)[1], signal.SIGKILL)
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    run = read_run(tmp_path / "out")
    assert [each["event"] for each in run.events] == ["started", "died", "resumed", "finished"]
    died, resumed = run.events[1:3]
    assert died["text"] == "rank 1: killed by SIGKILL" and died["step"] == resumed["step"] >= 2


def test_a_run_that_fails_says_so(tmp_path: Path) -> None:
    with begun(tmp_path, "dp2", "--set", "optimizer.lr=1e30") as process:
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 1, output
    events = read_run(tmp_path / "out").events
    assert events[-1]["event"] == "failed" and "rank " in events[-1]["text"]


def test_verify_keeps_its_table_in_the_run_folder(tmp_path: Path) -> None:
    """Of the run that a run file belongs to, and of no folder that holds no run."""
    result = LayoutResult("dp2", 1e-16, 1e-14, 1e-15, "w", None, {("all_reduce", "dp"): (2, 8)}, {})
    write_verified(tmp_path / "out", VerifyReport((result,), 3), {"model": {"dim": 8}}, "fp64")
    (tmp_path / "out" / "run.toml").write_text(RUN)
    found = read_run(tmp_path / "out")
    (layout,) = found.verified["layouts"]
    assert layout["comms_predicted"][0]["bytes"] == 8 and not layout["passed"]
    assert found.verified["settings"] == {"model": {"dim": 8}} and found.verified["steps"] == 3
    run = load_run(tmp_path / "out" / "run.toml", {"output": json.dumps(str(tmp_path / "gone"))})
    assert _run_folder(tmp_path / "out" / "run.toml", run, None) is None
    (tmp_path / "out" / "metrics.jsonl").touch()
    assert _run_folder(tmp_path / "out" / "run.toml", run, None) == tmp_path / "out"
    assert _run_folder(tmp_path / "mine.toml", run, "new") == Path("new")
