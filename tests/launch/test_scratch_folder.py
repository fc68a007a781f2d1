"""What a launcher that was killed leaves is removed, and nothing else."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from weft.launch import scratch_folder
from weft.launch.local_workers import run_workers
from weft.launch.scratch_folder import PREFIX, ScratchFolder

FORK = multiprocessing.get_context("fork")
OLD = time.time() - 10 * scratch_folder.NEW_S


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def folders(place: Path) -> list[Path]:
    return sorted(place.glob(f"{PREFIX}*"))


def wait_for(happens: Callable[[], object]) -> None:
    until = time.monotonic() + 30
    while not happens():
        assert time.monotonic() < until
        time.sleep(0.02)


def launch(file: str) -> None:
    run_workers(work, 2, file)


def work(file: str) -> None:
    with open(file, "a") as here:
        here.write(f"{os.getpid()}\n")
    time.sleep(1000)


def test_the_folder_of_a_launcher_that_was_killed(place: Path) -> None:
    ranks = place / "ranks"
    launcher = FORK.Process(target=launch, args=(str(ranks),))
    launcher.start()
    try:
        wait_for(lambda: ranks.exists() and len(ranks.read_text().split()) == 2)
        [left] = folders(place)
        os.utime(left, (OLD, OLD))
        with ScratchFolder():
            assert left.exists()  # its launcher lives
    finally:
        launcher.kill()
        launcher.join()
    wait_for(lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks.read_text().split()))
    assert folders(place) == [left]
    with ScratchFolder() as other:
        assert folders(place) == [Path(other.path)]
    assert folders(place) == []


def test_what_is_not_a_launchers_stays(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, target, new = place / f"{PREFIX}1", place / "target", place / f"{PREFIX}new"
    for folder in (theirs, target, new):
        folder.mkdir()
    (place / f"{PREFIX}link").symlink_to(target)
    (place / f"{PREFIX}file").write_text("")
    for path in (theirs, target, place / f"{PREFIX}file"):
        os.utime(path, (OLD, OLD))
    left = folders(place)
    monkeypatch.setattr(scratch_folder.os, "getuid", lambda: os.geteuid() + 1)
    with ScratchFolder():
        assert [folder for folder in left if not folder.exists()] == []
    monkeypatch.undo()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    with ScratchFolder():
        assert [folder for folder in left if not folder.exists()] == [theirs]
    assert target.is_dir()


def test_a_folder_is_this_users_alone() -> None:
    with ScratchFolder() as made:
        assert os.stat(made.path).st_mode & 0o777 == 0o700
