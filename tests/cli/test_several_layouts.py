"""Commands that are given several layouts."""

from __future__ import annotations

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
    assert f"{LATE}: REFUSED\n  --precision = 'bf16': {LATE} updates weights late" in result.stdout
    assert "dp1: equal" in result.stdout
    assert f"these do not: {LATE} (refused)" in result.stdout


def test_verify_deep_refuses_a_layout_that_updates_late_and_verifies_the_others() -> None:
    result = weft_("verify", "small.toml", "--layout", LATE, "--layout", "dp1", "--deep")
    assert result.exit_code == 1, result.output
    assert f"{LATE}: REFUSED\n  --deep = True: compares with one device, and" in result.stdout
    assert "dp1, as weft train runs it: equal" in result.stdout
    assert f"{LATE}, as weft train" not in result.stdout
    assert f"these do not: {LATE} (refused)" in result.stdout


def test_verify_gives_the_reason_of_each_layout_where_it_refuses_all() -> None:
    result = weft_("verify", "small.toml", "--layout", "tp3", "--layout", LATE, "--deep")
    assert result.exit_code == 2, result.output
    assert "weft: tp3 is refused: layout = 'tp3': " in result.stderr
    assert f"weft: --deep = True: compares with one device, and {LATE} updates" in result.stderr
    assert result.stdout == ""
