"""Which replicas take part in an exchange, so that none waits for ever for one that died or
stalls.

Replicas meet at a store. One that comes to an exchange says so; when all that are in have come, or
`timeout_s` after this one came, the first of those present to write down who takes part decides it
for all (compare and set). When the exchange has run they vote: unless it went well for every one of
them it counts for none, and is run again among those that come then. So all replicas that take part
see the same members and the same result, or none.

A replica that finds an exchange decided without it is out. It asks to be let in again, as one that
was started anew does; the last of the members at the next exchange gives it all that it has
(`weft.engine.replica_sync.state_transfer`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count

import torch
import torch.distributed as dist

from weft.core import WeftError

TRIES = 3  # of an exchange that fails on this rank whoever takes part
POLL_S = 0.002
START_S = 300.0  # within which replicas that are started together come to their first exchange

IN, OUT, GONE = "in", "out", "gone"
WELL, WITHOUT, GIVEN = "well", "without", "given"

Who = tuple[tuple[int, int], ...]  # (replica, incarnation)


@dataclass(frozen=True)
class ReplicaGroup:
    """Where this process stands among replicas that step by themselves: `store` is where they meet,
    and this is the `incarnation`-th process of its replica."""

    store: dist.Store
    replica: int
    incarnation: int = 0


@dataclass
class ExchangeRound:
    """One exchange. `members`: the replicas that take part; `asking`: replica -> ticket of those
    that are to be let in after it, by replica `giver`. `group`: of this rank and its like in the
    other members; None where it is alone."""

    members: tuple[int, ...]
    asking: dict[int, str]
    giver: int
    index: int
    group: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        return len(self.members)


@dataclass
class Membership:
    """This rank's part: that of place `place` of `places` in its replica. All ranks of a replica
    come to the same exchanges, in the same order. Not for use by two threads at once."""

    company: ReplicaGroup
    replicas: int
    place: int
    places: int
    timeout_s: float
    members: tuple[int, ...] = ()  # of the last exchange that was counted
    _at: Who = ()  # whom the group below is of
    _group: dist.ProcessGroup | None = None
    _began: bool = False
    _asked: int = 0
    _let_in: set[tuple[int, str]] = field(default_factory=set)
    _soon: list[list[str]] = field(
        default_factory=list
    )  # keys of the last exchanges, to be deleted
    _later: list[list[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        company, self.replica = self.company, self.company.replica
        # engines that one world makes one after the other meet at places of their own
        made = company.store.add(
            f"weft/engines/{company.replica}.{company.incarnation}.{self.place}", 1
        )
        # by a connection of its own, so that who waits keeps nobody from asking
        self._store = _meeting_place(company.store.clone(), made)

    # ---- an exchange -----------------------------------------------------------------------------

    def run(self, name: str, work: Callable[[ExchangeRound], None]) -> ExchangeRound | None:
        """Run `work` with the replicas that take part in this exchange, until it goes well for all
        of them: it may be called again. None if it was decided without this one. Raises what `work`
        raises, if this rank is the first that fails each time."""
        timeout_s = self.timeout_s if self._began or self.company.incarnation else START_S
        self._began, failures = True, 0
        for attempt in count():
            key = f"{name}/{attempt}"
            found = self._meet(key, timeout_s)
            if found is None:
                self._group, self._at = None, ()  # the others connect anew with whom they let in
                return None
            meeting, who = found
            problem = None
            try:
                meeting.group = self._make_group(key, meeting, who)
                work(meeting)
            except Exception as error:
                problem = error
            result = self._vote(key, meeting, problem is None)
            if result == WELL:
                return meeting
            # others may learn of it only when what they wait for has timed out
            self._group, self._at, timeout_s = None, (), 2 * self.timeout_s
            failures += (
                result == self._name
            )  # else it is a consequence of what another rank met with
            if problem is not None and (failures == TRIES or not isinstance(problem, RuntimeError)):
                raise problem
        raise AssertionError

    def count(self, meeting: ExchangeRound) -> None:
        """From here on its members are those that take part. Each replica calls it at the same
        step: the exchange may have ended sooner, and by that the first of the replicas, which
        speaks for all, would be told differently."""
        self.members = meeting.members

    def _meet(self, key: str, timeout_s: float) -> tuple[ExchangeRound, Who] | None:
        """All ranks of the replica get what its first rank has seen."""
        told = f"{key}/told/{self.replica}"
        here = [f"{key}/here/{replica}" for replica in range(self.replicas)]
        if self.place == 0:
            text = self._read_decision(key, here, timeout_s)
            self._store.set(told, text)
        _until(lambda: self._store.check([told]))
        text = self._store.get(told).decode()
        self._forget([*here, f"{key}/well"], [f"{key}/who", f"{key}/done", told])
        who = json.loads(text) if text != WITHOUT else None
        if who is None or self.replica not in (replica for replica, _ in who["members"]):
            return None
        incarnations = tuple((replica, incarnation) for replica, incarnation in who["members"])
        members = tuple(replica for replica, _ in incarnations)
        asking = {int(replica): ticket for replica, ticket in who["asking"].items()}
        return (
            ExchangeRound(members, asking, members[-1], members.index(self.replica)),
            incarnations,
        )

    def _read_decision(self, key: str, here: list[str], timeout_s: float) -> str:
        """Who takes part, as it is written down."""
        deadline, seen = time.monotonic() + timeout_s, [WITHOUT]
        if not self._is_in():
            return WITHOUT
        self._store.set(here[self.replica], str(self.company.incarnation))

        def decided() -> bool:
            if self._store.check([f"{key}/who"]):
                seen[0] = self._store.get(f"{key}/who").decode()
                return True
            self._propose(key, here, deadline)
            return not self._is_in()

        _until(decided)
        return seen[0]

    def _propose(self, key: str, here: list[str], deadline: float) -> None:
        states = [self._state(replica) for replica in range(self.replicas)]
        inside = [
            (replica, incarnation)
            for replica, (state, incarnation) in enumerate(states)
            if state == IN
        ]
        members = [
            (replica, incarnation)
            for replica, incarnation in inside
            if self._store.check([here[replica]])
            and int(self._store.get(here[replica])) == incarnation
        ]
        missing = [
            replica for replica, incarnation in inside if (replica, incarnation) not in members
        ]
        if (missing and time.monotonic() < deadline) or not members:
            return
        asking = {}
        for replica, (state, _) in enumerate(states):
            ticket = (
                self._store.get(f"asks/{replica}").decode()
                if self._store.check([f"asks/{replica}"])
                else ""
            )
            if state != IN and ticket and not ticket.startswith(GIVEN):
                asking[replica] = ticket
        mine = json.dumps({"members": members, "asking": asking})
        if self._store.compare_set(f"{key}/who", "", mine).decode() == mine:
            for replica in missing:
                self._store.set(f"state/{replica}", OUT)

    def _make_group(self, key: str, meeting: ExchangeRound, who: Who) -> dist.ProcessGroup | None:
        if self._at != who or self._group is None:
            self._group, self._at = None, who  # the old one goes before there is another
            if meeting.size > 1:
                timeout = timedelta(seconds=self.timeout_s)
                self._group = private_group(
                    self._store, f"{key}/{self.place}", meeting.index, meeting.size, timeout
                )
        return self._group

    def _vote(self, key: str, meeting: ExchangeRound, well: bool) -> str:
        """WELL, or the rank that was the first to fail, if one was."""
        if meeting.size * self.places == 1:
            return WELL if well else self._name
        done = f"{key}/done"
        if not well:
            self._store.compare_set(done, "", self._name)
        elif self._store.add(f"{key}/well", 1) == meeting.size * self.places:
            self._store.compare_set(done, "", WELL)
        deadline = time.monotonic() + self.timeout_s

        def counted() -> bool:
            late = time.monotonic() > deadline or any(
                self.has_ended(replica) for replica in meeting.members
            )
            # a vote may have ended just now: the one that was written first counts
            if not self._store.check([done]) and late:
                self._store.compare_set(done, "", "nobody")
            return self._store.check([done])

        _until(counted)
        return self._store.get(done).decode()

    @property
    def _name(self) -> str:
        return f"{self.replica}.{self.place}"

    def _state(self, replica: int) -> tuple[str, int]:
        """IN, OUT or GONE, and which incarnation is in."""
        key = f"state/{replica}"
        state, _, incarnation = (
            self._store.get(key).decode() if self._store.check([key]) else IN
        ).partition(" ")
        return state, int(incarnation or 0)

    def _is_in(self) -> bool:
        return self._state(self.replica) == (IN, self.company.incarnation)

    def _forget(self, soon: list[str], later: list[str]) -> None:
        """What nobody reads any more goes. Who is so late that it misses what was decided is out by
        then."""
        for waiting, keys, behind in ((self._soon, soon, 2), (self._later, later, 64)):
            waiting.append(keys)
            for key in waiting.pop(0) if self.place == 0 and len(waiting) > behind else ():
                with suppress(RuntimeError):
                    self._store.delete_key(key)

    # ---- coming and going ------------------------------------------------------------------------

    def has_ended(self, replica: int) -> bool:
        """Whether the processes of a replica have ended."""
        return self._state(replica)[0] == GONE

    def leave_out(self, replica: int) -> None:
        """Nobody waits for this replica until it is let in again."""
        if self.place == 0:
            self._store.set(f"state/{replica}", OUT)

    def take_in(self, replica: int, incarnation: int) -> None:
        """It takes part."""
        if self.place == 0:
            self._store.set(f"state/{replica}", f"{IN} {incarnation}")

    def meeting_store(self) -> dist.Store:
        """A connection of its own to where these replicas meet."""
        return self._store.clone()

    def leave(self) -> None:
        """Nobody is to wait for this replica any more."""
        if self.place == 0:
            self._store.set(f"state/{self.replica}", GONE)

    def ask(self) -> dist.ProcessGroup:
        """Ask to be let in. A group of the replica that gives (rank 0) and this one. Raises
        WeftError: no other replica goes on."""
        self._asked, self.members = self._asked + 1, ()
        ticket = f"{self.company.incarnation}.{self._asked}"
        if self.place == 0:
            self._store.set(f"state/{self.replica}", OUT)
            self._store.set(f"asks/{self.replica}", ticket)
        granted = f"granted/{self.replica}/{ticket}"
        others = [replica for replica in range(self.replicas) if replica != self.replica]
        lonely: list[float] = []  # since when

        def heard() -> bool:
            if any(self._state(replica)[0] == IN for replica in others):
                lonely.clear()
            else:
                lonely.append(time.monotonic())
                if lonely[-1] - lonely[0] > self.timeout_s:
                    raise WeftError(
                        f"replica {self.replica} was left out, and no other replica runs that it"
                        " could catch up from"
                    )
            return self._store.check([granted])

        _until(heard)
        return self._pair(self.replica, ticket, 1)

    def grants(self, meeting: ExchangeRound) -> Iterator[dist.ProcessGroup]:
        """For each replica that this one is to let in after a meeting: a group of this one (rank 0)
        and that. All ranks of the replica call it."""
        for replica, ticket in meeting.asking.items() if meeting.giver == self.replica else ():
            if (replica, ticket) in self._let_in:  # two exchanges that overlap both know of it
                continue
            self._let_in.add((replica, ticket))
            told = f"grant/{replica}/{ticket}/{self.replica}"
            if self.place == 0:
                mine = f"{GIVEN} {self.replica}"
                # it may have asked anew, or another replica may be ahead of this one
                won = self._store.compare_set(f"asks/{replica}", ticket, mine).decode() == mine
                if won:
                    self.take_in(replica, int(ticket.partition(".")[0]))
                    self._store.set(f"granted/{replica}/{ticket}", "")
                self._store.set(told, "yes" if won else "no")
            _until(lambda told=told: self._store.check([told]))  # type: ignore[misc]
            if self._store.get(told) == b"yes":
                with suppress(RuntimeError):  # it is gone again
                    yield self._pair(replica, ticket, 0)

    def _pair(self, replica: int, ticket: str, index: int) -> dist.ProcessGroup:
        name = f"pair/{replica}/{ticket}/{self.place}"
        return private_group(self._store, name, index, 2, timedelta(seconds=self.timeout_s))

    @property
    def leads(self) -> bool:
        """Whether this is the first of the replicas that go on: it speaks for all. One that was
        left out and does not know it yet does not."""
        return bool(self.members) and self.replica == self.members[0] and self._is_in()


def _meeting_place(store: dist.Store, number: int) -> dist.Store:
    return dist.PrefixStore(f"weft/{number}", store)


def mark_ended(store: dist.Store, replica: int) -> None:
    """Say that the processes of a replica, which made one engine each, have ended."""
    _meeting_place(store, 1).set(f"state/{replica}", GONE)


def is_left_out(store: dist.Store, replica: int) -> bool:
    """Whether a replica, of which each process made one engine, is one that nobody waits for."""
    here, key = _meeting_place(store, 1), f"state/{replica}"
    return here.check([key]) and here.get(key) == OUT.encode()


def private_group(
    store: dist.Store, name: str, index: int, size: int, timeout: timedelta
) -> dist.ProcessGroup:
    """A gloo group of processes that need share no other. It is none of those that
    torch.distributed counts, so it may be made by some ranks alone."""
    place = dist.PrefixStore(name, store.clone())
    group = dist.ProcessGroup(place, index, size)
    gloo = dist.ProcessGroupGloo(place, index, size, timeout)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    return group


def _until(true: Callable[[], bool]) -> None:
    """Poll: a store's own wait would block all other threads that use it, and warns when its time
    is over."""
    pause = POLL_S / 4
    while not true():
        time.sleep(pause)
        pause = min(pause * 1.5, 10 * POLL_S)
