"""`weft plan`: a run file and a cluster, to a table, an explanation, and a run file that trains."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from tests.planner.test_search import cluster
from tests.train.test_trainer import RUN
from weft.cli.app import app
from weft.core import run_config, toml
from weft.core.errors import ConfigError
from weft.core.layout import Layout
from weft.core.run_config import RunConfig
from weft.launch.local_workers import Pool
from weft.pipeline import schedules
from weft.planner import plan_run
from weft.planner.cost.estimate import estimate
from weft.planner.cost.hardware import Cluster, named_sheet
from weft.planner.search.feasibility import FeasibilityChecker, run_with_row
from weft.planner.search.query_from_run import query_from_run
from weft.planner.search.ranking import rank
from weft.planner.search.run_precision import run_precision
from weft.train import build, build_data, run_checks
from weft.train.trainer import train


def files(folder: Path, memory_gib: float = 80.0, **settings: Any) -> tuple[Path, str]:
    """A run file of a tiny decoder, and a cluster's sheet beside it."""
    run, sheet = folder / "run.toml", folder / "sheet.toml"
    run.write_text(RUN)
    if settings:
        overrides = {key.replace("__", "."): json.dumps(value) for key, value in settings.items()}
        run.write_text(toml.dump_toml(run_config.load_run(run, overrides)))
    sheet.write_text(toml.dump_toml(cluster(2, memory_gib).hardware))
    return run, str(sheet)


def loaded(path: Path, **settings: Any) -> RunConfig:
    return run_config.load_run(
        path, {key.replace("__", "."): json.dumps(value) for key, value in settings.items()}
    )


