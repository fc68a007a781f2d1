"""Detects a hang, prints where each rank waits, and ends the run."""

from __future__ import annotations

import json
import os
import re
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from types import FrameType
from typing import Self

import torch.distributed as dist

from weft._torch.c10d import default_store, flight_record, group_names

from .log import log_line
from .thread_frame import thread_frame

HANGS = 3  # with which a rank that hangs ends
LISTEN_S = 3.0  # for what the others say
# The limit where none is set: so many times the slowest of the last steps, but at least LEAST_S;
# RARE_S for what has not been timed, as the first steps, a checkpoint and callbacks.
TIMES, LEAST_S, RARE_S = 20, 60.0, 600.0
STEPS, FIRST = 50, 3
# of the limit that is set, before the first step, and, up to RARE_S, for what is rare
LONGER = 10
PREFIX, ASKED, BUSY = "weft/hang", "asked", "busy"  # keys in the store
_OPERATIONS = re.compile(
    r"all_reduce|all_gather\w*|reduce_scatter\w*|all_to_all\w*|broadcast\w*|barrier|gather_object|scatter\w*|"
    r"isend|irecv|send|recv|batch_isend_irecv"
)


class Watchdog:
    """Of one rank. When it has not been told of progress for `limit_s` seconds it tells the others
    where it is, hears where they are, says so, and ends this process. A context, around the steps,
    or around what comes before them.

    Args:
        limit_s: 0: it watches nothing; None: a limit that follows from the steps so far.
        world: (store, rank, number of ranks); default: those of the default process group.
    """

    def __init__(self, limit_s: float | None, world: tuple[dist.Store, int, int] | None = None):
        self._set_s, self._rare, self._alone = limit_s, False, False
        self._start_s: float | None = None  # of what comes before the first step
        self._world = world
        self._at, self._since = "the start", time.monotonic()
        self._waited = self._since  # when last another rank was at what is rare
        self._took: deque[float] = deque(maxlen=STEPS)
        self._watched, self._done = threading.get_ident(), threading.Event()
        # two: the store may not answer
        self._threads = [
            threading.Thread(target=work, name="weft watchdog", daemon=True)
            for work in (self._watch, self._tell_busy)
        ]

    def beat(self, at: str) -> None:
        """This has been done."""
        now = time.monotonic()
        self._took.append(now - self._since)
        self._at, self._since = at, now

    @contextmanager
    def rare(self) -> Iterator[None]:
        """In this context is what happens now and then, and may take long, on this rank or on
        another one: those that wait for it have as long."""
        self._rare = True
        try:
            yield
        finally:
            self._since, self._rare = time.monotonic(), False

    @contextmanager
    def starting(self, limit_s: float | None = None) -> Iterator[None]:
        """In this context ranks do together what comes before the first step. `limit_s`: as of the
        class; default: LONGER times the limit that is set."""
        if self._set_s is not None:
            self._start_s = self._set_s * LONGER if limit_s is None else limit_s
        try:
            yield
        finally:
            self._since, self._start_s = time.monotonic(), None

    @contextmanager
    def alone(self, doing: str) -> Iterator[None]:
        """In this context this rank works by itself, as long as it takes; if others have waited for
        it too long, it says where it is, and ends."""
        self._at, self._alone = f"it began {doing}", True
        try:
            yield
        finally:
            self._at, self._since, self._alone = doing, time.monotonic(), False

    @property
    def limit_s(self) -> float:
        """Seconds without progress that are a hang, now."""
        if self._rare:
            return self._rare_s
        if self._start_s is not None:
            return self._start_s
        if self._set_s is not None:
            return self._set_s
        if len(self._took) < FIRST:
            return RARE_S
        return max(LEAST_S, TIMES * max(self._took))

    @property
    def _rare_s(self) -> float:
        if self._set_s is None:
            return RARE_S
        return max(self._set_s, min(RARE_S, self._set_s * LONGER))

    def __enter__(self) -> Self:
        self._since = time.monotonic()
        if self._world is None and dist.is_initialized():
            self._world = default_store(), dist.get_rank(), dist.get_world_size()
        # one rank waits for nobody: a limit that is set is for its own code
        watched = self._world is not None and (self._world[2] > 1 or self._set_s is not None)
        if self._set_s != 0 and watched:
            for thread in self._threads:
                thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()

    def _tell_busy(self) -> None:
        """Tell the others when this rank is at what is rare, and find out whether one of them is,
        where it is waited for."""
        assert self._world is not None
        store, told = None, False
        with suppress(RuntimeError):  # whoever keeps the store has gone
            while not self._done.wait(min(1.0, self.limit_s / 4)) or told:
                busy = self._rare and not self._done.is_set()
                waits = time.monotonic() - self._since > self.limit_s / 2
                if busy == told and not waits:
                    continue
                # a connection of its own: on the other this process may be what waits
                store = store or dist.PrefixStore(PREFIX, self._world[0].clone())
                count = store.add(BUSY, busy - told)
                told = busy
                if count > told:
                    self._waited = time.monotonic()

    def _watch(self) -> None:
        assert self._world is not None
        shared, rank, world = self._world
        while not self._done.wait(min(1.0, self.limit_s / 4)):
            limit_s = self.limit_s
            if self._alone:
                with suppress(RuntimeError):  # whoever keeps the store has gone
                    if shared.check([f"{PREFIX}/{ASKED}"]):
                        break
            else:
                quiet_s = time.monotonic() - self._since
                if quiet_s > max(limit_s, self._rare_s):
                    limit_s = max(limit_s, self._rare_s)
                    break
                # who was busy may take as long as ever to where it is waited for
                if min(quiet_s, time.monotonic() - self._waited) > limit_s:
                    break
        else:
            return
        frame = thread_frame(self._watched)
        assert frame is not None  # it stops this watchdog before it ends
        heard = {rank: RankLocation.of(self._at, frame)}
        listen_s = LISTEN_S + min(limit_s, LEAST_S) / 4

        def end() -> None:
            if self._done.is_set():
                return
            if rank == min(heard):  # one speaks for all
                log_line(hang_report(dict(sorted(heard.items())), world, limit_s))
            os._exit(HANGS)

        alarm = threading.Timer(2 * listen_s, end)  # the store itself may be what does not answer
        alarm.daemon = True
        alarm.start()
        # a connection of its own: on the other this process may be what waits
        store = dist.PrefixStore(PREFIX, shared.clone())
        store.set(ASKED, "")
        store.set(str(rank), heard[rank].json())
        for other in range(world):
            key = str(other)
            try:
                if other != rank:
                    store.wait([key], timedelta(seconds=listen_s))
                    heard[other] = RankLocation(**json.loads(store.get(key)))
            except RuntimeError:  # it says nothing
                continue
        end()


