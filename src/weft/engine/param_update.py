"""The optimizer of one rank, and the tensors that it updates.

An optimizer gets plain tensors: a parameter as it is, this rank's part of one that fsdp shards, or,
where it needs whole tensors and ranks hold parts of them, the whole of those that this rank owns.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from weft.core import Plan, whole_updates
from weft.parallel import Mesh

from .grad_buckets import local_tensor
from .optimizer_factory import OptimizerFactory
from .optimizers import (
    Optimizers,
    check_codec,
    check_optimizer,
    make_state,
    match_strides,
    needs_whole,
    number_state,
    refused_by_servers,
)
from .whole_exchange import WholeExchange


class ParamUpdate:
    """Takes the optimizer's steps.

    `held`: parameter -> what the optimizer has of it; of those that other ranks update, nothing.
    `whole`: the parameters that one rank updates for all that hold a part of them.
    """

    def __init__(
        self,
        make: Optimizers,
        plan: Plan,
        mesh: Mesh,
        params: Mapping[str, nn.Parameter],
        updates: Callable[[str], bool],
        servers_update: bool,
    ):
        if isinstance(make, OptimizerFactory):
            make.check(plan.weights)
        self._params, self._updates = params, updates
        # numbers of optimizer state, and tensors which a checkpoint fills in their place
        self._loading: list[tuple[nn.Parameter, str, Tensor]] = []
        trained = {name: p for name, p in params.items() if p.requires_grad}
        self.held = {name: _plain(p) for name, p in trained.items()}
        self.optimizer = self._made(make, mesh)
        check_optimizer(self.optimizer, plan)
        check_codec(self.optimizer, plan)
        needed = needs_whole(self.optimizer, self.held, plan)
        part = plan.of(mesh.rank)
        self.exchanges = [
            WholeExchange(update, part, mesh, params)
            for update in whole_updates(part, [name for name in needed if updates(name)])
        ]
        self.whole = frozenset(name for exchange in self.exchanges for name in exchange.names)
        if self.whole:
            if servers_update:
                raise refused_by_servers(self.optimizer, plan)
            for name in self.whole:
                del self.held[name]
            for exchange in self.exchanges:
                self.held |= exchange.held
            self.held = {name: self.held[name] for name in trained if name in self.held}
            self.optimizer = self._made(make, mesh)
        for name, held in self.held.items():
            if not updates(name):  # some classes make state at once, such as Adagrad
                self.optimizer.state.pop(held, None)

    def _made(self, make: Optimizers, mesh: Mesh) -> torch.optim.Optimizer:
        # a rank with nothing to update still has an optimizer, of a parameter without gradients
        nothing = [("", nn.Parameter(torch.zeros(1, device=mesh.device)))]
        return make(list(self.held.items()) or nothing)

    def clear_gradients(self) -> None:
        """Before a backward: no parameter has a gradient."""
        for p in (*self._params.values(), *self.held.values()):
            p.grad = None

    def step(self) -> None:
        """One step of the optimizer with the gradients of the parameters."""
        self._take_numbers()
        self._bind()
        for exchange in self.exchanges:
            exchange.gather()
        for held in self.held.values():
            match_strides(held)
        self.optimizer.step()
        for exchange in self.exchanges:
            exchange.scatter()

    def make_state(self, saved: Collection[str]) -> None:
        """Optimizer state as after a step, to load a checkpoint with these names into."""
        self._bind()
        for exchange in self.exchanges:
            exchange.clear()
        make_state(self.optimizer, self.held, saved, self._updates)
        for exchange in self.exchanges:
            exchange.release()

    def state_tensor(self, held: nn.Parameter, key: str, loading: bool) -> Tensor | None:
        """A piece of optimizer state as a checkpoint has it; None if it has it not. `loading`: it
        will be filled from one."""
        if not loading:
            self._take_numbers()
        value = self.optimizer.state[held][key]
        if not number_state(value):
            return value if isinstance(value, Tensor) else None
        number = torch.tensor(value, dtype=torch.float64)
        if loading:
            self._loading.append((held, key, number))
        return number

    def _take_numbers(self) -> None:
        """Read what a checkpoint has filled."""
        for held, key, number in self._loading:
            state = self.optimizer.state[held]
            state[key] = type(state[key])(number.item())
        self._loading.clear()

    def _bind(self) -> None:
        """What the optimizer has of sharded parameters is their memory of now: FSDP2 may move it
        before its first forward."""
        for name, held in self.held.items():
            p = self._params[name]
            if held is not p and name not in self.whole:
                held.data = local_tensor(p.detach())
                held.grad = None if p.grad is None else local_tensor(p.grad)


def _plain(p: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(local_tensor(p.detach())) if isinstance(p, DTensor) else p
