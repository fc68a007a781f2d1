"""torchelastic's agent of one host, with hooks where it meets, watches and stops its ranks.

torchelastic offers no public hook: `SimpleElasticAgent.run` calls the methods overridden here.
"""

from __future__ import annotations

import signal

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs


class HookedAgent(LocalElasticAgent):
    """An agent whose subclasses override the hooks below, and nothing of torchelastic.

    Args:
        spec: what torchelastic starts, on how many ranks.
        logs: where the output of the ranks goes.
        shutdown_s: seconds that ranks have to end after they are told to.
    """

    def __init__(self, spec: WorkerSpec, logs: DefaultLogsSpecs, shutdown_s: int):
        super().__init__(spec, logs, start_method="spawn", shutdown_timeout=shutdown_s)
        self._remaining_restarts: int = spec.max_restarts
        self._shutdown_s = shutdown_s

    # ---- what subclasses override ----------------------------------------------------------------

    def before_rendezvous(self) -> None:
        """This host is about to wait for the others."""

    def after_rendezvous(self, group: WorkerGroup) -> None:
        """All hosts have come; the ranks of this one start next."""

    def after_monitor(self, group: WorkerGroup, result: RunResult) -> RunResult:
        """The ranks were looked at. Returns what torchelastic acts upon."""
        return result

    def before_exit_barrier(self) -> None:
        """All ranks of this host are done; it waits for the other hosts."""

    def stop_s(self, group: WorkerGroup) -> int:
        """Seconds that ranks have to end when all are to be started anew."""
        return self._shutdown_s

    def before_shutdown(self, timeout_s: int) -> None:
        """The ranks are about to be told to end, within these seconds."""

    # ---- what subclasses use ---------------------------------------------------------------------

    @property
    def group(self) -> WorkerGroup:
        """The ranks of this host, and its place among the hosts."""
        return self._worker_group

    @property
    def restarts_left(self) -> int:
        """How often torchelastic will still start all ranks anew."""
        return self._remaining_restarts

    @restarts_left.setter
    def restarts_left(self, count: int) -> None:
        self._remaining_restarts = count

    def pids(self) -> list[int]:
        """The processes of the ranks of this host."""
        return [*self._pcontext.pids().values()] if self._pcontext is not None else []

    def shut_down(self, timeout_s: int) -> None:
        """Tell the ranks of this host to end, and kill them after these seconds."""
        self._shutdown(timeout=timeout_s)

    # ---- torchelastic ----------------------------------------------------------------------------

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self.before_rendezvous()
        super()._rendezvous(worker_group)
        self.after_rendezvous(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        return self.after_monitor(worker_group, super()._monitor_workers(worker_group))

    def _exit_barrier(self) -> None:
        self.before_exit_barrier()
        super()._exit_barrier()

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown(timeout=self.stop_s(worker_group))

    def _shutdown(
        self, death_sig: signal.Signals = signal.SIGTERM, timeout: int | None = None
    ) -> None:
        timeout = self._shutdown_s if timeout is None else timeout
        self.before_shutdown(timeout)
        super()._shutdown(death_sig, timeout)