def weft(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_a_table_of_the_best_layouts(tmp_path: Path) -> None:
    run, sheet = files(tmp_path)
    result = weft("plan", run, "--cluster", f"{sheet}x4", "--top", "3")
    assert result.exit_code == 0, result.output
    assert max(map(len, result.output.splitlines())) <= 120
    head, *rows = result.output.split("\n\n")[1].splitlines()
    assert head.split() == [
        "layout",
        "schedule",
        "micro",
        "recompute",
        "step",
        "s",
        "80",
        "%",
        "tokens/s",
        "MFU",
        "GiB",
        "limited",
        "by",
    ]
    assert [row.split()[0] for row in rows] == ["1", "2", "3"]
    assert "why not" in result.output and "pipeline and data parallel" in result.output
    assert "with --out run-test.toml, then weft train run-test.toml" in result.output


def test_the_file_that_it_writes_trains(tmp_path: Path, pool: Pool) -> None:
    """It is what the table's first line says, and runs as that."""
    run, sheet = files(tmp_path)
    (folder := tmp_path / "elsewhere").mkdir()
    out = folder / "chosen.toml"
    asked = (
        "plan",
        run,
        "--cluster",
        f"{sheet}x2",
        "--layout",
        "pp2+interleaved.*",
        "--json",
        "--out",
        out,
    )
    result = weft(*asked)
    assert result.exit_code == 0, result.output
    best, written = json.loads(result.output)["best"], run_config.load_run(out)
    assert str(written.layout.axes) == best["layout"] == "pp2"
    assert (written.train.accumulate, written.train.recompute) == (
        best["accumulate"],
        best["recompute"],
    )
    assert (written.pipeline.schedule, written.pipeline.arguments) == (
        "interleaved",
        best["options"],
    )
    assert Path(written.folder).resolve() == tmp_path  # whose modules it names
    there = written.model_copy(update={"output": str(tmp_path / "out")})
    run_checks.check_run(there)
    assert not any(pool.run(train, there, False, world=2))
    steps = [
        json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in steps if "loss" in line] == list(range(1, 7))


def test_json_says_all(tmp_path: Path) -> None:
    run, sheet = files(tmp_path)
    found = json.loads(weft("plan", run, "--cluster", f"{sheet}x2", "--json").output)
    assert (
        found["devices"] == 2
        and found["batch"] == 8
        and found["precision"] == "fp32"
        and found["era"] == "eager"
    )
    for row in found["rows"]:
        assert sum(row["time"].values()) == pytest.approx(row["step_s"])
        assert row["tokens_per_s"] == pytest.approx(8 * 8 / row["step_s"])
        assert (
            row["microbatch"]
            * row["accumulate"]
            * Layout.parse(row["layout"]).size("dp", "fsdp", "ep")
            == 8
        )
    assert found["rows"][0] == found["best"]
    assert found["steps"] == 6 and found["run_s"] == 6 * found["best"]["step_s"]
    assert found["left_out"][0] == {"axis": "ep", "sizes": [2], "why": "the model has no experts"}


@pytest.mark.parametrize("layers", ["0", "1"])
def test_a_decoder_of_fewer_than_two_blocks_is_searched(tmp_path: Path, layers: str) -> None:
    run, sheet = files(tmp_path)
    settings = ("--set", f"model.layers={layers}", "--set", "train.steps=2000000")
    result = weft("plan", run, "--cluster", f"{sheet}x2", *settings)
    assert result.exit_code == 0, result.output
    assert f"parameters in {layers} blocks" in result.output
    assert re.search(
        r"^run      2,000,000 steps in [0-9.,]+ h, with [a-z0-9+]+$", result.output, re.M
    )


def test_a_whole_layout_is_priced_as_the_run_file_has_it(tmp_path: Path) -> None:
    run, sheet = files(tmp_path, train__recompute="full", pipeline__schedule="zb-v")
    found = json.loads(
        weft("plan", run, "--cluster", f"{sheet}x8", "--layout", "pp2.dp2", "--json").output
    )
    (row,) = found["rows"]
    assert (row["layout"], row["schedule"], row["recompute"]) == ("pp2.dp2", "zb-v", "full")
    assert (row["accumulate"], row["microbatch"], found["devices"]) == (2, 2, 4)
    there = query_from_run(loaded(run), "pp2.dp2", "cuda")
    where = Cluster.parse(f"{sheet}x8")
    alone = estimate(
        there.work, there.choices, where, where.hardware.era("eager"), there.practice, there.sync
    )
    assert sum(row["memory"].values()) == pytest.approx(alone.peak_bytes[0])


def test_blocks_that_run_again_by_name_are_priced_by_their_share(tmp_path: Path) -> None:
    """Any two of four blocks as every second one; three of them between those and all."""
    run, sheet = files(tmp_path)
    where, found = Cluster.parse(f"{sheet}x1"), {}
    named = {"two": ["blocks.[02]"], "first": ["blocks.0", "blocks.1"], "three": ["blocks.[0-2]"]}
    for name, again in {**named, "second": 2, "full": "full", "none": "none"}.items():
        asked = query_from_run(loaded(run, model__layers=4, train__recompute=again))
        era = where.hardware.era("eager")
        made = estimate(asked.work, asked.choices, where, era, asked.practice, asked.sync)
        found[name] = float(made.peak_bytes[0]), float(made.step_s[0])
    assert found["two"] == found["first"] == found["second"]
    for less, more in (("full", "three"), ("three", "two"), ("two", "none")):
        assert found[less][0] < found[more][0] and found[less][1] > found[more][1]
    result = weft(
        "plan", run, "--cluster", f"{sheet}x2", "--layout", "dp2", "--json",
        "--set", 'train.recompute=["blocks.0"]',
    )  # fmt: skip
    (row,) = json.loads(result.output)["rows"]
    assert row["recompute"] == ["blocks.0"]
    asked = ("--layout", "dp2", "--explain", "fsdp2", "--set", 'train.recompute=["blocks.0"]')
    assert weft("plan", run, "--cluster", f"{sheet}x2", *asked).exit_code == 0
    wrong = ("--layout", "dp2", "--set", 'train.recompute=["block.0"]')
    refused = weft("plan", run, "--cluster", f"{sheet}x2", *wrong)
    assert refused.exit_code == 2 and "matches no module" in refused.output


def test_a_schedule_of_ones_own_keeps_its_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedules, "_registered", {})
    run, sheet = files(tmp_path, pipeline__schedule="tests.staged:own_gpipe", pipeline__back=True)
    asked = (
        "plan",
        run,
        "--cluster",
        f"{sheet}x2",
        "--layout",
        "pp2",
        "--json",
        "--out",
        tmp_path / "out.toml",
    )
    found = weft(*asked)
    assert found.exit_code == 0, found.output
    assert json.loads(found.output)["best"]["schedule"] == "tests.staged:own_gpipe"
    written = run_config.load_run(tmp_path / "out.toml").pipeline
    assert (written.schedule, written.arguments) == ("tests.staged:own_gpipe", {"back": True})
    run, _ = files(tmp_path, pipeline__schedule="tests.staged:own_gpipe", pipeline__bak=True)
    found = weft("plan", run, "--cluster", f"{sheet}x2", "--layout", "pp2")
    assert found.exit_code == 2 and 'Did you mean "back"' in found.output
    run, _ = files(tmp_path, pipeline__schedule="tests.staged:broken")
    found = weft("plan", run, "--cluster", f"{sheet}x2", "--layout", "pp2")
    assert (
        found.exit_code == 2
        and "'tests.staged:broken': raises KeyError: 'tide' (line " in found.output
    ), found.output


