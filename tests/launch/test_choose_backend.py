"""Which backend a host's ranks get, and what is refused before they start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from weft.cli.app import app
from weft.core import ConfigError, RunConfig, load_run
from weft.launch import backend_of_run

RUN = """
[model]
build = "weft.models:decoder"
dim = 16
heads = 2
layers = 1
[data]
build = "weft.data:stdlib"
seq_len = 16
[layout]
axes = "dp2"
[train]
batch = 4
steps = 1
"""


def run_with(folder: Path, **keys: Any) -> RunConfig:
    path = folder / "run.toml"
    path.write_text(RUN + "".join(f'{key} = "{value}"\n' for key, value in keys.items()))
    return load_run(path)


def host(monkeypatch: pytest.MonkeyPatch, gpus: int, nccl: bool) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: nccl)


@pytest.mark.parametrize(
    ("asked", "gpus", "nccl", "found"),
    [
        ("auto", 0, False, "gloo"),
        ("auto", 2, True, "nccl"),
        ("auto", 1, True, "gloo"),
        ("auto", 2, False, "gloo"),
        ("gloo", 2, True, "gloo"),
        ("nccl", 2, True, "nccl"),
        ("cpu:gloo,cuda:nccl", 2, True, "nccl"),
    ],
)
def test_what_a_host_gets(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    asked: str,
    gpus: int,
    nccl: bool,
    found: str,
) -> None:
    host(monkeypatch, gpus, nccl)
    assert backend_of_run(run_with(tmp_path, backend=asked), 2) == found


@pytest.mark.parametrize(
    ("gpus", "nccl", "says"),
    [
        (0, False, 'is built without NCCL. Use "gloo", or a torch that is built for CUDA'),
        (
            0,
            True,
            'this host has 0 for 2. Use "gloo", which computes on the CPU.',
        ),
        (1, True, 'this host has 1 for 2. Use "gloo", which computes on the CPU, or fewer ranks.'),
    ],
)
def test_no_process_starts_where_it_does_not_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, nccl: bool, says: str
) -> None:
    host(monkeypatch, gpus, nccl)
    with pytest.raises(ConfigError) as caught:
        backend_of_run(run_with(tmp_path, backend="nccl"), 2)
    assert str(caught.value).startswith("train.backend = 'nccl'") and says in str(caught.value)
    ran = CliRunner().invoke(app, ["train", str(tmp_path / "run.toml")])
    assert ran.exit_code == 2 and says in " ".join(ran.output.split()), ran.output
    assert not (tmp_path / "runs").exists()


def test_workers_by_name_run_on_the_cpu(tmp_path: Path) -> None:
    run = run_with(tmp_path).model_copy(update={"workers": {"other": ("embedding",)}})
    assert backend_of_run(run, 2) == "gloo"
    train = run.train.model_copy(update={"backend": "nccl"})
    with pytest.raises(ConfigError, match="workers by name and their driver run on the CPU"):
        backend_of_run(run.model_copy(update={"train": train}), 2)
