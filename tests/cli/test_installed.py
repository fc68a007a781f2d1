"""What an installation has: its packages, its extras, its examples; and systems without /proc."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from packaging.requirements import Requirement
from typer.testing import CliRunner

from tests.run_files import TINY
from weft.cli.app import app
from weft.core import run_config
from weft.core.version import __version__
from weft.launch.doctor import folder as folders, machine
from weft.planner.calibrate import cpu_contention, measure
from weft.train.trainer import train

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MOST_PACKAGES = 12  # beside torch and numpy, and what these bring


def weft_(*args: str | Path) -> Result:
    return CliRunner().invoke(app, [*map(str, args)])


def brought_by(names: list[str]) -> set[str]:
    """The packages that installing these installs."""
    found: set[str] = set()
    while names:
        name = names.pop().lower().replace("_", "-")
        if name not in found:
            found.add(name)
            needs = [Requirement(each) for each in importlib.metadata.requires(name) or []]
            names += [
                each.name
                for each in needs
                if each.marker is None or each.marker.evaluate({"extra": ""})
            ]
    return found


def test_weft_brings_few_packages() -> None:
    own = [Requirement(each).name for each in PROJECT["dependencies"]]
    assert {"torch", "numpy"} <= {*own}
    more = brought_by(own) - brought_by(["torch", "numpy"])
    assert len(more) <= MOST_PACKAGES, sorted(more)


def test_version() -> None:
    result = weft_("--version")
    assert (result.exit_code, result.stdout) == (0, f"weft {__version__}\n")


# ---- examples ------------------------------------------------------------------------------------


def test_examples_are_copied(tmp_path: Path) -> None:
    result = weft_("examples", "copy", tmp_path / "mine")
    assert result.exit_code == 0, result.output
    theirs = {path.name: path.read_bytes() for path in ROOT.glob("examples/*") if path.is_file()}
    mine = {path.name: path.read_bytes() for path in tmp_path.glob("mine/*") if path.is_file()}
    assert mine == theirs and (tmp_path / "mine" / "llama" / "config.json").is_file()
    again = weft_("examples", "copy", tmp_path / "mine")
    assert again.exit_code == 2 and "mine': is there already. Name a directory" in again.stderr
    assert weft_("examples", "copy", "/dev/null/x").exit_code == 2


def test_a_wheel_has_the_examples(tmp_path: Path) -> None:
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("src", "examples"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    code = f"from setuptools import build_meta as b; print(b.build_wheel({str(tmp_path)!r}))"
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"weft/examples/quickstart.toml", "weft/examples/llama/config.json"} <= {*names}
    assert {"weft/py.typed", "weft/planner/hardware/h100.toml", "weft/core/__init__.pyi"} <= {
        *names
    }
    assert not [name for name in names if name.startswith(("tests", "examples", "src"))]


# ---- extras --------------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "words.txt").write_text("a few words")
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "rows").mkdir()
    (tmp_path / "small.toml").write_text(TINY)
    return tmp_path / "small.toml"


STDLIB = 'build = "weft.data:stdlib"'
DECODER = TINY[TINY.index("build =") : TINY.index("[data]")]


@pytest.mark.parametrize(
    ("package", "old", "new", "extra"),
    [
        ("transformers", DECODER, 'hf = "config.json"\n', "hf"),
        ("tokenizers", STDLIB, 'text = ["words.txt"]\ntokenizer = "tokenizer.json"', "hf"),
        ("datasets", STDLIB, 'hf = "rows"', "hf"),
    ],
)
def test_a_run_that_needs_an_extra_names_it(
    small: Path, monkeypatch: pytest.MonkeyPatch, package: str, old: str, new: str, extra: str
) -> None:
    text = TINY.replace(old, new)
    small.write_text(text if STDLIB in text else text.replace("max_bytes = 100000\n", ""))
    monkeypatch.setitem(sys.modules, package, None)
    result = weft_("train", small)
    assert result.exit_code == 2, result.output
    assert f"needs the package {package}" in result.stderr
    assert f'Install it: pip install "weft[{extra}]".' in result.stderr


def test_without_tensorboard_metrics_are_written(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    run = run_config.load_run(small, {"train.log_every": "1"})
    train(run, False)
    lines = (Path(run.output) / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    assert not (Path(run.output) / "tensorboard").exists()
    assert 'pip install "weft[tensorboard]"' in " ".join(capsys.readouterr().out.split())


def test_every_extra_for_users_is_what_a_message_names() -> None:
    said = "".join(path.read_text() for path in ROOT.glob("src/weft/**/*.py"))
    for extra in {*PROJECT["optional-dependencies"]} - {"test", "docs"}:
        named = (
            f"weft[{extra}]" in said or f'"{extra}")' in said or f'extra: str = "{extra}"' in said
        )
        assert named, extra


# ---- other systems -------------------------------------------------------------------------------


def test_a_system_without_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As macOS is: nothing under /proc, no sched_getaffinity."""
    real = Path.read_text

    def read(path: Path, *args: Any, **options: Any) -> str:
        if str(path).startswith("/proc/"):
            raise FileNotFoundError(path)
        return real(path, *args, **options)

    monkeypatch.setattr(Path, "read_text", read)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert cpu_contention.CpuLoadSample.now().others(0.0) == 0.0
    assert measure.processor()
    assert machine._available() is None and machine._flags() == set()
    assert folders._file_system(tmp_path) == "a folder"
