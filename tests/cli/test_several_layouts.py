"""Commands that are given several layouts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from tests.run_files import TINY
from weft.cli.app import app

LATE = "pp2+pipedream"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a run file of two microbatches."""
    (tmp_path / "small.toml").write_text(
        TINY.replace("layers = 1", "layers = 2").replace("[train]", "[train]\naccumulate = 2")
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def weft_(*args: str) -> Result:
    return CliRunner().invoke(app, args)


def test_verify_refuses_a_layout_that_updates_late_and_verifies_the_others_in_bf16() -> None:
    options = ("--layout", LATE, "--layout", "dp1", "--precision", "bf16")
    result = weft_("verify", "small.toml", *options)
    assert result.exit_code == 1, result.output
    assert (
        f"{LATE}: REFUSED\n  --precision = 'bf16': {LATE} updates weights with a delay"
        in result.stdout
    )
    assert "dp1: equal" in result.stdout
    assert f"these do not: {LATE} (refused)" in result.stdout


SERVED = ("--set", "sync.name=parameter_server", "--set", "sync.staleness=2")


def test_verify_deep_refuses_servers_of_several_ranks_and_verifies_the_others() -> None:
    layouts = ("--layout", "dp2.tp2", "--layout", "dp1")
    result = weft_("verify", "small.toml", *layouts, "--deep", *SERVED)
    assert result.exit_code == 1, result.output
    assert "dp2.tp2: REFUSED\n  sync.name = 'parameter_server': in dp2.tp2" in result.stdout
    assert "dp1, as weft train runs it: equal" in result.stdout
    assert "dp2.tp2, as weft train" not in result.stdout
    assert "these do not: dp2.tp2 (refused)" in result.stdout


CENTRED = """
import torch

class Centred(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(4, 3)

    def forward(self, x):
        x = self.a(x)
        return x - x.mean(0)

class Data:
    def __init__(self, split="train"):
        self.x = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "target": self.x[index, :3]}
"""


def test_verify_deep_leaves_out_a_layout_that_verify_refuses(folder: Path) -> None:
    (folder / "centred.py").write_text(CENTRED)
    (folder / "centred.toml").write_text(
        '[model]\nbuild = "centred:Centred"\n[data]\nbuild = "centred:Data"\n'
        '[train]\nbatch = 4\nsteps = 40\nloss = "weft.losses:mse"\n'
    )
    result = weft_("verify", "centred.toml", "--layout", "dp2", "--layout", "dp1", "--deep")
    assert result.exit_code == 1, result.output
    assert "dp2: REFUSED" in result.stdout and "dp2, as weft train" not in result.stdout
    assert "dp1, as weft train runs it: equal" in result.stdout
    assert "what this run does" in result.stdout


def test_verify_says_that_no_ranks_exchange_by_a_codec() -> None:
    codec = ("--set", "sync.codec=int8")
    result = weft_("verify", "small.toml", "--layout", "tp2", *codec)
    assert result.exit_code == 0, result.output
    told = "not checked  [sync] allreduce, int8: no verified layout has ranks that exchange by it"
    assert told in result.stdout
    both = weft_("verify", "small.toml", "--layout", "tp2", "--layout", "dp2", *codec)
    assert "checked      [sync] allreduce, int8: by its own definition" in both.stdout


def test_verify_deep_trains_a_layout_that_updates_late() -> None:
    result = weft_("verify", "small.toml", "--layout", LATE, "--deep")
    assert result.exit_code == 0, result.output
    assert f"{LATE}, as weft train runs it: equal" in result.stdout
    assert "delayed weights   pipedream, versions stash, 2 stages" in result.stdout


def test_verify_deep_trains_with_workers() -> None:
    placed = ("--set", 'workers.storage=["embedding"]', "--set", 'workers.big=["blocks.0"]')
    result = weft_("verify", "small.toml", "--deep", *placed)
    assert result.exit_code == 0, result.output
    assert "dp1, workers storage, big, as weft train runs it: equal" in result.stdout
    assert "saving; resuming with [workers], and on one device" in result.stdout


def test_verify_gives_the_reason_of_each_layout_where_it_refuses_all() -> None:
    layouts = ("--layout", "tp3", "--layout", "dp2.tp2")
    result = weft_("verify", "small.toml", *layouts, "--deep", *SERVED)
    assert result.exit_code == 2, result.output
    assert "weft: tp3 is refused: layout = 'tp3': " in result.stderr
    assert "weft: sync.name = 'parameter_server': in dp2.tp2 each rank" in result.stderr
    assert result.stdout == ""


def planned(*layouts: str) -> Result:
    options = [word for layout in layouts for word in ("--layout", layout)]
    return weft_("plan", "small.toml", "--cluster", "h100x4", *options, "--json")


def test_plan_prices_each_layout_that_it_is_given() -> None:
    alone = [json.loads(planned(layout).stdout)["best"] for layout in ("tp2", "dp4", "pp2.dp2")]
    result = planned("tp2", "dp4", "tp2", "pp2.dp2")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    rows = [row | {"as_fast_as": []} for row in found["rows"]]  # of those beside it
    assert rows == sorted(alone, key=lambda row: row["step_s"])
    assert found["best"] == found["rows"][0] and found["devices"] == 4


def test_plan_chooses_what_fits_and_names_what_would() -> None:
    held = {
        row["layout"]: row["held_bytes"]
        for row in json.loads(planned("dp4", "fsdp4").stdout)["rows"]
    }
    between = str((held["dp4"] + held["fsdp4"]) / 2 / 2**30)
    options = ("--layout", "dp4", "--layout", "fsdp4", "--max-memory", between)
    result = weft_("plan", "small.toml", "--cluster", "h100x4", *options)
    assert result.exit_code == 0, result.output
    head, table, *_ = result.stdout.split("\n\n")
    assert "note     dp4: no number of microbatches" in head and "run      2 steps in" in head
    assert head.endswith(", with fsdp4") or ", with fsdp4\n" in head
    assert table.splitlines()[0].split() == ["dp4", "fsdp4"]
    assert "fits" in result.stdout and "over by" in result.stdout


@pytest.mark.parametrize(
    ("layouts", "says"),
    [
        (("dp4", "tp3"), "--layout = 'tp3': 2 heads. Sizes that work: tp2."),
        (
            ("dp4", "tp2.*"),
            "--layout = 'tp2.*': is a pattern, and a search takes only one pattern. Give it alone",
        ),
    ],
)
def test_plan_refuses_a_layout_among_several_by_its_name(
    layouts: tuple[str, ...], says: str
) -> None:
    result = planned(*layouts)
    assert (result.exit_code, result.stdout) == (2, "")
    assert says in result.stderr
