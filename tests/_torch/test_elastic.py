"""What torchelastic must keep doing for weft._torch.elastic."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from weft._torch.elastic import HookedAgent


class Witness(HookedAgent):
    """Notes which hooks were called, and gives a failed rank one more restart."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.calls: list[str] = []
        self.ranks: list[int] = []

    def before_rendezvous(self) -> None:
        self.calls.append("before rendezvous")

    def after_rendezvous(self, group: WorkerGroup) -> None:
        self.calls.append(f"after rendezvous of {group.group_world_size}")

    def after_monitor(self, group: WorkerGroup, result: RunResult) -> RunResult:
        self.ranks += self.pids()
        if result.is_failed():
            again = any(call.startswith("failed") for call in self.calls)
            self.calls.append(f"failed with {self.restarts_left} restarts left")
            self.restarts_left = 0 if again else 1
        return result

    def before_exit_barrier(self) -> None:
        self.calls.append("before exit barrier")

    def stop_s(self, group: WorkerGroup) -> int:
        self.calls.append("stop")
        return 2

    def before_shutdown(self, timeout_s: int) -> None:
        self.calls.append(f"shutdown in {timeout_s} s")


def agent(tmp_path: Path, code: str) -> Witness:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    met = DynamicRendezvousHandler.from_backend(
        "test", store, C10dRendezvousBackend(store, "test"), 1, 1
    )
    spec = WorkerSpec("test", 1, met, entrypoint=sys.executable, args=("-c", code), max_restarts=0)
    return Witness(spec, DefaultLogsSpecs(log_dir=str(tmp_path)), 7)


@pytest.mark.parametrize("fails", [False, True])
def test_hooks_of_a_host(tmp_path: Path, fails: bool) -> None:
    host = agent(tmp_path, f"raise SystemExit({int(fails)})")
    assert host.run().is_failed() == fails
    begin = ["before rendezvous", "after rendezvous of 1"]
    failed = "failed with 0 restarts left"
    if fails:  # the hook allows a restart that torchelastic was not to make
        assert host.calls[:5] == [*begin, failed, "stop", "shutdown in 2 s"]
        assert host.calls[5:8] == [*begin, failed]
    else:
        assert host.calls[:3] == [*begin, "before exit barrier"]
    assert host.calls[-1] == "shutdown in 7 s" and host.group.group_rank == 0
    assert all(pid > 0 for pid in host.ranks)
