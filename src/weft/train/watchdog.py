"""A run that hangs says where, rank by rank, and ends: instead of waiting until a collective times out, and blaming
whoever noticed first."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from datetime import timedelta
from types import FrameType
from typing import Self

import torch.distributed as dist

CODE = 3  # with which a rank that hangs ends
LISTEN_S = 3.0  # for what the others say
_OPERATIONS = re.compile(
    r"all_reduce|all_gather\w*|reduce_scatter\w*|all_to_all\w*|broadcast\w*|barrier|gather_object|scatter\w*|"
    r"isend|irecv|send|recv|batch_isend_irecv"
)


class Watchdog:
    """Of one rank. When it has not been told of progress for `limit_s` seconds it tells the others where it is, hears
    where they are, says so, and ends this process; 0: it watches nothing. A context, around the steps."""

    def __init__(self, limit_s: float):
        self._limit_s = limit_s
        self._at, self._since = "the start", time.monotonic()
        self._watched, self._done = threading.get_ident(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="weft watchdog", daemon=True)

    def beat(self, at: str) -> None:
        """This has been done."""
        self._at, self._since = at, time.monotonic()

    def __enter__(self) -> Self:
        self.beat(self._at)
        if self._limit_s and dist.is_initialized() and dist.get_world_size() > 1:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()

    def _watch(self) -> None:
        while not self._done.wait(min(1.0, self._limit_s / 4)):
            if time.monotonic() - self._since > self._limit_s:
                break
        else:
            return
        rank, world = dist.get_rank(), dist.get_world_size()
        store = dist.PrefixStore("weft/hang", dist.distributed_c10d._get_default_store())
        store.set(str(rank), f"{self._at}\n{place(sys._current_frames()[self._watched])}")
        heard = {}
        for other in range(world):
            key = str(other)
            try:
                store.wait([key], timedelta(seconds=LISTEN_S + self._limit_s / 4))
                heard[other] = store.get(key).decode()
            except RuntimeError:  # it says nothing
                continue
        if self._done.is_set():
            return
        if rank == min(heard):  # one speaks for all
            print(f"weft: {report(heard, world, self._limit_s)}", file=sys.stderr, flush=True)
        os._exit(CODE)


def place(frame: FrameType) -> str:
    """Where a rank is: the collective that it waits in, and the line of weft or of the model that called it."""
    stack = traceback.extract_stack(frame)
    torch_folder = os.path.dirname(dist.__file__)
    inside = (f.name for f in stack if f.filename.startswith(torch_folder))
    operation = next((name for name in inside if _OPERATIONS.fullmatch(name)), "")
    caller = next((f for f in reversed(stack) if not f.filename.startswith(os.path.dirname(torch_folder))), stack[-1])
    where = f"{caller.filename}:{caller.lineno} in {caller.name}: `{caller.line}`"
    if operation or "wait(" in (caller.line or ""):
        return f"waits in {operation or 'what it began'}, at {where}"
    return f"is in no collective, but at {where}"


def report(heard: Mapping[int, str], world: int, limit_s: float) -> str:
    """What is said of a hang: who is missing, and where each of the others waits."""
    silent = [rank for rank in range(world) if rank not in heard]
    apart = [rank for rank, text in heard.items() if "is in no collective" in text]
    if silent:
        who = f"of rank {_list(silent)} nothing is heard: stopped, cut off, or too busy to say"
    elif 0 < len(apart) < world:
        who = f"rank {_list(apart)} is in no collective, and is waited for"
    elif apart:
        who = "no rank waits in a collective on its host"
    else:
        who = "all ranks are in collectives, which do not meet"
    lines = [f"no progress for {limit_s:g} s: {who}"]
    for rank, text in heard.items():
        at, where = text.split("\n", 1)
        lines.append(f"  rank {rank}: after {at}, {where}")
    return "\n".join(lines)


def _list(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
