"""Asynchronous parameter servers by their definition, on one device: a server applies one gradient
after the other to its newest weights (Li et al. 2014), and a worker computes with the weights that
it was last given, which may be older. In which order this happened is data of a run; that nobody
was further ahead than the bound of staleness is a law (Ho et al. 2013)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from weft.engine import Optimizers

from .parameter_groups import plain_optimizer

Weights = dict[str, Tensor]
# ("applied" a gradient of this worker, "gave" it weights, "showed" it what is saved)
Order = Sequence[tuple[str, int]]


@dataclass
class ServedState:
    """Weights, and what an optimizer keeps of each, by name; after how many steps of who saves, and
    its buffers."""

    weights: Weights
    state: dict[str, dict[str, Any]]
    step: int = 0
    buffers: Weights = field(default_factory=dict)

    def named_state(self) -> dict[str, Tensor]:
        """The tensors of the state, by the names that a checkpoint has."""
        return {
            f"optimizer/{name}/{key}": value
            for name, kept in self.state.items()
            for key, value in kept.items()
            if isinstance(value, Tensor)
        }


class PlainServer:
    """One server.

    Args:
        begun: its weights, and what the optimizer has kept of them already.
        optimizer: makes an optimizer of (name, weight).
        order: of what happened.
        workers: how many there are, by which the learning rate is divided.
        sent: what arrives of a worker's gradients: (worker, gradients) -> gradients.
        factor: of the learning rate, of a worker's n-th gradient, the first of which is 0.
    """

    def __init__(
        self,
        begun: ServedState,
        optimizer: Optimizers,
        order: Order,
        workers: int,
        sent: Callable[[int, Mapping[str, Tensor]], Mapping[str, Tensor]],
        factor: Callable[[int], float] = lambda n: 1.0,
    ):
        self.params = {name: nn.Parameter(value.clone()) for name, value in begun.weights.items()}
        dtypes = (value.dtype for value in begun.weights.values())
        self._dtype = reduce(torch.promote_types, dtypes, torch.float32)
        with _numbers_in(self._dtype):
            self.optimizer = plain_optimizer(optimizer, list(self.params.items()))
        for name, state in begun.state.items():
            self.optimizer.state[self.params[name]].update(copy.deepcopy(state))
        self._rates = [group["lr"] / workers for group in self.optimizer.param_groups]
        self._factor = factor
        self._order, self._next, self._sent = order, 0, sent
        self.given: list[list[Weights]] = [[] for _ in range(workers)]  # of each worker, in turn
        self.shown: list[ServedState] = []
        self.applied = [0] * workers

    def go_on(self, pushed: Sequence[Sequence[Mapping[str, Tensor]]]) -> bool:
        """Do what happened next, as far as the gradients that each worker has pushed allow. Whether
        anything was done."""
        before = self._next
        while self._next < len(self._order):
            what, worker = self._order[self._next]
            if what == "applied":
                if self.applied[worker] == len(pushed[worker]):
                    break
                gradients = pushed[worker][self.applied[worker]]
                own = {n: g for n, g in gradients.items() if n in self.params}
                arrived = self._sent(worker, own)
                for name, p in self.params.items():
                    p.grad = arrived[name].clone() if name in own else None
                factor = self._factor(self.applied[worker])
                for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
                    group["lr"] = rate * factor
                with _numbers_in(self._dtype):
                    self.optimizer.step()
                self.applied[worker] += 1
            elif what == "gave":
                self.given[worker].append(self.now().weights)
            else:
                self.shown.append(self.now())
            self._next += 1
        return self._next > before

    def now(self) -> ServedState:
        """What it has."""
        weights = {name: p.detach().clone() for name, p in self.params.items()}
        kept = {name: self.optimizer.state.get(p, {}) for name, p in self.params.items()}
        return ServedState(
            weights, copy.deepcopy({name: state for name, state in kept.items() if state})
        )


@contextmanager
def _numbers_in(dtype: torch.dtype) -> Iterator[None]:
    """What an optimizer makes without asking for a dtype, such as counts of steps."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def order_in_turns(workers: int, steps: int, shows: Callable[[int], bool]) -> list[tuple[str, int]]:
    """An order in which all take a step after the other. `shows`: after which steps the first of
    them saves."""
    order = [("gave", worker) for worker in range(workers)]
    for step in range(1, steps + 1):
        for worker in range(workers):
            order += [("applied", worker), ("gave", worker)]
            order += [("showed", 0)] if worker == 0 and step < steps and shows(step) else []
    return [*order, ("showed", 0)] if shows(steps) else order


_OFTEN = "seldom", "often"


def order_faults(
    order: Order, workers: int, steps: int, staleness: int | None, shown: int
) -> list[str]:
    """What of an order of updates no server may do.

    Args:
        order: of one server.
        workers: how many there are.
        steps: that each of them takes.
        staleness: steps that a worker may be ahead of the slowest; None: any number.
        shown: how many times the first worker saves what servers have.
    """
    found: dict[str, None] = {}
    clocks, waits = [0] * workers, [True] * workers
    for what, worker in order:
        applies = what == "applied"
        if what == "showed":
            shown -= 1
            if waits[worker] or worker:
                found[f"worker {worker} saves, and has not got weights"] = None
            continue
        if applies == waits[worker]:
            found[f"worker {worker} pushes, and gets weights, not in turn"] = None
        waits[worker] = applies
        clocks[worker] += applies
        ahead = clocks[worker] - min(clocks)
        if not applies and staleness is not None and ahead > staleness:
            fault = f"worker {worker} goes on {ahead} steps ahead, where {staleness} are most"
            found[fault] = None
    for worker, clock in enumerate(clocks):
        if clock != steps:
            found[f"{clock} of the {steps} gradients of worker {worker} were applied"] = None
    if shown:
        found[f"the first worker saves {abs(shown)} times too {_OFTEN[shown < 0]}"] = None
    return list(found)