@dataclass(frozen=True)
class RankLocation:
    """Where a rank is: after what, at which line, and by PyTorch's flight recorder in which
    collectives: of each that has not ended its group, the group's ranks, its number there, and what
    it is; and the last number begun by group."""

    at: str
    line: str
    open: Sequence[tuple[str, Sequence[int], int, str]] = ()
    begun: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, at: str, frame: FrameType) -> Self:
        recorded, names = flight_record(), group_names()
        unended: list[tuple[str, Sequence[int], int, str]] = []
        begun: dict[str, int] = {}
        for entry in recorded.get("entries", ()):
            name, number = entry["process_group"][0], entry["collective_seq_id"]
            if entry["is_p2p"] or name not in names:
                continue
            begun[name] = max(number, begun.get(name, 0))
            if not entry["retired"]:
                shapes = ", ".join(
                    f"{kind.lower()} {shape}"
                    for kind, shape in zip(entry["input_dtypes"], entry["input_sizes"])
                )
                what = f"{entry['profiling_name'].rpartition(':')[2]} of {shapes or 'nothing'}"
                unended.append((name, dist.get_process_group_ranks(names[name]), number, what))
        return cls(at, frame_location(frame), unended, begun)

    def json(self) -> str:
        return json.dumps(asdict(self))

    def missing_ranks(self, heard: Mapping[int, RankLocation]) -> Iterator[str]:
        """What it waits for: each of its collectives that others of the group have not begun, as
        far as they say."""
        for group, ranks, number, what in self.open:
            late = [
                rank for rank in ranks if rank in heard and heard[rank].begun.get(group, 0) < number
            ]
            silent = [rank for rank in ranks if rank not in heard]
            lacks = [f"rank {_list(late)} has not begun it"] if late else []
            lacks += [f"rank {_list(silent)} does not answer"] if silent else []
            yield (
                f"number {number} among ranks {_list(ranks)}, {what}:"
                f" {'; '.join(lacks) or 'all have begun it'}"
            )


def frame_location(frame: FrameType) -> str:
    """Where a rank is: the collective that it waits in, and the line of weft or of the model that
    called it."""
    stack = traceback.extract_stack(frame)
    torch_folder = os.path.dirname(dist.__file__)
    inside = (f.name for f in stack if f.filename.startswith(torch_folder))
    operation = next((name for name in inside if _OPERATIONS.fullmatch(name)), "")
    caller = next(
        (f for f in reversed(stack) if not f.filename.startswith(os.path.dirname(torch_folder))),
        stack[-1],
    )
    where = f"{caller.filename}:{caller.lineno} in {caller.name}: `{caller.line}`"
    if operation:
        return f"waits in {operation}, at {where}"
    if "wait(" in (caller.line or ""):
        return f"waits for an operation that it started, at {where}"
    return f"is in no collective, but at {where}"


def hang_report(heard: Mapping[int, RankLocation], world: int, limit_s: float) -> str:
    """What is said of a hang: who is missing, and where each of the others waits."""
    silent = [rank for rank in range(world) if rank not in heard]
    apart = [rank for rank, where in heard.items() if "is in no collective" in where.line]
    if silent:
        who = f"rank {_list(silent)} does not answer: it is stopped, disconnected, or too busy"
    elif 0 < len(apart) < world:
        who = f"rank {_list(apart)} is in no collective, and the other ranks wait for it"
    elif apart:
        who = "no rank waits in a collective; all run code on their hosts"
    else:
        who = "all ranks wait in collectives, but in different ones"
    lines = [f"no progress for {limit_s:g} s: {who}"]
    for rank, where in heard.items():
        lines.append(f"  rank {rank}: after {where.at}, {where.line}")
        lines += [f"    collective {text}" for text in where.missing_ranks(heard)]
    return "\n".join(lines)


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
