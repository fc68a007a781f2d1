"""Which checks `weft doctor` makes, in which order, and how long each may take.

Alone, this process makes them one after the other, each in a process of its own. Of several hosts
each does that too, in a process that meets the others: what goes wrong there is reported, and does
not end the command.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

from weft.core import Refusal, RunConfig

from ..rendezvous import Rendezvous
from . import (
    allreduce_check,
    clocks,
    compare_hosts,
    folder,
    gpus,
    host_rendezvous,
    layout_fit,
    limited_process,
    links,
    machine,
    network,
    ports as reach,
    shared_folder as shared,
)
from .findings import Finding, Host, worst
from .host_rendezvous import HostGroup
from .limited_process import LimitedProcessError

HOST_S = 180.0  # for a host's own checks, most of which take seconds
STALL_S = 300.0  # without any news from the process that meets the others: it has been cut off

LATE_S = 100.0  # for a host whose last check took longer

Check = tuple[str, float, Callable[..., Finding | None]]  # its name, the seconds it may take


@dataclass(frozen=True)
class RunChecks:
    """What the caller knows of runs: how a run file is checked, and how large a checkpoint is."""

    check_run_file: Callable[[RunConfig], Finding]
    checkpoint_size: Callable[[RunConfig], folder.CheckpointSize]


@dataclass(frozen=True)
class DoctorRequest:
    """What `weft doctor` looks at.

    Attributes:
        weft: The version of weft.
        load: Reads the run file, if one is to be checked. Raises Refusal.
        folder: The folder that is checked. Default: the run file's output.
        hosts: The least and the most hosts that look together; None for this host alone.
        run_checks: How a run file is checked; without it only the machine is.
    """

    weft: str
    load: Callable[[], RunConfig] | None = None
    folder: Path | None = None
    hosts: tuple[int, int] | None = None
    meeting: Rendezvous = network.ANYWHERE
    run_checks: RunChecks | None = None

    def run(self) -> RunConfig | None:
        """The run file's, if it is sound so far."""
        with suppress(Refusal):
            return None if self.load is None else self.load()
        return None

    def place(self) -> Path | None:
        """The folder that a run writes to, if any is named."""
        run = self.run()
        return self.folder or (None if run is None else Path(run.output))


def host_checks(asked: DoctorRequest) -> Iterator[Check]:
    """The checks of one host."""
    run, place = asked.run(), asked.place()
    yield "versions", 30, partial(machine.version_finding, asked.weft)
    yield "cores", 10, machine.core_finding
    yield "memory", 10, machine.memory_finding
    yield "shared memory", 10, machine.shared_memory_finding
    yield "open files", 10, machine.open_files_finding
    yield "gpus", 120, gpus.gpus
    yield "address", 20, partial(network.address, asked.meeting)
    yield "hostname", 20, network.hostname
    yield "port", 20, partial(network.port, asked.meeting)
    yield "variables", 10, network.variables
    yield "gloo", allreduce_check.LIMIT_S + 10, allreduce_check.gloo
    yield "nccl", allreduce_check.LIMIT_S + 60, allreduce_check.nccl
    if place is not None:
        yield "folder", 60, partial(folder.folder, place)
    if asked.run_checks is None:
        return
    if asked.load is not None:
        yield "run file", 120, partial(_check_run_file, asked.load, asked.run_checks)
    if run is not None and place is not None:
        size = asked.run_checks.checkpoint_size
        yield "room", 120, partial(folder.checkpoint_room, run, place, size)


def _check_run_file(load: Callable[[], RunConfig], checks: RunChecks) -> Finding:
    return checks.check_run_file(load())


def network_checks(asked: DoctorRequest, hosts: list[Host]) -> Iterator[Check]:
    """The checks of several hosts together: functions of their circle."""
    place = asked.place()
    yield "clocks", 60, clocks.clocks
    yield "ports", 120, reach.ports
    yield "links", 100, links.links
    if all(host.facts("gpus").get("gpus") for host in hosts):
        yield "gpu links", 120, links.gpu_links
    if place is not None:
        yield "shared folder", 120, partial(shared.shared_folder, path=place)


def run_check(check: Check, *args: object) -> Finding | None:
    """What the check found. One that fails or takes too long is `wrong`."""
    name, limit_s, function = check
    try:
        return limited_process.run_limited(limit_s, function, *args)
    except LimitedProcessError as error:
        return Finding(name, "wrong", str(error))


def check_host(asked: DoctorRequest) -> Generator[Finding, None, None]:
    """This host's own findings, as they come."""
    yield from filter(None, map(run_check, host_checks(asked)))


def compare_findings(asked: DoctorRequest, hosts: list[Host]) -> list[Finding]:
    """What follows from the findings of all hosts."""
    run = asked.run()
    found = [compare_hosts.versions(hosts), compare_hosts.gpus(hosts)] if len(hosts) > 1 else []
    if run is not None:
        laid, workers = str(run.layout.axes), len(run.workers)
        found.append(layout_fit.check_layout_fits(laid, hosts, workers, run.train.backend))
    return [each for each in found if each is not None]