def test_a_layout_that_does_not_fit_is_written_as_such(tmp_path: Path) -> None:
    run, sheet = files(tmp_path, memory_gib=1e-5)
    asked = ("plan", run, "--cluster", f"{sheet}x2", "--layout", "dp2")
    said = weft(*asked, "--out", tmp_path / "out.toml").output
    assert said.endswith("out.toml, which does not fit\n") and "does not fit by" in said
    assert "weft train" not in said and "weft train" not in weft(*asked).output


def test_a_layout_that_does_not_fit_as_it_is_run(tmp_path: Path) -> None:
    """In as many microbatches as can be, it would."""
    run, sheet = files(tmp_path, train__accumulate=1, train__batch=64)
    few = json.loads(
        weft("plan", run, "--cluster", f"{sheet}x2", "--layout", "dp2", "--json").output
    )
    more = ("--set", "train.accumulate=32", "--set", 'train.recompute="full"')
    many = json.loads(
        weft("plan", run, "--cluster", f"{sheet}x2", "--layout", "dp2", "--json", *more).output
    )
    least, most = many["best"]["held_bytes"], few["best"]["held_bytes"]
    assert few["notes"] == many["notes"] == [] and least < most

    def noted(memory_bytes: float) -> str:
        limit = ("--max-memory", str(memory_bytes / 2**30))
        found = weft("plan", run, "--cluster", f"{sheet}x2", "--layout", "dp2", *limit).output
        assert "does not fit by" in found
        return found

    assert "note     it would fit as dp2: " in noted((least + most) / 2)
    nearest = (
        "note     no number of microbatches and no recomputation makes it fit: the nearest, dp2:"
        " 32 microbatches of 1, "
    )
    assert nearest in noted(least * 0.9)
    for layout in (
        "pp2+solved",
        "cp2+ulysses",
        "tp2.dp2",
    ):  # which no search has, or has in another order
        limit = ("--max-memory", str((least + most) / 2 / 2**30))
        found = weft("plan", run, "--cluster", f"{sheet}x4", "--layout", layout, *limit)
        said = layout.replace("cp2+ulysses", "ulysses2").removesuffix("+solved")
        assert found.exit_code == 0 and f"it would fit as {said}: " in found.output, found.output
        assert ("solved" in layout) == (", solved" in found.output)


