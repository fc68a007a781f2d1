"""Quorum: which replicas take part in an exchange, so that none waits for ever for one that died or stalls.

Replicas meet at a store. One that comes to an exchange says so; when all that are in have come, or `timeout_s` after
this one came, the first of those present to write down who takes part decides it for all (compare and set). When the
exchange has run they vote: unless it went well for every one of them it counts for none, and is run again among those
that come then. So all replicas that take part see the same members and the same result, or none.

A replica that finds an exchange decided without it is out. It asks to be let in again, as one that was started anew
does; the last of the members at the next exchange gives it all that it has (`weft.engine.catchup`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from ..errors import WeftError

TRIES = 3  # of an exchange that fails on this rank whoever takes part
POLL_S = 0.002
START_S = 300.0  # within which replicas that are started together come to their first exchange

IN, OUT, GONE = "in", "out", "gone"

Who = tuple[tuple[int, int], ...]  # (replica, incarnation)


@dataclass(frozen=True)
class Company:
    """Where this process stands among replicas that step by themselves: `store` is where they meet, and this is the
    `incarnation`-th process of its replica."""

    store: dist.Store
    replica: int
    incarnation: int = 0


@dataclass
class Meeting:
    """One exchange. `members`: the replicas that take part; `asking`: replica -> ticket of those that are to be let in
    after it, by replica `giver`. `group`: of this rank and its like in the other members; None where it is alone."""

    members: tuple[int, ...]
    asking: dict[int, str]
    giver: int
    index: int
    group: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        return len(self.members)


@dataclass
class Quorum:
    """This rank's part: that of place `place` of `places` in its replica. All ranks of a replica come to the same
    exchanges, in the same order. Not for use by two threads at once."""

    company: Company
    replicas: int
    place: int
    places: int
    timeout_s: float
    members: tuple[int, ...] = ()  # of the last exchange
    left_out: int = 0  # how often this replica was
    _at: Who = ()  # whom the group below is of
    _group: dist.ProcessGroup | None = None
    _asked: int = 0
    _old: list[list[str]] = field(default_factory=list)  # keys of the last exchanges

    def __post_init__(self) -> None:
        company, self.replica = self.company, self.company.replica
        # engines that one world makes one after the other meet at places of their own
        made = company.store.add(f"weft/engines/{company.replica}.{company.incarnation}.{self.place}", 1)
        self._store = _meeting_place(company.store, made)

    # ---- an exchange ---------------------------------------------------------------------------------------------

    def run(self, name: str, work: Callable[[Meeting], None]) -> Meeting | None:
        """Run `work` with the replicas that take part in this exchange, until it goes well for all of them: it may be
        called again. None if it was decided without this one. Raises what `work` raises, if it does so each time."""
        timeout_s = START_S if not self.members and not self.company.incarnation else self.timeout_s
        for attempt in range(10**6):
            key = f"{name}/{attempt}"
            found = self._meet(key, timeout_s)
            if found is None:
                self.left_out += 1
                self._group, self._at = None, ()  # the others connect anew with whom they let in
                return None
            meeting, who = found
            self.members, problem = meeting.members, None
            try:
                meeting.group = self._grouped(key, meeting, who)
                work(meeting)
            except RuntimeError as error:  # of torch.distributed, as a rule: a peer is gone or does not answer
                problem = error
            if self._vote(key, meeting, problem is None):
                return meeting
            # others may learn of it only when what they wait for has timed out
            self._group, self._at, timeout_s = None, (), 2 * self.timeout_s
            if problem is not None and attempt + 1 == TRIES:
                raise problem
        raise AssertionError

    def _meet(self, key: str, timeout_s: float) -> tuple[Meeting, Who] | None:
        here = [f"{key}/here/{replica}" for replica in range(self.replicas)]
        if self.place == 0:
            self._store.set(here[self.replica], str(self.company.incarnation))
        since = time.monotonic()

        def decided() -> bool:
            if self._store.check([f"{key}/who"]):
                return True
            if self.place == 0:
                self._propose(key, here, since + timeout_s)
            return False

        _until(decided)
        who = json.loads(self._store.get(f"{key}/who"))
        self._forget([*here, f"{key}/well"])
        members = tuple(replica for replica, _ in who["members"])
        if self.replica not in members:
            return None
        asking = {int(replica): ticket for replica, ticket in who["asking"].items()}
        incarnations = tuple((replica, incarnation) for replica, incarnation in who["members"])
        return Meeting(members, asking, members[-1], members.index(self.replica)), incarnations

    def _propose(self, key: str, here: list[str], deadline: float) -> None:
        states = [self._state(replica) for replica in range(self.replicas)]
        present = [
            replica for replica in range(self.replicas)
            if states[replica] != GONE and self._store.check([here[replica]])
        ]  # fmt: skip
        missing = [replica for replica in range(self.replicas) if states[replica] == IN and replica not in present]
        if (missing and time.monotonic() < deadline) or not present:
            return
        members = [(replica, int(self._store.get(here[replica]))) for replica in present]
        asking = {}
        for replica in range(self.replicas):
            if states[replica] != IN and self._store.check([f"asks/{replica}"]):
                asking[replica] = self._store.get(f"asks/{replica}").decode()
        mine = json.dumps({"members": members, "asking": asking})
        if self._store.compare_set(f"{key}/who", "", mine).decode() == mine:
            for replica in missing:
                self._store.set(f"state/{replica}", OUT)

    def _grouped(self, key: str, meeting: Meeting, who: Who) -> dist.ProcessGroup | None:
        if meeting.size == 1:
            return None
        if self._group is None or self._at != who:
            self._group = None  # the old one goes before there is another
            timeout = timedelta(seconds=self.timeout_s)
            self._group = connected(self._store, f"{key}/{self.place}", meeting.index, meeting.size, timeout)
            self._at = who
        return self._group

    def _vote(self, key: str, meeting: Meeting, well: bool) -> bool:
        if meeting.size == 1:
            return well
        done = f"{key}/done"
        if not well:
            self._store.compare_set(done, "", "failed")
        elif self._store.add(f"{key}/well", 1) == meeting.size * self.places:
            self._store.compare_set(done, "", "well")
        deadline = time.monotonic() + self.timeout_s

        def counted() -> bool:
            late = time.monotonic() > deadline or any(self._state(r) == GONE for r in meeting.members)
            # a vote may have ended just now: the one that was written first counts
            if not self._store.check([done]) and late:
                self._store.compare_set(done, "", "failed")
            return self._store.check([done])

        _until(counted)
        return self._store.get(done) == b"well"

    def _state(self, replica: int) -> str:
        key = f"state/{replica}"
        return self._store.get(key).decode() if self._store.check([key]) else IN

    def _forget(self, keys: list[str]) -> None:
        """What nobody reads any more goes: an exchange's keys when the one after the next begins."""
        self._old.append(keys)
        if self.place == 0 and len(self._old) > 2:
            for key in self._old.pop(0):
                with suppress(RuntimeError):
                    self._store.delete_key(key)

    # ---- coming and going ----------------------------------------------------------------------------------------

    def has_ended(self, replica: int) -> bool:
        """Whether the processes of a replica have ended."""
        return self._state(replica) == GONE

    def leave_out(self, replica: int) -> None:
        """Nobody waits for this replica until it is let in again."""
        if self.place == 0:
            self._store.set(f"state/{replica}", OUT)

    def take_in(self, replica: int) -> None:
        """It takes part."""
        if self.place == 0:
            self._store.set(f"state/{replica}", IN)

    def meeting_store(self) -> dist.Store:
        """A connection of its own to where these replicas meet."""
        return self._store.clone()

    def leave(self) -> None:
        """Nobody is to wait for this replica any more."""
        if self.place == 0:
            self._store.set(f"state/{self.replica}", GONE)

    def ask(self) -> tuple[int, dist.ProcessGroup]:
        """Ask to be let in. The replica that gives, and a group of it (rank 0) and this one. Raises WeftError: no other
        replica is left."""
        self._asked, self.members = self._asked + 1, ()
        ticket = f"{self.company.incarnation}.{self._asked}"
        if self.place == 0:
            self._store.set(f"state/{self.replica}", OUT)
            self._store.set(f"asks/{self.replica}", ticket)
        granted = f"granted/{self.replica}/{ticket}"

        def heard() -> bool:
            others = (replica for replica in range(self.replicas) if replica != self.replica)
            if all(self._state(replica) != IN for replica in others) and not self._store.check([granted]):
                raise WeftError(f"replica {self.replica} was left out, and no other is left to catch up from")
            return self._store.check([granted])

        _until(heard)
        return int(self._store.get(granted)), self._pair(self.replica, ticket, 1)

    def grants(self, meeting: Meeting) -> Iterator[dist.ProcessGroup]:
        """For each replica that this one is to let in after a meeting: a group of this one (rank 0) and that. All ranks
        of the replica call it."""
        for replica, ticket in meeting.asking.items() if meeting.giver == self.replica else ():
            granted = f"granted/{replica}/{ticket}"
            if self.place == 0 and self._store.compare_set(granted, "", str(self.replica)).decode() == str(
                self.replica
            ):
                self.take_in(replica)
                with suppress(RuntimeError):
                    self._store.delete_key(f"asks/{replica}")
            _until(lambda granted=granted: self._store.check([granted]))  # type: ignore[misc]
            if int(self._store.get(granted)) == self.replica:
                with suppress(RuntimeError):  # it is gone again
                    yield self._pair(replica, ticket, 0)

    def _pair(self, replica: int, ticket: str, index: int) -> dist.ProcessGroup:
        name = f"pair/{replica}/{ticket}/{self.place}"
        return connected(self._store, name, index, 2, timedelta(seconds=self.timeout_s))

    @property
    def leads(self) -> bool:
        """Whether this is the first of the replicas that go on: it speaks for all."""
        return bool(self.members) and self.replica == self.members[0]