# ---- several hosts -------------------------------------------------------------------------------


@dataclass(frozen=True)
class HostSlot:
    """Which host this is of those that came, what host 0 is called, and whether nothing is wrong by
    its findings."""

    number: int
    count: int
    first: str
    passed: bool


@dataclass(frozen=True)
class HostReport:
    """All that was found: on each host, and between them. `place`: None where no others were
    met."""

    hosts: list[Host]
    between: list[Finding]
    place: HostSlot | None = None

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong, on any host."""
        return worst(_all(self.hosts, self.between)) != "wrong" and (
            self.place is None or self.place.passed
        )


def check_with_others(asked: DoctorRequest) -> HostReport:
    """Look at this host and, with the others, at what is between them."""
    own, between, hosts, place = [], [], [], None
    with ExitStack() as stack:
        keeps = _keeps(asked.meeting, stack)
        try:
            for found in limited_process.iterate_limited(STALL_S, _check_hosts, asked, keeps):
                match found:
                    case "own", finding:
                        own.append(finding)
                    case "between", finding:
                        between.append(finding)
                    case Host():
                        hosts.append(found)
                    case HostSlot():
                        place = found
        except LimitedProcessError as error:
            between.append(Finding("meeting", "wrong", str(error)))
    if asked.meeting.file and place is not None and place.number == 0:
        Path(asked.meeting.file).unlink(missing_ok=True)
    return HostReport(hosts or [report_alone(own)], between, place)


def report_alone(findings: list[Finding]) -> Host:
    """This host, where it is the only one."""
    host = Host(socket.gethostname(), "", tuple(findings))
    return replace(host, address=host.facts("address").get("address", ""))


def _keeps(meeting: Rendezvous, stack: ExitStack) -> bool:
    """Whether this host keeps the store where they meet, from now until the stack is closed."""
    try:
        if meeting.file or not meeting.here():
            return False
        kept = limited_process.iterate_limited(
            host_rendezvous.ANSWER_S, host_rendezvous.keep_store, meeting
        )
        next(kept)
    except (
        OSError,
        Refusal,
        LimitedProcessError,
    ):  # another doctor on this host keeps it; or who joins will say what is wrong
        return False
    stack.callback(kept.close)
    return True


def _check_hosts(asked: DoctorRequest, keeps: bool) -> Generator[object, None, None]:
    """A host's part: its own findings as they come, then all hosts, what is between them, and its
    place."""
    assert asked.hosts is not None
    least, most = asked.hosts
    try:
        met = host_rendezvous.join_hosts(
            asked.meeting, most, keeps, socket.gethostname(), asked.meeting.address()
        )
    except (Refusal, LimitedProcessError) as error:
        yield "between", Finding("meeting", "wrong", str(error), host_rendezvous.UNMET)
        yield from (("own", finding) for finding in check_host(asked))
        return
    came = host_rendezvous.hosts_finding(least, most, list(met.members.values()))
    yield "between", came
    own = []
    for finding in check_host(asked):
        own.append(finding)
        yield "own", finding
    name, address = met.name(met.number), met.members[met.number][1]
    told = met.share("host", Host(name, address, tuple(own)).plain(), HOST_S)
    gone = _without(met, told)
    hosts = [Host.of(told[number]) for number in sorted(told)]
    yield from hosts
    found = [came]
    for finding in chain(gone, _between(met, asked, hosts)):
        found.append(finding)
        yield "between", finding
    passed = met.share("passed", worst(_all(hosts, found)) != "wrong")
    yield HostSlot(met.number, len(met.members), met.name(0), passed.get(0, False))
    met.tell("left", True)
    # the store is host 0's; an answer of it says that it has been told
    for number in met.members if met.number == 0 else (met.number,):
        met.ask("left", number)


def _between(met: HostGroup, asked: DoctorRequest, hosts: list[Host]) -> Iterator[Finding]:
    """What the hosts that are still there find together."""
    yield from compare_findings(asked, hosts)
    apart = False  # who does not reach all others would wait for them in vain
    for index, check in enumerate(network_checks(asked, hosts)):
        if apart and check[0] in ("links", "gpu links"):
            continue
        yield from _without(met, met.share(f"begin-{index}", True, LATE_S))
        finding = run_check(check, met) if len(met.members) > 1 else None
        if finding is not None:
            yield finding
            apart |= finding.name == "ports" and finding.state == "wrong"


def _without(met: HostGroup, heard: dict[int, object]) -> list[Finding]:
    """Leave out of the circle those of whom nothing was heard, if any."""
    gone = [met.name(number) for number in met.members if number not in heard]
    met.members = {number: who for number, who in met.members.items() if number in heard}
    said = f"{', '.join(gone)} no longer answers"
    return [Finding("hosts", "wrong", said, "see the output of weft doctor there")] if gone else []


def _all(hosts: list[Host], between: list[Finding]) -> list[Finding]:
    return [*between, *(finding for host in hosts for finding in host.findings)]
