"""Brings parameters whole to the ranks that update them, and their parts back
(core/whole_updates.py says which)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.core import Chunk, Plan, WholeUpdate, chunks_of, stored_segments
from weft.parallel import Mesh

from .grad_buckets import local_tensor

Part = tuple[tuple[int, ...], tuple[Chunk, ...]]  # shape of a rank's part, and where it lies


class WholeExchange:
    """One WholeUpdate on one rank. `held`: the whole of each parameter that this rank owns; it has
    memory from `gather` to `scatter` alone."""

    def __init__(
        self, update: WholeUpdate, plan: Plan, mesh: Mesh, params: Mapping[str, nn.Parameter]
    ):
        group = mesh.group(*update.axes)
        assert group is not None
        self._group, self._device, self._dtype = group, mesh.device, update.dtype
        self.names = frozenset(update.owners)
        self._params = {name: params[name] for name in update.owners}
        self._size = mesh.size(*update.axes)
        self._mine = mesh.index(*update.axes)
        self._of: list[list[str]] = [[] for _ in range(self._size)]  # rank -> what it owns
        for name, owner in update.owners.items():
            self._of[owner].append(name)
        shapes, table = {w.name: w.shape for w in plan.weights}, plan.params()
        ranks = plan.layout.group_ranks(mesh.rank, *update.axes)
        self._parts: dict[str, list[Part]] = {}
        for name in self._of[self._mine]:
            dims = [stored_segments(plan, shapes[name], table[name], rank) for rank in ranks]
            self._parts[name] = [
                (tuple(sum(n for _, _, n in segments) for segments in each), chunks_of(each))
                for each in dims
            ]
        self._shapes = {name: shapes[name] for name in self._of[self._mine]}
        self.held = {name: nn.Parameter(self._no_memory(name)) for name in self._shapes}

    def clear(self) -> None:
        """Give what this rank owns memory, of zeros."""
        for name, p in self.held.items():
            p.data = torch.zeros(self._shapes[name], dtype=self._dtype, device=self._device)

    def release(self) -> None:
        """Free what this rank owns until the next step; its optimizer state stays."""
        for name, p in self.held.items():
            p.data, p.grad = self._no_memory(name), None

    def _no_memory(self, name: str) -> Tensor:
        """A tensor of the parameter's shape that is one element of memory."""
        one = torch.zeros((), dtype=self._dtype, device=self._device)
        return one.expand(self._shapes[name])

    @torch.no_grad()
    def gather(self) -> None:
        """The whole weights and gradients of what this rank owns. A part without a gradient counts
        as zeros; where no part has one, there is none."""
        pieces, counts = [], []
        for names in self._of:
            mine = [self._with_gradient(self._params[name]) for name in names]
            pieces += [flat for each in mine for flat in each]
            counts.append(sum(flat.numel() for each in mine for flat in each))
        sizes = [
            sum(2 * prod(parts[rank][0]) + 1 for parts in self._parts.values())
            for rank in range(self._size)
        ]
        received = self._exchange(pieces, counts, sizes)
        self.clear()
        reached = dict.fromkeys(self.held, 0.0)
        grads = {name: torch.zeros_like(p) for name, p in self.held.items()}
        for rank, flat in enumerate(received.split(sizes)):
            for name, parts in self._parts.items():
                shape, chunks = parts[rank]
                numel = prod(shape)
                weight, grad, had, flat = flat.tensor_split([numel, 2 * numel, 2 * numel + 1])
                reached[name] += float(had)
                for here, there in chunks:
                    self.held[name].data[there] = weight.view(shape)[here]
                    grads[name][there] = grad.view(shape)[here]
        for name, p in self.held.items():
            p.grad = grads[name] if reached[name] else None

    @torch.no_grad()
    def scatter(self) -> None:
        """Each rank's part of the new weights."""
        pieces, counts = [], []
        for rank in range(self._size):
            for name, parts in self._parts.items():
                shape, chunks = parts[rank]
                part = torch.empty(shape, dtype=self._dtype, device=self._device)
                for here, there in chunks:
                    part[here] = self.held[name].data[there]
                pieces.append(part.flatten())
            counts.append(sum(prod(parts[rank][0]) for parts in self._parts.values()))
        mine = [[local_tensor(self._params[name].detach()) for name in names] for names in self._of]
        sizes = [sum(weight.numel() for weight in weights) for weights in mine]
        received = self._exchange(pieces, counts, sizes)
        weights = [weight for each in mine for weight in each]
        for weight, new in zip(weights, received.split([w.numel() for w in weights]), strict=True):
            weight.copy_(new.view(weight.shape))
        self.release()

    def _with_gradient(self, p: nn.Parameter) -> list[Tensor]:
        """This rank's part of weight and gradient, and whether there is a gradient; flat."""
        weight = local_tensor(p.detach())
        grad = torch.zeros_like(weight) if p.grad is None else local_tensor(p.grad)
        had = weight.new_tensor([float(p.grad is not None)])
        return [weight.flatten(), grad.flatten(), had]

    def _exchange(
        self, pieces: Sequence[Tensor], counts: Sequence[int], sizes: Sequence[int]
    ) -> Tensor:
        """Send each rank its `counts` elements of the pieces; get `sizes` of each."""
        empty = torch.empty(0, dtype=self._dtype, device=self._device)
        sent = torch.cat([empty, *(piece.to(self._device, self._dtype) for piece in pieces)])
        received = empty.new_empty(sum(sizes))
        dist.all_to_all_single(received, sent, list(sizes), list(counts), group=self._group)
        return received