def test_a_search_says_that_it_has_its_own_schedules(tmp_path: Path) -> None:
    run, sheet = files(tmp_path, pipeline__schedule="tests.staged:own_gpipe")
    said = weft("plan", run, "--cluster", f"{sheet}x2", "--layout", "pp2.*").output
    assert "note     the search leaves out tests.staged:own_gpipe: give a complete --layout" in said
    assert (
        "the search leaves out"
        not in weft("plan", run, "--cluster", f"{sheet}x2", "--layout", "dp2.*").output
    )


@pytest.mark.slow(ci=False)
def test_a_schedule_that_is_not_named_is_the_best_there_is(tmp_path: Path) -> None:
    run, sheet = files(tmp_path, model__layers=16, model__dim=512, train__batch=64)

    def explained(asked: str) -> dict[str, Any]:
        return json.loads(
            weft("plan", run, "--cluster", f"{sheet}x4", "--explain", asked, "--json").output
        )["explained"]

    names = ("1f1b", "gpipe", "interleaved", "interleaved-zb", "zb-h1", "zb-v")
    named = {name: explained(f"pp4+{name}") for name in names}
    best = explained("pp4")
    assert all(row["schedule"] == name and row["simulated"] for name, row in named.items())
    assert best["step_s"] == pytest.approx(min(row["step_s"] for row in named.values()), rel=0.02)
    assert best["step_s"] < 0.95 * named["1f1b"]["step_s"]


def test_what_is_shown_is_explained_as_it_is_shown(tmp_path: Path) -> None:
    """In the table, and among what is not the best."""
    run, sheet = files(tmp_path)
    asked = ("plan", run, "--cluster", f"{sheet}x8", "--json")
    found = json.loads(weft(*asked, "--top", "3").output)
    shown = [*found["rows"], *(one["row"] for one in found["losers"] if one["row"])]
    assert len({row["layout"] for row in shown}) >= 4
    for row in shown:
        told = json.loads(weft(*asked, "--top", "3", "--explain", row["layout"]).output)[
            "explained"
        ]
        wanted = next(each for each in shown if each["layout"] == row["layout"])
        wanted = {key: value for key, value in wanted.items() if key != "as_fast_as"}
        assert told.items() >= wanted.items()


def test_more_stages_than_blocks(tmp_path: Path) -> None:
    """What stands before and behind the two blocks may be stages, too."""
    run, sheet = files(tmp_path)
    result = weft("plan", run, "--cluster", f"{sheet}x8")
    assert result.exit_code == 0 and "pp4.dp2" in result.output, result.output


def test_a_search_of_a_single_block(tmp_path: Path) -> None:
    run, sheet = files(tmp_path, model__layers=1)
    result = weft("plan", run, "--cluster", f"{sheet}x2")
    assert result.exit_code == 0 and "dp2" in result.output, result.output


def test_cuts_of_ones_own_are_kept_where_there_are_as_many_stages(tmp_path: Path) -> None:
    run, sheet = files(tmp_path, pipeline__cut=["blocks.1"])
    asked = ("plan", run, "--cluster", f"{sheet}x4", "--out", tmp_path / "out.toml", "--layout")
    said = weft(*asked, "pp2.dp2").output
    assert (
        "note     pipeline.cut names where stages begin, but the estimate assumes even stages"
        in said
    )
    assert run_config.load_run(tmp_path / "out.toml").pipeline.cut == ("blocks.1",)
    refused = weft(*asked, "pp4")
    assert refused.exit_code == 2 and "1f1b over pp4 has 4 stages" in refused.output
    assert (
        weft(*asked, "pp4.*").exit_code == 0
        and run_config.load_run(tmp_path / "out.toml").pipeline.cut == "flops"
    )


def test_a_whole_layout_keeps_its_order(tmp_path: Path) -> None:
    run, sheet = files(tmp_path)
    found = json.loads(
        weft("plan", run, "--cluster", f"{sheet}x8", "--layout", "tp2.dp2", "--json").output
    )
    assert found["best"]["layout"] == "tp2.dp2"


