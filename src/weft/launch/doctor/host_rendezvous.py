"""The hosts that joined a check, and their exchange of findings through a store."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..gate import run_token
from ..rendezvous import Rendezvous
from ..stores import join_hosts_store, keep_for_hosts
from .findings import Finding
from .limited_process import LimitedProcessError, error_text, run_limited

JOIN_S = 60.0  # between the first host and the last
ANSWER_S = 30.0  # for what all do at the same time
UNMET = "start weft doctor on the host that is named there too, and let its port through"
POLL_S = 0.1


def keep_store(meeting: Rendezvous) -> Generator[bool, None, None]:
    """The store, for as long as this process lives. Raises OSError if the port is taken."""
    address = meeting.address()
    store = keep_for_hosts(meeting, address, run_token(address))
    yield True
    while True:
        time.sleep(JOIN_S)
        store.num_keys()


@dataclass
class HostGroup:
    """The hosts by number, with name and address; this one is `number`. Any process of it may
    speak."""

    meeting: Rendezvous
    number: int = 0
    members: dict[int, tuple[str, str]] = field(default_factory=dict)
    _stores: dict[int, dist.Store] = field(default_factory=dict)

    def store(self) -> dist.Store:
        """Where they meet; a connection for each process."""
        pid = os.getpid()
        if pid not in self._stores:
            patience = timedelta(seconds=JOIN_S)
            if self.meeting.file:
                store: dist.Store = dist.FileStore(self.meeting.file)
                store.set_timeout(patience)
            else:
                address = self.meeting.address()
                store = join_hosts_store(self.meeting, address, run_token(address), patience)
            self._stores[pid] = dist.PrefixStore("weft-doctor", store)
        return self._stores[pid]

    def name(self, number: int) -> str:
        """How a host is called: its name; with its address, or its number, where that is not
        enough."""
        name, address = self.members[number]
        if [each for each, _ in self.members.values()].count(name) == 1:
            return name
        alone = list(self.members.values()).count((name, address)) == 1
        return f"{name} ({address})" if alone else f"{name} #{number}"

    def tell(self, key: str, value: Any) -> None:
        """Say something to whoever asks."""
        self.store().set(f"{key}/{self.number}", json.dumps(value))

    def ask(self, key: str, number: int, limit_s: float = ANSWER_S) -> Any:
        """What that host told. Raises DistStoreError if it did not in time."""
        store, key = self.store(), f"{key}/{number}"
        store.wait([key], timedelta(seconds=max(limit_s, POLL_S)))
        return json.loads(store.get(key))

    def share(self, key: str, value: Any, limit_s: float = ANSWER_S) -> dict[int, Any]:
        """What each host told, this one `value`; without those that did not in time."""
        self.tell(key, value)
        deadline, found = time.monotonic() + limit_s, {}
        for number in self.members:
            try:
                found[number] = self.ask(key, number, deadline - time.monotonic())
            except dist.DistError:  # it did not, or the store has gone
                continue
        return found


def join_hosts(meeting: Rendezvous, most: int, keeps: bool, name: str, address: str) -> HostGroup:
    """The circle of those that come, `most` at most. Host 0 is who keeps the store, or came first
    to the file. Raises Failed."""
    circle = HostGroup(meeting)
    try:
        run_limited(
            JOIN_S + ANSWER_S, _met, circle
        )  # what listens there may be no store, and never answer
    except LimitedProcessError as error:
        raise LimitedProcessError(f"nobody answers at {meeting} ({error})") from None
    try:
        if not keeps:
            circle.number = circle.store().add("came", 1) - (1 if meeting.file else 0)
        if circle.number >= most:  # their numbers are taken
            fix = "raise --nodes" + (
                f", or remove {meeting.file} if it is of an earlier time" if meeting.file else ""
            )
            raise LimitedProcessError(f"{most} hosts are there already: {fix}")
        circle.tell("who", [name, address])
        if circle.number == 0:
            circle.tell("members", _roll(circle, most))
        told = circle.ask("members", 0, 2 * JOIN_S)
    except dist.DistError as error:
        raise LimitedProcessError(
            f"the store at {meeting} has gone ({error_text(error)})"
        ) from None
    circle.members = {int(number): (who[0], who[1]) for number, who in told.items()}
    if circle.number not in circle.members:
        raise LimitedProcessError(
            f"the others did not wait for this host: start all within {JOIN_S:g} s"
        )
    return circle


def _met(circle: HostGroup) -> int:
    """Whether somebody keeps the store."""
    return circle.store().num_keys()


def _roll(circle: HostGroup, most: int) -> dict[int, Any]:
    """Who has come when all have, or the time is up."""
    deadline, store = time.monotonic() + JOIN_S, circle.store()
    while time.monotonic() < deadline and not store.check(
        [f"who/{number}" for number in range(most)]
    ):
        time.sleep(POLL_S)
    came = [number for number in range(most) if store.check([f"who/{number}"])]
    return {number: circle.ask("who", number) for number in came}


def hosts_finding(least: int, most: int, came: Sequence[tuple[str, str]]) -> Finding:
    """How many hosts were to come, and the names and addresses of those that did."""
    who = ", ".join(f"{name} ({address})" for name, address in came)
    facts = {"came": len(came), "least": least, "most": most}
    found = f"{len(came)} of {most} came: {who}"
    if len(came) == most:
        return Finding("hosts", "ok", found, "", facts)
    missing = f"{most - len(came)} did not come within {JOIN_S:g} s"
    advice = (
        f"{missing}: start weft doctor there too, with the same --nodes and --rdzv, and see its"
        " output"
    )
    return Finding("hosts", "wrong" if len(came) < least else "note", found, advice, facts)
