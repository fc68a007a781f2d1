"""This host's agent in a run over several hosts: starts its ranks, and starts them again when a
host is lost or comes back.

What torchelastic leaves to do: hosts meet by the addresses by which they reach each other, whatever
their names resolve to; a host that falls silent is noticed by its missing beats, and not only when
a collective has timed out; ranks that were told to stop have not failed; and what weft itself ended
is not tried again.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
)

from weft._torch.elastic import HookedAgent
from weft.core import STOPPED, ConfigError, WeftError

from .environment import AGENT
from .gate import LOOPBACK, Passage, TokenGate, run_token
from .log import log_line
from .rendezvous import Rendezvous, listen_at
from .scratch_folder import ScratchFolder
from .signals import stop_signals
from .stores import join_hosts_store, keep_for_hosts, keep_store
from .terminal import leave_closed_terminal

COME_S = 600.0  # for the least number of hosts to come
NAMED_S = 60.0  # for the name of the one where they meet to stand for an address
MORE_S = 10.0  # then, for more of them
ALIVE_S, MISSED = 3, 3  # between signs of life of a host that has come, and how many it may miss
BEAT_S, SILENT_S = 2.0, 12.0  # between beats of a host whose ranks run, and after which it is lost
CUT_OFF_S = 30.0  # without an answer from where hosts meet, after which this host gives up
LINGER_S = 5.0  # of the host where they meet, after the end of a run
LEFT_S = 60.0  # after which a file that nobody writes to is an earlier run's
SAVE_S = 100  # for ranks that are told to stop: a step, and a checkpoint; less than clusters.SAVE_S


@dataclass(frozen=True)
class HostsSpec:
    """How many hosts take part, from the least to the most; the ranks of each; where they meet; and
    how often this one starts its ranks anew after a failure."""

    least: int
    most: int
    ranks: int
    meeting: Rendezvous
    restarts: int

    @property
    def elastic(self) -> bool:
        """Whether the run goes on with fewer."""
        return self.least < self.most


@dataclass(frozen=True)
class LostHost:
    """A host that is not there any more: whether it was told to stop."""

    told: bool


class AllStopped(Exception):
    """All ranks were told to stop, and have saved."""


def run_host(
    hosts: HostsSpec, name: str, digest: str, command: Sequence[str], begin: Callable[[], None]
) -> bool:
    """Run a command as the ranks of this host until the run has ended.

    Args:
        hosts: how many hosts take part, the ranks of each, and where they meet.
        name: the run's name, for several runs that meet at one place.
        digest: hash of the run's settings, which must be equal on all hosts.
        command: arguments of Python for each rank.
        begin: called before the first ranks start; it may refuse.

    Returns:
        Whether the run was stopped before its last step.

    Raises:
        Refusal: what `begin` refuses, or hosts with other settings.
        WeftError: ranks failed for good, or the place where hosts meet is lost.
    """
    for logger in logging.root.manager.loggerDict:
        if logger.startswith("torch.distributed.elastic"):
            logging.getLogger(logger).setLevel(logging.CRITICAL)  # each has a level of its own
    meeting = hosts.meeting
    address = _own_address(meeting)
    token = "" if meeting.file else run_token(address)
    listen_at(address)
    # the agents keep a store for each start: in their own the addresses of ranks that died would
    # stay
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(
        each.name for each in (*stop_signals(), signal.SIGINT)
    )
    os.environ[AGENT] = "elastic" if hosts.elastic else "fixed"
    logs = ScratchFolder()
    agent: ElasticAgent | None = None
    over = False  # for all hosts
    most = f" to {hosts.most}" if hosts.elastic else ""
    log_line(f"at {address}, waiting for {hosts.least}{most} hosts to meet at {meeting}")
    try:
        store = _store(meeting, address, token)
        handler = DynamicRendezvousHandler.from_backend(
            name,
            store,
            C10dRendezvousBackend(store, name),
            hosts.least,
            hosts.most,
            address,
            RendezvousTimeout(join=timedelta(seconds=COME_S), last_call=timedelta(seconds=MORE_S)),
            keep_alive_interval=ALIVE_S,
            keep_alive_max_attempt=MISSED,
        )
        spec = WorkerSpec(
            role="weft",
            local_world_size=hosts.ranks,
            entrypoint=sys.executable,
            args=tuple(command),
            rdzv_handler=handler,
            max_restarts=hosts.restarts,
            monitor_interval=0.1,
            local_addr=address,
        )
        common = dist.PrefixStore(name, store)
        if meeting.file:  # who can read it may take part
            token = common.compare_set("weft/token", "", secrets.token_hex()).decode()
        if common.compare_set("weft/digest", "", digest) != digest.encode():
            problem = "another run with the same name and other settings uses this rendezvous"
            fix = (
                "start the same command with the same run file on all hosts, or name another"
                " rendezvous"
            )
            raise ConfigError("--rdzv", str(meeting), problem, fix)
        if not common.check(["weft/begun"]):
            begin()
        agent = ElasticAgent(spec, DefaultLogsSpecs(log_dir=logs.path), hosts, common, token)
        result = agent.run()
        if result is None:  # it was one more than the most, and not needed
            return False
        over = not result.is_failed() or not hosts.elastic
        if over:
            handler.shutdown()  # no host need wait for others any more
        if result.is_failed():
            raise WeftError(_failure_text(result))
        return False
    except AllStopped:
        over = True
        return True
    except (SignalException, SystemExit) as told:
        leave_closed_terminal()
        if agent is not None:
            agent.tell()
        over = not hosts.elastic
        log_line("told to stop")
        if isinstance(told, SystemExit):
            raise
        if told.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        return True
    except RendezvousClosedError:
        raise WeftError("the run has ended on the other hosts") from None
    except (RendezvousTimeoutError, dist.DistStoreError):
        raise WeftError(
            f"fewer than {hosts.least} hosts came to {meeting} within {COME_S:.0f} s"
        ) from None
    except (RendezvousError, dist.DistError) as error:
        what = f"the rendezvous {meeting} is lost or never existed ({str(error).splitlines()[0]})"
        raise WeftError(
            f"{what}. With --auto-resume the run continues from the latest checkpoint"
        ) from error
    finally:
        logs.remove()
        if over and agent is not None and hosts.most > 1:
            if meeting.here() or (meeting.file and agent.first):
                time.sleep(LINGER_S)  # the others still ask what has become of the run
            if meeting.file and agent.first:
                Path(meeting.file).unlink(missing_ok=True)  # for the next run to begin with


def _own_address(meeting: Rendezvous) -> str:
    """This host's address on the way to the others. Of a host that is only being started the name
    may not be known yet: it is asked for again for a while. Raises ConfigError."""
    since = time.monotonic()
    while True:
        try:
            return meeting.address()
        except ConfigError as error:
            waited_s = time.monotonic() - since
            if waited_s > NAMED_S:
                raise
            if waited_s < BEAT_S:
                log_line(f"{error.problem}: trying again for {NAMED_S:.0f} s")
            time.sleep(BEAT_S)


def _store(meeting: Rendezvous, address: str, token: str) -> dist.Store:
    """That of the hosts; kept by this process if they meet here, and no other process does so
    already. Raises WeftError."""
    if meeting.file:
        file = Path(meeting.file)
        with suppress(FileNotFoundError):  # hosts that are there write to it every ALIVE_S seconds
            if time.time() - file.stat().st_mtime > LEFT_S:
                log_line(f"{meeting} was left by an earlier run: replaced")
                file.unlink()
        os.close(os.open(file, os.O_RDWR | os.O_CREAT, 0o600))  # the run's token is in it
        return dist.FileStore(meeting.file)
    patience = timedelta(seconds=COME_S)
    if meeting.here():
        try:
            return keep_for_hosts(meeting, address, token, patience)
        except OSError:
            log_line(
                f"another process on this host uses port {meeting.port}: if it is a run's, this"
                " host joins that run"
            )
    return join_hosts_store(meeting, address, token, patience)


def _failure_text(result: RunResult) -> str:
    if not result.failures:
        return (
            "hosts were lost more often than [checkpoint] restarts allows; --resume"
            " continues the run"
        )
    rank, first = min(result.failures.items(), key=lambda item: item[1].timestamp)
    how = (
        f"killed by {first.signal_name()}"
        if first.exitcode < 0
        else f"exited with code {first.exitcode}"
    )
    return f"rank {rank} of this host {how}, and it is not restarted"


class ElasticAgent(HookedAgent):
    """The agent of one host: it tells the other hosts what happens here, and hears of them."""

    def __init__(
        self,
        spec: WorkerSpec,
        logs: DefaultLogsSpecs,
        hosts: HostsSpec,
        store: dist.Store,
        token: str,
    ):
        super().__init__(spec, logs, SAVE_S)
        self._hosts, self._common, self._token = hosts, store, token
        self._ranks_store: dist.TCPStore | None = None  # of this start, on the first host
        self._way: TokenGate | Passage | None = None  # to it
        self._came: list[str] = []  # the hosts, the last time
        self._beat, self._beaten = 0, 0.0
        self._heard: dict[
            int, tuple[bytes, float]
        ] = {}  # of a host: its last beat, and when it was new
        self._until = math.inf  # when an answer of the store must have come
        threading.Thread(target=self._end_if_cut_off, name="weft agent", daemon=True).start()

    @property
    def first(self) -> bool:
        """Whether its ranks are the first ones."""
        return self.group.group_rank == 0

    def before_rendezvous(self) -> None:
        self._until = math.inf  # torchelastic limits how long it waits

    def after_rendezvous(self, group: WorkerGroup) -> None:
        self._allow()
        self._open_way(group)
        store, here, count = group.store, group.group_rank, group.group_world_size
        assert store is not None and here is not None and count is not None
        store.set(f"weft/who/{here}", f"{socket.gethostname()} ({group.spec.local_addr})")
        came = [store.get(f"weft/who/{other}").decode() for other in range(count)]
        gone = [each for each in self._came if each not in came]
        if gone:
            log_line(f"no longer here: {', '.join(gone)}")
        if here == 0:
            self._common.set("weft/begun", "")
            for key in ("weft/failed", *(f"weft/told/{other}" for other in range(count))):
                store.delete_key(key)  # in a file there may be an earlier run's
            log_line(
                f"{count} of {self._hosts.most} hosts are here: {count * self._hosts.ranks} ranks;"
                f" {', '.join(came)}"
            )
        elif came != self._came:
            log_line(f"host {here} of {count}; host 0, {came[0]}, prints the progress")
        self._came, self._heard, self._beaten = came, {}, 0.0

    def _open_way(self, group: WorkerGroup) -> None:
        """The ranks of each host meet at a port of its loopback: the store, or the way to it."""
        if self._way is not None:
            self._way.close()
        host, store = str(group.master_addr), group.store
        assert store is not None
        if group.group_rank == 0:
            self._ranks_store = keep_store()
            # torchelastic's port was free when it looked, and may be taken by now
            self._way = TokenGate(host, 0, self._token, self._ranks_store.port)
            store.set("weft/port", str(self._way.port))
            port = self._ranks_store.port
        else:
            self._ranks_store = None
            self._way = Passage(host, int(store.get("weft/port")), self._token)
            port = self._way.port
        group.master_addr, group.master_port = LOOPBACK, port

    def after_monitor(self, group: WorkerGroup, result: RunResult) -> RunResult:
        if result.state is WorkerState.FAILED:
            codes = {failure.exitcode for failure in result.failures.values()}
            if STOPPED in codes and not self._hosts.elastic:
                raise AllStopped
            if STOPPED in codes:
                self.restarts_left += 1  # another host was told to stop: no failure here
            elif any(
                failure.exitcode == 2 or _ended_by_weft(failure)
                for failure in result.failures.values()
            ):
                self.restarts_left = 0  # it would come again
            else:
                self._tell("weft/failed")
                if self.restarts_left:
                    log_line(f"{_failure_text(result).split(',')[0]}; all ranks restart")
        elif result.state is WorkerState.HEALTHY:
            left = self._find_lost_host(group)
            if left is not None and left.told and not self._hosts.elastic:
                raise AllStopped
            if left is not None:
                self.restarts_left += left.told  # which is no failure
                if not left.told:
                    self._tell("weft/failed")
                # ranks that wait for a lost host cannot save
                self.shut_down(SAVE_S if left.told else 1)
                return RunResult(state=WorkerState.UNHEALTHY)
        return result

    def tell(self) -> None:
        """Tell the other hosts that this one was told to stop, whose ranks may not have been able
        to."""
        self._tell(f"weft/told/{self.group.group_rank}")

    def _tell(self, key: str) -> None:
        with suppress(dist.DistError):
            if self.group.store is not None:
                self.group.store.set(key, "")
                self.group.store.check([key])  # its answer: this process may end now

    def _find_lost_host(self, group: WorkerGroup) -> LostHost | None:
        """A host that was told to stop, or has fallen silent: the first watches all, and all watch
        the first."""
        now = time.monotonic()
        if now < self._beaten + BEAT_S:
            return None
        store, here, count = group.store, group.group_rank, group.group_world_size
        assert store is not None and here is not None and count is not None
        self._beat, self._beaten = self._beat + 1, now
        store.set(f"weft/beat/{here}", str(self._beat))
        for other in range(1, count) if here == 0 else (0,):
            if store.check([f"weft/told/{other}"]):
                log_line(f"{self._came[other]} was told to stop")
                return LostHost(told=True)
            key = f"weft/beat/{other}"
            beat = store.get(key) if store.check([key]) else b""
            last, since = self._heard.get(other, (None, now))
            self._heard[other] = (beat, now if beat != last else since)
            if now - self._heard[other][1] > SILENT_S:
                then = (
                    "the run continues without it"
                    if self._hosts.elastic
                    else "all ranks restart when it is back"
                )
                log_line(f"{self._came[other]} has not answered for {SILENT_S:.0f} s: {then}")
                return LostHost(told=False)
        self._allow()
        return None

    def _end_if_cut_off(self) -> None:
        """End this process and its ranks when nothing comes from where hosts meet: a call that
        waits for it would do so until TCP gives up, a quarter of an hour later."""
        while True:
            time.sleep(BEAT_S)
            if time.monotonic() > self._until:
                log_line(
                    f"{self._hosts.meeting} has not answered for {CUT_OFF_S:.0f} s: this host is"
                    " disconnected, and stops"
                )
                for process in self.pids():
                    with suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)
                os._exit(1)

    def _allow(self, more_s: float = 0.0) -> None:
        """The store has answered; the next answer may take so much longer than CUT_OFF_S."""
        self._until = time.monotonic() + CUT_OFF_S + more_s

    def before_exit_barrier(self) -> None:
        self._until = math.inf

    def stop_s(self, group: WorkerGroup) -> int:
        # where ranks are missing the others cannot save
        return 1 if group.store is not None and group.store.check(["weft/failed"]) else SAVE_S

    def before_shutdown(self, timeout_s: int) -> None:
        self._allow(timeout_s)


def _ended_by_weft(failure: Any) -> bool:
    """Whether weft itself ended that rank."""
    return bool(failure.error_file_data.get("weft"))