def test_explain_puts_values_into_formulas(tmp_path: Path) -> None:
    run, sheet = files(tmp_path)
    said = weft("plan", run, "--cluster", f"{sheet}x2", "--explain", "fsdp2+zero1").output
    count = build.build_skeleton(loaded(run))
    params = f"{sum(p.numel() for p in count.parameters()):.4g}"
    assert said.startswith("fsdp2+zero1: ")
    assert f"= {params} x 4 + 0 + {params} x 0\n" in said  # weights, none in int8, and no copies
    assert f"= {params} x 4\n" in said  # gradients
    assert "= 0.02\n" in said
    told = weft("plan", run, "--cluster", f"{sheet}x2", "--explain", "fsdp2+zero1", "--json").output
    row = json.loads(told)["explained"]
    assert row["layout"] == "fsdp2+zero1"
    for kind, whole in (("time", row["step_s"]), ("memory", sum(row["memory"].values()))):
        assert sum(part["value"] for part in row["parts"][kind]) == pytest.approx(whole)
    assert all(part["formula"] for part in row["parts"]["time"])
    refused = weft("plan", run, "--cluster", f"{sheet}x8", "--explain", "tp8")
    assert (
        refused.exit_code == 2
        and "--explain = 'tp8'" in refused.output
        and "4 heads" in refused.output
    )


