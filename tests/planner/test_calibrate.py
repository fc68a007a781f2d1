"""Calibration: constants are recovered from times that they made, a sheet reads back, what cannot
be written is refused before anything is measured, and a small measurement by two processes gives
figures that a sheet takes."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from weft.cli.app import app
from weft.core import toml
from weft.core.errors import ConfigError
from weft.core.layout import Layout
from weft.core.timers import typical_time
from weft.nn.losses import next_token
from weft.planner.calibrate import (
    collective_skew,
    collectives as links,
    compute,
    decoder_blocks,
    fit_runs,
    fixed_overhead,
    measure as command,
    measured_runs,
    rank_timer,
)
from weft.planner.calibrate.collectives import CollectiveTiming, OverlapSample
from weft.planner.calibrate.compute import MemoryBandwidth, SmallOpTiming, TimedWork
from weft.planner.calibrate.decoder_blocks import DecoderTiming
from weft.planner.calibrate.fixed_overhead import FixedOverhead
from weft.planner.calibrate.robust_fit import fit_line
from weft.planner.calibrate.sheet import ERA, Machine, Measurements, sheet
from weft.planner.cost import hardware
from weft.planner.cost.estimate import estimate
from weft.planner.cost.layout_batch import LayoutBatch
from weft.planner.cost.profile import profile_model
from weft.planner.search.run_precision import precision_policy

AMOUNTS = [2.0**power for power in range(10, 30, 2)]


@pytest.mark.parametrize(("fixed_s", "rate"), [(2e-4, 1e9), (0.0, 3e10), (1e-6, 5e8)])
def test_a_line_is_found_through_noise_and_a_few_disturbed_times(
    fixed_s: float, rate: float
) -> None:
    noise = np.random.default_rng(0)
    amounts = AMOUNTS * 3
    times = [(fixed_s + each / rate) * noise.uniform(0.98, 1.02) for each in amounts]
    for disturbed in (3, 11, 17, 29):
        times[disturbed] *= 6
    found = fit_line(amounts, times)
    assert found.rate == pytest.approx(rate, rel=0.03)
    assert found.fixed_s == pytest.approx(
        fixed_s, rel=0.05, abs=0.02 * (fixed_s + min(amounts) / rate)
    )


def test_a_line_never_begins_below_zero_and_never_falls() -> None:
    faster = fit_line([1e6, 1e7, 1e8], [1e-3, 2e-2, 3e-1])  # small ones run better
    assert faster.fixed_s == 0 and 3e8 < faster.rate <= 1e9
    flat = fit_line([1e3, 1e4], [1e-3, 1e-3])
    assert flat.fixed_s == pytest.approx(1e-3) and flat.rate > 1e9
    assert fit_line([100.0], [2.0]) == (0, 50)


def test_what_is_typical_is_not_moved_by_pauses() -> None:
    assert typical_time([1.0, 1.1, 0.9, 50.0, 1.0, 60.0, 1.0]) == 1.0
    assert typical_time([2.0]) == 2.0


def measured(ranks: int = 2, kind: str = "cpu") -> Measurements:
    """What a machine of known constants would give."""
    launch_s, rate, half = 1e-5, 1e11, 2e6
    waits = launch_s if kind == "cpu" else 0.0

    def timed(rate: float, half: float = 0.0) -> list[TimedWork]:
        return [TimedWork(each, waits + (each + half) / rate) for each in AMOUNTS]

    moved = [
        CollectiveTiming(kind, int(each), each, hops, hops * 1e-4 + each / rate_s)
        for kind, hops, rate_s in (("all_reduce", 2, 4e8), ("send", 1, 1e9))
        for each in AMOUNTS
    ]
    return Measurements(
        Machine(ranks, 1, kind, "a machine", 8 * hardware.GIB),
        {"fp32": timed(rate, half), "bf16": timed(4 * rate, half), "fp64": timed(rate / 2, half)},
        ([TimedWork(1e9, 0.02)] * 3, [TimedWork(1e9, 0.04)] * 3),
        MemoryBandwidth(2e10, timed(1.5e10), 1e10),
        SmallOpTiming(launch_s / 2, 3 * launch_s / 2),
        [decoded(dim, length) for dim in (64, 128, 256) for length in (16, 64, 128)],
        TimedWork(1e6, 5e-3),
        moved if ranks > 1 else [],
        OverlapSample(1.0, 0.5, 1.2) if ranks > 1 else None,
        FixedOverhead(3e-3, int(hardware.GIB // 4)),
        [],
        0.0,
    )


@cache
def decoded(dim: int, length: int) -> DecoderTiming:
    """A decoder where an operation takes 20 us and memory 5 GB/s."""
    work, seconds = decoder_blocks.work_of(dim, length), 0.0
    for block in work.blocks:
        for op in block.ops:
            flops, nbytes = (
                decoder_blocks.SAMPLES * op.flops,
                decoder_blocks.SAMPLES * op.moved_bytes,
            )
            seconds += block.count * (2 * op.kernels * 2e-5 + nbytes * (1 + op.backward) / 5e9)
            if op.kind == "matmul":
                seconds += block.count * 3 * (flops + op.matmuls * 2e6) / 1e11
            if op.kind == "attention":
                seconds += block.count * flops * (1 / 5e10 + 2.5 / 2.5e10)
    return DecoderTiming(dim, length, seconds + decoder_blocks.FRESH_BYTES * work.params / 1.5e10)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_sheet_has_the_constants_that_made_the_times(kind: str) -> None:
    made = sheet(measured(kind=kind))
    era, device, tier = made.eras[ERA], made.device, made.tiers[0]
    reached = {dtype: era.matmul * peak for dtype, peak in device.flops.items()}
    assert reached == pytest.approx({"fp32": 1e11, "bf16": 4e11, "fp64": 5e10}, rel=0.01)
    assert era.matmul_flops == pytest.approx(2e6, rel=0.02)
    main = device.flops["fp32" if kind == "cpu" else "bf16"]
    assert era.attention * main == pytest.approx(5e10, rel=0.01)
    assert era.attention_backward * main == pytest.approx(2.5e10, rel=0.01)
    # a CPU's as a decoder has it, a GPU's as single operations have it
    assert (device.memory_bps, era.memory) == (2e10, pytest.approx(0.75, rel=0.02))
    assert era.traffic == pytest.approx(3.0 if kind == "cpu" else 1.0, rel=0.02)
    launch = (2e-5, 1.0) if kind == "cpu" else (1e-5, 0.0)
    assert (era.launch_s, era.waits) == (pytest.approx(launch[0], rel=0.02), launch[1])
    assert (tier.devices, tier.bps, tier.latency_s) == (
        2,
        pytest.approx(1e9, rel=0.01),
        pytest.approx(1e-4, rel=0.01),
    )
    assert tier.reaches == {"all_reduce": pytest.approx(0.4, rel=0.01), "send": 1.0}
    assert era.contention == pytest.approx(0.4)
    assert (era.fixed_s, era.context_gib, device.memory_gib) == (3e-3, 0.25, 8)


@pytest.mark.parametrize("lost_s", [0.0, 3e-3])
def test_what_ranks_lose_at_collectives_is_what_layouts_that_have_many_take_more(
    lost_s: float,
) -> None:
    made = sheet(measured())
    there = hardware.Cluster(hardware=made, devices=2)
    true = made.eras[ERA].model_copy(update={"meet_s": lost_s})
    ids = torch.zeros(1, collective_skew.LENGTH, dtype=torch.int64)
    work = profile_model(collective_skew._model(), {"input_ids": ids}, next_token)
    layouts = [Layout.parse(one) for one in ("dp2", "fsdp2", "tp2")]
    found = estimate(
        work,
        LayoutBatch.of(layouts, batch=8),
        there,
        true,
        precision_policy("fp32", fixed_overhead.adamw),
    ).step_s
    seen = [
        collective_skew.LayoutTiming(str(one), 1.1 * found[0] + step - found[0])
        for one, step in zip(layouts, found)
    ]
    assert collective_skew.skew_s(seen, made, made.eras[ERA]) == pytest.approx(
        lost_s
    )  # and not what all take more
    assert collective_skew.skew_s(seen[:1], made, made.eras[ERA]) == 0.0
    more = sheet(replace(measured(), skew_timings=seen)).eras[ERA]
    assert more == true.model_copy(update={"meet_s": more.meet_s}) and more.meet_s == pytest.approx(
        lost_s
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_sheet_that_is_written_reads_back(tmp_path: Path, ranks: int) -> None:
    made, path = sheet(measured(ranks)), tmp_path / "sheet.toml"
    command.put_sheet(path, toml.dump_toml(made))
    assert hardware.read_sheet(path) == made
    assert hardware.Cluster.parse(str(path)).devices == ranks
    assert [each.name for each in tmp_path.iterdir()] == ["sheet.toml"]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("sheet.json", "is not a name of a hardware file"),
        ("folder.toml", "is a folder"),
        ("file/sheet.toml", "cannot be written"),
    ],
)
def test_what_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, problem: str
) -> None:
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.setattr(command, "measure", lambda *_: pytest.fail("it measures"))
    result = CliRunner().invoke(app, ["calibrate", "--out", str(tmp_path / name)])
    assert result.exit_code == 2 and problem in result.stderr and "--out" in result.stderr


def test_a_file_that_cannot_be_written_in_the_end_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "sheet.toml").mkdir()
    with pytest.raises(ConfigError, match="cannot be written"):
        command.put_sheet(tmp_path / "sheet.toml", "")
    assert [each.name for each in tmp_path.iterdir()] == ["sheet.toml"]


def small() -> list[Any]:
    """Every part, as small as it goes."""
    compute.TOKENS, compute.WIDTHS, compute.SEQUENCES = (8,), (16, 32), (16, 32)  # type: ignore[assignment]
    compute.ACTIVATIONS, compute.STREAM_BYTES, compute.LAYER = (64, 1024), 1 << 12, 8
    decoder_blocks.SHAPES = ((64, 8), (64, 16))  # type: ignore[assignment]
    links.SIZES, links.BESIDE_BYTES, links.WIDTH = (64, 1 << 12), 1 << 10, 16
    rank_timer.LIMIT_S = 0.02
    return [
        {dtype: compute.matmuls(dtype) for dtype in ("fp32", "fp64")},
        compute.attention(),
        compute.streams(),
        compute.launches(),
        decoder_blocks.time_decoders(),
        compute.update(),
        [moved for kind in links.KINDS for moved in links.time_collective(kind)],
        links.time_overlap(),
        fixed_overhead.measure_overhead(),
        collective_skew.steps(),
    ]


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_part_is_measured_once_and_counted(
    monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """Of dtypes that the machine turns out not to know there is no part."""
    ran: list[Any] = []

    class Here:
        def __init__(self, *_: Any, **__: Any) -> None: ...
        def __enter__(self) -> Here:
            return self

        def __exit__(self, *_: Any) -> None: ...
        def run(self, _: Any, function: Any, *args: Any, timeout: float) -> list[Any]:
            ran.append((function.__name__, *args))
            value = (
                {"fp32": 1.0, "bf16": 2.0}
                if function.__name__ == "dtypes"
                else [(function.__name__, *args)]
            )
            return [(value, 0.0)]

    monkeypatch.setattr(command, "Pool", Here)
    monkeypatch.setattr(command, "QUIET", float("inf"))  # others: a tick may be longer than a part
    said: list[str] = []
    found = command.measure(Machine(ranks, 1, "cpu", "a machine", 2**30), "gloo", said.append)
    counted = [re.search(r"\((\d+) of (\d+)\)$", line) for line in said]
    places, wholes = zip(*((int(one[1]), int(one[2])) for one in counted if one))
    assert (
        places == tuple(range(1, len(said) + 1))
        and set(wholes[2:]) == {len(said)}
        and wholes[0] > len(said)
    )
    assert (
        len(set(ran)) == len(ran) == len(said) == (9 if ranks == 1 else 11 + len(found.collectives))
    )
    assert list(found.matmuls) == ["fp32", "bf16"] and found.matmuls["bf16"] == [
        ("matmuls", "bf16")
    ]
    assert found.floor == [("measure_overhead",)] and (found.skew_timings == [("steps",)]) == (
        ranks == 2
    )


def test_two_processes_measure_the_same_and_a_sheet_takes_it(
    pool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = pool.run(small, world=2)
    assert first[:7] == second[:7]  # both decide alike what is measured next
    assert {each.kind for each in first[6]} == {
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "send",
    }
    assert all(each.seconds > 0 for each in first[6])
    assert first[8].process_bytes > 1 << 25
    assert [each.layout for each in first[9]] == ["dp2", "fsdp2", "tp2"] and first[9] == second[9]
    monkeypatch.setattr(command, "measure", lambda machine, *_: Measurements(machine, *first, 0.4))
    path = tmp_path / "made" / "sheet.toml"
    result = CliRunner().invoke(app, ["calibrate", "--out", str(path), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["sheet"]["name"] == "local"
    assert hardware.read_sheet(path).device.flops["fp32"] > 0


# ---- --fit ---------------------------------------------------------------------------------------

RUN = """
output = "out"
[model]
build = "weft.models:decoder"
dim = 64
layers = 2
heads = 2
seq_len = 64
[data]
build = "weft.data:stdlib"
seq_len = 64
max_bytes = 4000
[layout]
axes = "dp2"
[train]
batch = 8
steps = 1
loss = "weft.losses:next_token"
[optimizer]
name = "adamw"
fused = false  # an update that takes long enough to be told from what goes with no size
"""


def runs_of(folder: Path, made: hardware.Hardware, era: hardware.Era) -> Path:
    """What runs of this era would take, as a CSV file beside their run file."""
    (folder / "run.toml").write_text(RUN)
    kinds = [(layout, parts) for layout in ("dp2", "tp2", "fsdp2") for parts in (1, 1, 4, 4)]
    lines, works = ["run,layout,accumulate,step_s,source"], dict[str, Any]()
    for layout, parts in kinds:
        row = {"run": "run.toml", "layout": layout, "accumulate": str(parts)}
        _, one = measured_runs.make_query(folder / "runs.csv", row, made.kind, works)
        at = hardware.Cluster(hardware=made, devices=2)
        seconds = estimate(one.work, one.choices, at, era, one.practice, one.sync).step_s[0]
        lines.append(f"run.toml,{layout},{parts},{seconds},{layout[:2]}")
    (folder / "runs.csv").write_text("\n".join(lines) + "\n")
    return folder / "runs.csv"


def test_an_era_is_fitted_to_runs_and_tells_those_held_out(tmp_path: Path) -> None:
    pytest.importorskip("scipy")
    made, at, out = (
        sheet(measured(kind="cuda")),
        tmp_path / "machine.toml",
        tmp_path / "fitted.toml",
    )
    command.put_sheet(at, toml.dump_toml(made))
    true = made.eras[ERA].model_copy(
        update={"launch_s": 6e-5, "fixed_s": 0.03, "matmul": 0.7, "link": 0.8}
    )
    runs = runs_of(tmp_path, made, true)
    result = CliRunner().invoke(
        app, ["calibrate", "--fit", str(runs), "--cluster", str(at), "--out", str(out), "--json"]
    )
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["constants"]["fixed_s"] == pytest.approx(
        0.03, rel=0.2
    )  # from 0.003; launches stand in for some
    assert {
        name: (len(e["fitted"]), len(e["held_out"])) for name, e in found["errors"].items()
    } == dict.fromkeys(("dp", "tp", "fs"), (2, 2))
    assert max(abs(e) for each in found["errors"].values() for e in each["held_out"]) < 0.05
    assert hardware.read_sheet(out).era(ERA).model_dump(mode="json") == found["constants"]
    assert hardware.read_sheet(out).device == made.device


def test_what_constants_leave_is_kept_by_the_shape_of_layers(tmp_path: Path) -> None:
    pytest.importorskip("scipy")
    made = sheet(measured(kind="cuda"))
    slow = hardware.LayerTiming(
        flops=7.34e6, tokens=64, samples=8, tp=2, took=4
    )  # what a layer of RUN has on tp2
    era = made.eras[ERA].model_copy(update={"layers": (slow,)})
    path = runs_of(tmp_path, made, era)
    header, *lines = path.read_text().splitlines()
    path.write_text("\n".join([header, *(line for line in lines for _ in range(3))]) + "\n")
    runs = fit_runs.read_runs(path, made.kind)
    at = hardware.Cluster(hardware=made, devices=2)
    found = fit_runs.fit_runs_to_era(runs, at, made.eras[ERA])
    assert (
        max(abs(error) for each in found.errors.values() for error in each[1]) < 0.1
    )  # of constants alone 0.4
    most = max(found.era.layers, key=lambda layer: layer.took)
    assert (most.tp, most.samples) == (2, 8) and most.took > 2
    assert (
        fit_runs.fit_runs_to_era(runs, at, era).era == found.era
    )  # layers told of what other constants left


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read"),
        ("run,step_s\nrun.toml,1\n", "has 1 rows"),
        ("run,step_s,speed\n" + "run.toml,1,2\n" * 4, "speed"),
        ("run,layout\n" + "run.toml,dp2\n" * 4, "step_s"),
        ("run,step_s\nrun.toml,1\nrun.toml,quick\n" + "run.toml,1\n" * 2, "line 3, step_s"),
        ("run,step_s\n" + "none.toml,1\n" * 4, "none.toml"),
    ],
)
def test_runs_that_cannot_be_fitted_are_refused(
    tmp_path: Path, text: str | None, said: str
) -> None:
    (tmp_path / "run.toml").write_text(RUN)
    if text is not None:
        (tmp_path / "runs.csv").write_text(text)
    result = CliRunner().invoke(
        app, ["calibrate", "--fit", str(tmp_path / "runs.csv"), "--cluster", "h100x2"]
    )
    assert result.exit_code == 2 and said in result.stderr


@pytest.mark.parametrize(
    "arguments", [["--fit", "runs.csv"], ["--cluster", "h100x2"], ["--era", "eager"]]
)
def test_options_of_a_fit_go_together(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["calibrate", *arguments])
    assert result.exit_code == 2 and "--fit goes with --cluster" in result.stderr
