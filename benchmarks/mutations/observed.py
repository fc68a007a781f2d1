"""What a pair of a model and a layout does in a process group, or in processes that it starts."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from subjects import STEPS, Pair, case_of
from training import deep_says

from tests.late_messages import late_messages
from weft.core.errors import Refusal
from weft.verification.compare import check_layout
from weft.verification.server_replay import check_replayed
from weft.verification.verify_model import _references


@dataclass(frozen=True)
class Outcome:
    """`says`: what verify says against a layout, "" if nothing. `numbers`: losses and the squares
    of the last state, which the layout has too. `ran`: the plan, and the collectives of a step."""

    says: str
    numbers: tuple[float, ...]
    ran: str


def verified(model: str, layout: str, late: bool = False) -> Outcome:
    """Both sides in this process group: every rank makes the reference by itself."""
    case = case_of(model)
    (alone,) = _references(case, [layout], STEPS)
    if isinstance(alone, Refusal):
        raise alone
    check = check_replayed if alone.replayed else check_layout
    with late_messages() if late else nullcontext():
        result = check(case, layout, alone)
    found = result.first or result.problem or result.stray or "numbers"
    squares = (float(t.double().square().sum()) for t in alone.final.values())
    ran = f"{case.lay(case.model(), layout)} {sorted(result.comms_seen.items())}"
    numbers = (*alone.losses, *squares)
    return Outcome("" if result.passed else found, numbers, ran)


def trained(name: str, layout: str) -> Outcome:
    """In processes that this one starts."""
    says, numbers = deep_says(name, layout)
    return Outcome(says, numbers, "")


def observed(pair: Pair) -> Outcome:
    if pair.way == "deep":
        return trained(pair.model, pair.layout)
    return verified(pair.model, pair.layout, pair.way == "late")


class Died(Exception):
    """A process ended with an error, or did not end."""


def in_a_process(function: Callable[..., Any], *args: Any, timeout: float) -> Any:
    """The result of a function in a forked process, which ends with all that it has started."""
    here, there = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(
        target=_answer, args=(there, function, args)
    )
    process.start()
    there.close()
    try:
        if not here.poll(timeout):
            raise Died(f"no answer within {timeout:g} s")
        found, error = here.recv()
    except EOFError:
        raise Died("ended without an answer") from None
    finally:
        if process.is_alive() and process.pid is not None:
            process.join(1.0)
            os.killpg(process.pid, signal.SIGKILL) if process.is_alive() else None
        process.join()
    if error:
        raise Died(error)
    return found


def _answer(
    there: multiprocessing.connection.Connection, function: Callable[..., Any], args: Any
) -> None:
    os.setpgid(0, 0)
    torch.set_num_threads(1)
    try:
        there.send((function(*args), ""))
    except BaseException as error:
        traceback.print_exc()
        there.send((None, f"{type(error).__name__}: {error}"))
