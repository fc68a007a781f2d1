"""Snapshots of GPU memory, and how busy GPUs are, by fakes of what torch says of them."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tests.run_files import TINY
from tests.train.test_trainer import make
from weft._torch import cuda_memory
from weft.cli.app import app
from weft.core import ConfigError, WeftError
from weft.train import gpu_use
from weft.train.gpu_use import GpuUse, why_unknown
from weft.train.memory_snapshot import MemorySnapshot

OUT = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of"
    " which 1.20 GiB is free. Process 5 has 77 GiB memory in use."
)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of torch, whose snapshot is how much was asked."""
    found: list[str] = []
    monkeypatch.setattr(cuda_memory, "record_allocations", lambda most: found.append("record"))
    monkeypatch.setattr(cuda_memory, "end_recording", lambda: found.append("end"))
    monkeypatch.setattr(cuda_memory, "memory_snapshot", lambda: pickle.dumps([*found]))
    return found


def test_a_snapshot_is_written_after_its_step(tmp_path: Path, calls: list[str]) -> None:
    snapshot = MemorySnapshot(2, tmp_path)
    with snapshot():
        for step in (1, 2, 3):
            with snapshot.step(step):
                calls.append(f"step {step}")
    assert calls == ["record", "step 1", "step 2", "end", "step 3"]
    assert [path.name for path in tmp_path.iterdir()] == ["memory-0.pickle"]
    written = pickle.loads((tmp_path / "memory-0.pickle").read_bytes())
    assert written == ["record", "step 1", "step 2"]


def test_it_is_written_where_memory_is_at_an_end(tmp_path: Path, calls: list[str]) -> None:
    snapshot = MemorySnapshot(3, tmp_path)
    with pytest.raises(WeftError) as caught, snapshot(), snapshot.step(1):
        calls.append("step 1")
        raise torch.OutOfMemoryError(OUT)
    said = str(caught.value)
    assert said.startswith(f"rank 0: {OUT.partition(' Process')[0]}")
    assert f"{tmp_path}/memory-0.pickle shows what uses the memory" in said and "\n" not in said
    written = pickle.loads((tmp_path / "memory-0.pickle").read_bytes())
    assert written == ["record", "step 1"]


def test_without_it_the_line_says_how(tmp_path: Path, calls: list[str]) -> None:
    snapshot = MemorySnapshot(None, tmp_path)
    with pytest.raises(WeftError, match=r"train\.memory_snapshot = 3 would record"), snapshot():
        raise torch.OutOfMemoryError(OUT)
    assert calls == [] and not [*tmp_path.iterdir()]


def test_a_cpu_has_none(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(TINY)
    given = [str(tmp_path / "run.toml"), "--set", "train.memory_snapshot=1"]
    result = CliRunner().invoke(app, ["train", *given])
    assert result.exit_code == 2
    assert "train.memory_snapshot = 1: it shows the memory of GPUs, and the ranks run" in (
        " ".join(result.output.split())
    )


def test_a_step_that_never_comes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"memory_snapshot = 7: goes beyond the last step"):
        make(tmp_path, train__memory_snapshot=7)


# ---- how busy GPUs are ---------------------------------------------------------------------------


def test_the_share_of_the_least_busy_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def lowest_of_others(value: int) -> int:
        asked.append(value)
        return max(value, -40)

    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 87)
    monkeypatch.setattr(gpu_use, "highest_over_ranks", lowest_of_others)
    assert GpuUse(torch.device("cuda", 0)).line() == {"gpu_utilization": 0.4}
    assert asked == [-87]


def test_what_cannot_be_read_is_left_out_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(device: torch.device) -> int:
        raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")

    monkeypatch.setattr(torch.cuda, "utilization", missing)
    device = torch.device("cuda", 0)
    assert why_unknown(device) == "pip install nvidia-ml-py"
    asked = []
    monkeypatch.setattr(gpu_use, "highest_over_ranks", lambda x: asked.append(x) or x)
    assert GpuUse(device).line() == {} and asked == [1]  # as ranks that can read it also ask


def test_without_gpus_nothing_is_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_use, "highest_over_ranks", lambda x: pytest.fail("exchanged"))
    assert GpuUse(torch.device("cpu")).line() == {} and why_unknown(torch.device("cpu")) is None
