"""Measured steps move the constants of a plan, and each row says how sure it is."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.planner.test_plan_command import files, loaded, weft
from weft.core import toml
from weft.planner.calibrate import kept_runs
from weft.planner.cost.hardware import Cluster, read_sheet
from weft.planner.measured_constants import measured_constants
from weft.planner.predict_run import compare_with_prediction

ALL = ("dp2", "fsdp2", "tp2", "pp2")


def plan(run: Path, sheet: str, *arguments: str | Path) -> dict[str, Any]:
    result = weft("plan", run, "--cluster", f"{sheet}x2", "--json", *arguments)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.output)
    return found


def run_folder(folder: Path, run: Path, paces: list[float], **settings: Any) -> Path:
    """As `weft train` leaves it after steps of so many seconds."""
    folder.mkdir(parents=True)
    (folder / "run.toml").write_text(toml.dump_toml(loaded(run, **settings)))
    lines = [{"step": step, "loss": 1.0, "step_s": pace} for step, pace in enumerate(paces, 1)]
    lines.insert(1, {"step": 1, "val_loss": 2.0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "metrics.jsonl"


def shown(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["layout"]: row for row in found["rows"]}


def test_measured_steps_move_every_layout(tmp_path: Path) -> None:
    """A machine twice as slow as its sheet says, in a run and in a table."""
    run, sheet = files(tmp_path)
    before = shown(plan(run, sheet, "--no-kept-runs"))
    one = before["dp2"]
    settings = {"layout__axes": "dp2", "train__accumulate": one["accumulate"]}
    took = 2 * one["step_s"]
    metrics = run_folder(tmp_path / "out", run, [9.0, took, took * 1.01, took], **settings)
    found = plan(run, sheet, "--no-kept-runs", "--measured", metrics)
    after = shown(found)
    assert after["dp2"]["step_s"] == pytest.approx(took, rel=0.1)
    for name, row in after.items():
        was = before[name]
        assert row["step_s"] > 1.2 * was["step_s"]
        assert row["step_s_low"] < row["step_s"] < row["step_s_high"]
        narrow = row["step_s_high"] / row["step_s_low"]
        assert narrow < was["step_s_high"] / was["step_s_low"]
    notes = " ".join(found["notes"])
    assert "measured: dp2 took" in notes and str(tmp_path / "out") in notes
    assert re.search(r"constants moved: .*fixed_s x [12]\.", notes)

    table = tmp_path / "rows.csv"
    rows = [f"dp2,{one['accumulate']},{took}", f"dp2,{one['accumulate']},{took}"]
    table.write_text("layout,accumulate,step_s\n" + "\n".join(rows) + "\n")
    same = shown(plan(run, sheet, "--no-kept-runs", "--measured", table))
    assert same["dp2"]["step_s"] == pytest.approx(after["dp2"]["step_s"], rel=1e-3)


def test_the_table_says_what_cannot_be_told_apart(tmp_path: Path) -> None:
    run, sheet = files(tmp_path)
    text = weft("plan", run, "--cluster", f"{sheet}x2", "--no-kept-runs").output
    rows = [line for line in text.splitlines() if re.match(r" *\d+ [a-z]", line)]
    for row in rows:
        low, high = map(float, re.search(r" ([0-9.e-]+[0-9])-([0-9.]+) ", row).groups())  # type: ignore[union-attr]
        assert 0 < low < high
    found = plan(run, sheet, "--no-kept-runs")
    alike = found["best"]["as_fast_as"]
    said = re.search(r"^too close to 1 to tell which is faster: ([0-9, -]+);", text, re.M)
    assert bool(said) == bool(alike)
    layouts = [argument for name in ("dp2", "fsdp2") for argument in ("--layout", name)]
    compared = weft("plan", run, "--cluster", f"{sheet}x2", "--no-kept-runs", *layouts).output
    assert "80 % of steps within" in compared


def test_train_keeps_its_runs_for_the_next_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    run, sheet_file = files(tmp_path)
    hardware = read_sheet(Path(sheet_file)).model_copy(
        update={"name": "local", "kind": "cpu", "title": f"{kept_runs.processor()}, 2 cores"}
    )
    where = Cluster(hardware=hardware, devices=2)
    folders = [tmp_path / "one", tmp_path / "gone", tmp_path / "cut"]
    for folder, paces in zip(folders, ([9.0, 0.5, 0.5], [9.0, 0.5], [9.0])):
        run_folder(folder, run, paces, layout__axes="dp2")
        compare_with_prediction(
            loaded(run, layout__axes="dp2", output=str(folder)), torch.device("cpu"), 0.5
        )
    (folders[1] / "metrics.jsonl").unlink()
    this = loaded(run, layout__axes="dp2")
    found = measured_constants(this, where, "eager", (), kept=True)
    notes = "\n".join(found.notes)
    assert f"({folders[0]}, kept by weft train: --no-kept-runs leaves it out)" in notes
    assert f"left out: {folders[2]}, kept by weft train: has no step after" in notes
    assert str(folders[1]) not in notes
    assert found.era != hardware.eras["eager"]
    without = measured_constants(this, where, "eager", (), kept=False)
    assert without.era == hardware.eras["eager"] and not without.notes
    other = where.model_copy(update={"hardware": hardware.model_copy(update={"title": "another"})})
    assert not measured_constants(this, other, "eager", (), kept=True).notes


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("none.csv", None, "cannot be read"),
        ("none/metrics.jsonl", None, "has no run.toml beside it"),
        ("rows.txt", "", "is not a file of measured steps"),
        ("rows.csv", "layout,step_s\n", "has 0 rows"),
        ("rows.csv", "layout,seconds\ndp2,1\n", "seconds"),
        ("rows.csv", "step_s\n1\n", "layout"),
        ("rows.csv", "layout,step_s\ndp2,quick\n", "line 2, step_s"),
        ("rows.csv", "layout,step_s\ndp2,-1\n", "line 2, step_s"),
        ("rows.csv", "layout,step_s\ndp0,1\n", "dp0"),
        ("rows.csv", "layout,step_s,accumulate\ndp2,1,many\n", "many"),
        ("out/metrics.jsonl", '{"step": 1, "step_s": 1.0}\n', "has no step after the first"),
        ("out/metrics.jsonl", "none\n{}\n", "line 1 is not a line of metrics.jsonl"),
    ],
)
def test_files_that_cannot_be_used_are_refused_in_a_line(
    tmp_path: Path, name: str, text: str | None, said: str
) -> None:
    run, sheet = files(tmp_path)
    if name.startswith("out"):
        run_folder(tmp_path / "out", run, [1.0])
    if text is not None:
        (tmp_path / name).write_text(text)
    arguments = ("--cluster", f"{sheet}x2", "--measured", tmp_path / name)
    for command in ("plan", "simulate"):
        result = weft(command, run, *arguments)
        assert result.exit_code == 2 and said in result.stderr, result.output
        assert len(result.stderr.strip().splitlines()) <= 3


def test_a_simulation_uses_them_too(tmp_path: Path) -> None:
    run, sheet = files(tmp_path, layout__axes="dp2")
    asked = ("simulate", run, "--cluster", f"{sheet}x2", "--no-kept-runs", "--json")
    before = json.loads(weft(*asked).stdout)
    table = tmp_path / "rows.csv"
    table.write_text("layout,step_s\ndp2,2.5\n")
    result = weft(*asked, "--measured", table)
    assert "note: measured: dp2 took 2.5 s a step" in result.stderr
    assert json.loads(result.stdout)["step_s"] > 1.5 * before["step_s"]