@pytest.mark.grid(4, ci=3)
@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("pp2+interleaved.tp2", "pp2.tp2: 1 microbatches of 8, interleaved, 2 chunks"),
        ("pp2+solved.dp2", "pp2.dp2: 1 microbatches of 4, solved"),
        ("tp2.dp2", "tp2.dp2: 1 microbatches of 4"),
        ("tp2+sequence.dp2", "tp2+sequence.dp2: 1 microbatches of 4"),
        ("dp2.fsdp2", "dp2.fsdp2: 1 microbatches of 2"),
        ("cp2+ulysses.dp2", "ulysses2.dp2: 1 microbatches of 4"),
        ("cp4+gather", "cp4+gather: 1 microbatches of 8"),
        ("tp1+sequence.dp2", "dp2: 1 microbatches of 4"),
        ("cp4+ulysses", "ulysses4: 1 microbatches of 8"),
    ],
)
def test_what_is_explained_is_what_was_asked_for(tmp_path: Path, asked: str, found: str) -> None:
    """Nothing is added to it, its axes keep their order, and a schedule that it names is its
    own."""
    run, sheet = files(tmp_path)
    said = weft("plan", run, "--cluster", f"{sheet}x4", "--explain", asked).output
    assert said.splitlines()[0] == found and ("pp" in asked) == ("as simulated" in said)
    whole = weft(
        "plan", run, "--cluster", f"{sheet}x4", "--explain", asked, "--layout", asked, "--json"
    ).output
    told = json.loads(whole)
    assert told["best"].pop("as_fast_as") == []
    assert told["explained"].items() >= told["best"].items()
    little = ("--max-memory", str(told["best"]["held_bytes"] / 2**30 * 0.9))
    short = weft(
        "plan", run, "--cluster", f"{sheet}x4", "--explain", asked, "--layout", asked, *little
    ).output
    assert " GiB, which does not fit by " in short


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--cluster", "h10x8"), "there is no such sheet"),
        (("--cluster", "{sheet}x2", "--era", "steam"), "has no such era"),
        (("--cluster", "{sheet}x2", "--layout", "tp3.*"), "3 ranks are more than 2 devices"),
        (("--cluster", "{sheet}x16", "--layout", "tp8.*"), "4 heads. Sizes that work: tp2, tp4"),
        (
            ("--cluster", "{sheet}x2", "--layout", "dp4"),
            "has 4 ranks, and sheet.tomlx2 has 2 devices",
        ),
        (("--cluster", "{sheet}x2", "--max-memory", "90"), "at most 80 GiB"),
        (("--cluster", "{sheet}x2", "--explain", "dp*"), "is not a complete layout"),
        (
            ("--cluster", "{sheet}x2", "--set", "pipeline.schedule=wave"),
            "pipeline.schedule = 'wave': there is no such",
        ),
        (
            ("--cluster", "{sheet}x16", "--layout", "pp16.*"),
            "parts for 16 stages. Sizes that work: pp2, pp4",
        ),
        (
            ("--cluster", "{sheet}x8", "--layout", "cp8+ulysses"),
            "heads of a rank do not divide over ulysses8. Sizes that work: ulysses2, ulysses4",
        ),
        (
            ("--cluster", "{sheet}x2", "--explain", "dq2"),
            "--explain = 'dq2': there is no axis 'dq'",
        ),
        (("--cluster", "{sheet}x2", "--explain", "dp4"), "--explain = 'dp4': has 4 ranks"),
        (
            ("--cluster", "{sheet}x4", "--explain", "fsdp2.dp2"),
            "--explain = 'fsdp2.dp2': fsdp outside dp",
        ),
        (
            ("--cluster", "{sheet}x4", "--layout", "dp2+much"),
            "--layout = 'dp2+much': axis dp has no option 'much'",
        ),
        (
            ("--cluster", "{sheet}x4", "--explain", "pp2+1f1b+gpipe"),
            "'pp2+1f1b+gpipe': 1f1b and gpipe at once",
        ),
        (
            ("--cluster", "{sheet}x4", "--explain", "pp4+interleaved"),
            "parts for 8 stages. Sizes that work: pp2",
        ),
        (
            ("--cluster", "{sheet}x4", "--explain", "tp3"),
            "--explain = 'tp3': 4 heads. Sizes that work: tp2, tp4",
        ),
        (("--cluster", "{sheet}x2", "--out", "/nowhere/at/all.toml"), "cannot be written"),
    ],
)
def test_what_is_refused(tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    run, sheet = files(tmp_path)
    result = weft("plan", run, *(text.replace("{sheet}", sheet) for text in arguments))
    assert result.exit_code == 2, result.output
    assert says.replace("sheet.toml", "test") in " ".join(result.output.split()), result.output


def test_what_would_help_where_nothing_fits(tmp_path: Path) -> None:
    """Of a model of which half fits on a device: twice the devices, or the host's memory."""
    run, sheet = files(tmp_path)
    whole = build.build_skeleton(loaded(run))
    state = sum(p.numel() for p in whole.parameters()) * 16 / 2**30
    result = weft("plan", run, "--cluster", f"{sheet}x2", "--max-memory", str(state / 2.3))
    assert result.exit_code == 2
    said = " ".join(result.output.split())
    assert "--max-memory = " in said and "no layout fits: " in said and "too many" in said
    assert "4 devices would do, with " in said and "+offload" in said


def test_what_weft_refuses_is_said_and_the_next_one_taken(tmp_path: Path) -> None:
    """Features inside of an MLP are not in the work: that tp2 does not divide them weft's own
    planner says."""
    run, sheet = files(tmp_path, model__hidden=33)
    there = loaded(run)
    where = Cluster.parse(f"{sheet}x2")
    found = rank(plan_run.make_plan_query(there, where, "eager"))
    tp = [row for row in found.rows if "tp2" in row.layout]
    assert tp, "no tp2 to refuse"
    judge = FeasibilityChecker(there, build.build_skeleton(there), build_data.build_dataset(there))
    best = judge.first((*tp, *(row for row in found.rows if row not in tp)))
    assert best is not None and "tp2" not in best.layout
    assert "features, which tp2 does not divide" in judge.refused[0][1].problem
    run_checks.check_run(run_with_row(there, best))


@pytest.mark.parametrize(
    ("settings", "weights", "state", "copy"),
    [
        ({}, 4, 8, 0),
        ({"precision__compute": "bf16"}, 4, 8, 2),
        ({"precision__compute": "fp64"}, 8, 16, 0),
        ({"optimizer__name": "sgd"}, 4, 0, 0),
        ({"optimizer__name": "sgd", "optimizer__momentum": 0.9}, 4, 4, 0),
        ({"optimizer__amsgrad": True}, 4, 12, 0),
    ],
)
def test_what_weft_keeps_of_a_parameter(
    tmp_path: Path, settings: dict[str, Any], weights: int, state: int, copy: int
) -> None:
    run, _ = files(tmp_path)
    found = run_precision(loaded(run, **settings))
    assert (found.weight_bytes, found.grad_bytes, found.reduce_bytes) == (weights,) * 3
    assert (found.state_bytes, found.copy_bytes) == (state, copy)


def test_what_weft_keeps_of_logits(tmp_path: Path) -> None:
    run, _ = files(tmp_path)
    found = run_precision(loaded(run))
    assert (found.logit_bytes, found.few_logits, found.always_chunks) == (8, 2**26, False)
    assert run_precision(loaded(run, train__logits="whole")).few_logits == math.inf
    assert run_precision(loaded(run, train__logits="chunks")).always_chunks
    assert run_precision(loaded(run, train__loss="weft.losses:mse")).few_logits == math.inf
    assert run_precision(loaded(run, precision__compute="bf16")).logit_bytes == 4


def test_what_weft_sends_of_a_parameter(tmp_path: Path) -> None:
    run, _ = files(tmp_path)
    for reduce, nbytes in (("fp32", 4), ("bf16", 2)):
        found = run_precision(loaded(run, precision__compute="bf16", precision__reduce=reduce))
        assert (found.gather_bytes, found.reduce_bytes) == (2, nbytes)
    assert run_precision(loaded(run)).gather_bytes == 4


def test_memory_options_of_a_run_are_priced(tmp_path: Path) -> None:
    run, _ = files(tmp_path)
    plain = run_precision(loaded(run))
    assert (plain.ahead, plain.host_activations) == (1, False)
    found = run_precision(loaded(run, train__fsdp_prefetch=3, train__offload_activations=True))
    assert found == replace(plain, ahead=3, host_activations=True)


def test_float8_is_priced_at_the_rate_of_the_sheet(tmp_path: Path) -> None:
    run, sheet = files(tmp_path)
    low = {"precision__compute": "bf16", "precision__float8": "rowwise"}
    found = run_precision(loaded(run, **low))
    plain = run_precision(loaded(run, precision__compute="bf16"))
    assert replace(found, compute="bf16", wide_experts=False) == plain
    options = "--set", "precision.compute=bf16", "--set", "model.dim=64"
    eight = (*options, "--set", "precision.float8=rowwise")
    assert weft("plan", run, "--cluster", "h100x2", *eight).exit_code == 0
    for cards in ("a100x2", f"{sheet}x2"):
        refused = weft("plan", run, "--cluster", cards, *eight)
        assert refused.exit_code == 2 and "precision.float8" in refused.output, refused.output


def test_experts_are_priced_in_bf16_beside_float8(tmp_path: Path) -> None:
    run, _ = files(tmp_path)
    low = {"model__experts": 4, "precision__compute": "bf16"}
    asked = query_from_run(loaded(run, **low, precision__float8="rowwise"))
    hardware = named_sheet("h100")
    took = [
        float(
            estimate(
                asked.work,
                asked.choices,
                Cluster.of(hardware, 1),
                hardware.eras["compiled"],
                replace(asked.practice, compute=compute, wide_experts=wide),
                asked.sync,
            )
            .time[0]
            .value[0]
        )
        for compute, wide in (("fp8", False), ("fp8", True), ("bf16", False))
    ]
    assert asked.practice.wide_experts and took[0] < took[1] < took[2]


def test_workers_have_no_layout(tmp_path: Path) -> None:
    run, sheet = files(tmp_path)
    with pytest.raises(ConfigError, match="run whole modules, so there is no layout to choose"):
        plan_run.plan_for_cluster(
            run_config.load_run(run, {"workers.big": '["blocks.0"]'}),
            f"{sheet}x2",
            (),
            None,
            None,
            False,
        )