def _meeting_place(store: dist.Store, number: int) -> dist.Store:
    """By a connection of its own, so that who waits keeps nobody from asking."""
    return dist.PrefixStore(f"weft/{number}", store.clone())


def ended(store: dist.Store, replica: int) -> None:
    """Say that the processes of a replica, which made one engine each, have ended."""
    here = _meeting_place(store, 1)
    here.set(f"state/{replica}", GONE)
    with suppress(RuntimeError):
        here.delete_key(f"asks/{replica}")  # nobody is to wait for it to come in


def is_left_out(store: dist.Store, replica: int) -> bool:
    """Whether a replica, of which each process made one engine, is one that nobody waits for."""
    here, key = _meeting_place(store, 1), f"state/{replica}"
    return here.check([key]) and here.get(key) == OUT.encode()


def connected(store: dist.Store, name: str, index: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """A gloo group of processes that need share no other. It is none of those that torch.distributed counts, so it may
    be made by some ranks alone."""
    place = dist.PrefixStore(name, store.clone())
    group = dist.ProcessGroup(place, index, size)
    gloo = dist.ProcessGroupGloo(place, index, size, timeout)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    return group


def _until(true: Callable[[], bool]) -> None:
    """Poll: a store's own wait would block all other threads that use it, and warns when its time is over."""
    pause = POLL_S / 4
    while not true():
        time.sleep(pause)
        pause = min(pause * 1.5, 10 * POLL_S)
