"""A run folder has one run at a time."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.train.test_failures import begun, steps_of
from weft.core.errors import ConfigError
from weft.train.run_lock import LOCK, run_lock


@pytest.mark.slow
def test_a_second_run_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    """Also where the first one is killed."""
    with begun(tmp_path, "dp2") as first:
        while len(steps_of(tmp_path)) < 5:
            time.sleep(0.01)
        with begun(tmp_path, "dp2", "--resume") as second:
            output, _ = second.communicate(timeout=60)
        assert second.returncode == 2, output
        words = " ".join(output.split())
        assert f"another run writes there (process {first.pid} on" in words
        assert first.poll() is None
        os.kill(first.pid, signal.SIGKILL)
        first.wait(20)
    with begun(tmp_path, "dp2", "--resume") as third:
        output, _ = third.communicate(timeout=120)
    assert third.returncode == 0, output
    assert not (tmp_path / "out" / LOCK).exists()


def child(folder: str, told: int) -> None:
    with run_lock(folder, make=True):
        os.write(told, b"held")
        time.sleep(1.0)


def held_elsewhere(folder: str) -> int:
    """A process that holds the lock for a second."""
    here, there = os.pipe()
    pid = os.fork()
    if not pid:
        child(folder, there)
        os._exit(0)
    assert os.read(here, 4) == b"held"
    return pid


def test_who_waits_gets_it(tmp_path: Path) -> None:
    folder = str(tmp_path / "out")
    pid = held_elsewhere(folder)
    with (
        pytest.raises(ConfigError, match=rf"process {pid} on .*Wait until it has ended"),
        run_lock(folder, make=True),
    ):
        pass
    with run_lock(folder, make=True, patience_s=20.0):
        os.waitpid(pid, 0)
        assert (tmp_path / "out" / LOCK).exists()
    assert not (tmp_path / "out" / LOCK).exists()


def test_no_folder_is_made_for_a_run_that_goes_on(tmp_path: Path) -> None:
    with run_lock(str(tmp_path / "out"), make=False):
        assert not (tmp_path / "out").exists()
