"""Asynchronous parameter servers by their definition, on one device: a server applies one gradient
after the other to its newest weights (Li et al. 2014), and a worker computes with the weights that
it was last given, which may be older. In which order this happened is data of a run; that nobody
was further ahead than the bound of staleness is a law (Ho et al. 2013)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor, nn

from weft.engine import Optimizers

from .parameter_groups import plain_optimizer

Weights = dict[str, Tensor]
Order = Sequence[tuple[bool, int]]  # (a gradient of this worker was applied, or it got weights)


class PlainServer:
    """One server of these weights. `order`: of what happened. `workers`: how many there are, by
    which the learning rate is divided. `sent(worker, gradients)`: what arrives of gradients."""

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        optimizer: Optimizers,
        order: Order,
        workers: int,
        sent: Callable[[int, Mapping[str, Tensor]], Mapping[str, Tensor]],
    ):
        self.params = {name: nn.Parameter(value.clone()) for name, value in weights.items()}
        self.optimizer = plain_optimizer(optimizer, list(self.params.items()))
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] / workers
        self._order, self._next, self._sent = order, 0, sent
        self.given: list[list[Weights]] = [[] for _ in range(workers)]  # of each worker, in turn
        self.applied = [0] * workers

    def go_on(self, pushed: Sequence[Sequence[Mapping[str, Tensor]]]) -> bool:
        """Do what happened next, as far as the gradients that each worker has pushed allow. Whether
        anything was done."""
        before = self._next
        while self._next < len(self._order):
            applies, worker = self._order[self._next]
            if applies:
                if self.applied[worker] == len(pushed[worker]):
                    break
                gradients = pushed[worker][self.applied[worker]]
                own = {n: g for n, g in gradients.items() if n in self.params}
                arrived = self._sent(worker, own)
                for name, p in self.params.items():
                    p.grad = arrived[name].clone() if name in own else None
                self.optimizer.step()
                self.applied[worker] += 1
            else:
                now = {name: p.detach().clone() for name, p in self.params.items()}
                self.given[worker].append(now)
            self._next += 1
        return self._next > before

    def state(self) -> Iterator[tuple[str, str, Tensor]]:
        """(weight, what, tensor) of the optimizer's state."""
        for name, p in self.params.items():
            for key, value in self.optimizer.state.get(p, {}).items():
                if isinstance(value, Tensor):
                    yield name, key, value


def order_faults(order: Order, workers: int, steps: int, staleness: int | None) -> list[str]:
    """What of an order of updates no server may do.

    Args:
        order: of one server.
        workers: how many there are.
        steps: that each of them takes.
        staleness: steps that a worker may be ahead of the slowest; None: any number.
    """
    found: dict[str, None] = {}
    clocks, waits = [0] * workers, [True] * workers
    for applies, worker in order:
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
    return list(found)
