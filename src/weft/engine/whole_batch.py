"""A loss over the samples of all microbatches and data ranks: outputs come together first, and each
rank takes back the gradients of its own.

Every rank computes the same loss of the same outputs. Of N data ranks each reports 1 / N of it, so
that what a step sums over ranks is the loss, and its weight, as for any loss.

A microbatch's backward begins from gradients that are known once all outputs are there. In a
pipeline whose forwards come first, they are there before the first backward. Else forwards run
without a graph beforehand, and again with one (GradCache, Gao et al. 2021, arXiv:2101.06983).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft._torch.tensors import make_empty_subclass, without_function_overrides
from weft._torch.trees import tree_flatten, tree_leaves
from weft.core import ConfigError, Plan, UnsupportedModel
from weft.nn import weighed_loss, widened
from weft.parallel import DATA_AXES, Mesh, all_gather

from .microbatch import Batch

PLAIN = (
    int,
    float,
    complex,
    bool,
    str,
    bytes,
    type(None),
)  # what an output may hold beside tensors


class LazyBatch(Mapping[str, Tensor]):
    """Entries that are made when they are first read; `read` are those that were."""

    def __init__(self, names: Collection[str], make: Callable[[str], Tensor]):
        self._names, self._make = names, make
        self.read: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.read:
            if name not in self._names:
                raise KeyError(name)
            self.read[name] = self._make(name)
        return self.read[name]

    def __contains__(self, name: object) -> bool:
        return name in self._names  # not a reason to make it

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@dataclass(frozen=True)
class _Found:
    """What the loss gave. `grads`: for each leaf of the output, of all samples."""

    total: Tensor
    weight: Tensor
    grads: list[Tensor | None]
    by: int  # the microbatch with which all outputs were there


class WholeBatchLoss:
    """Of one rank. Takes outputs microbatch by microbatch, in any order.

    Args:
        loss: (output, batch) of all samples -> (sum, weight).
        plan: this rank's plan.
        mesh: the process groups of the layout.

    Example:
        whole.begin()
        outputs = [model(**micro.arguments) for micro in micros]
        for number, micro in enumerate(micros):
            total, weight = whole(number, outputs[number], micro.batch)
        for number, output in enumerate(outputs):
            torch.autograd.backward(*zip(*whole.roots(number, output, scale=1.0)))
    """

    def __init__(self, loss: Callable[..., tuple[Tensor, Tensor]], plan: Plan, mesh: Mesh):
        self._loss, self._size, self._count = loss, plan.microbatch, plan.accumulate
        self._group, self._device = mesh.group(*DATA_AXES), mesh.device
        self._index, self._ranks = mesh.index(*DATA_AXES), mesh.size(*DATA_AXES)
        divided = self._ranks * self._count > 1
        self._pairs = plan.pairs if divided else frozenset[int]()
        self._held: dict[int, tuple[list[Any], Batch]] = {}
        self._found: _Found | None = None
        self._checked = False
        self.again = False  # whether all outputs were there before, and forwards run again

    def begin(self) -> None:
        """A step begins."""
        self._held, self._found, self.again = {}, None, False

    def __call__(self, microbatch: int, output: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """This rank's share of (sum, weight) where it becomes known; else of nothing.

        Raises:
            ConfigError: the loss does not return (sum, weight), or computes with weights that the
                output does not hold.
            UnsupportedModel: what the output holds beside samples differs between microbatches.
        """
        leaves, join = tree_flatten(output)
        if not self.again:
            self._held[microbatch] = [_detached(leaf) for leaf in leaves], batch
            if len(self._held) == self._count:
                self._found = self._compute(microbatch, join)
        found, none = self._found, torch.zeros((), dtype=torch.float64, device=self._device)
        if found is None or found.by != microbatch:
            return none, none
        return found.total, found.weight

    def roots(self, microbatch: int, output: Any, scale: float) -> list[tuple[Tensor, Tensor]]:
        """Where this microbatch's backward begins: tensors of its output, with the gradient of
        `scale` times the loss. All outputs are there."""
        found = []
        for place, leaf in enumerate(tree_flatten(output)[0]):
            grad = self._own(place, microbatch) if _learns(leaf) else None
            if grad is not None:
                found.append((leaf, (grad * scale).to(leaf.dtype)))
        return found

    def _own(self, leaf: int, microbatch: int) -> Tensor | None:
        """The gradient of a leaf of this microbatch's output on this rank."""
        assert self._found is not None, "a backward before the outputs of all microbatches"
        grad = self._found.grads[leaf]
        if grad is None:
            return None
        if self._counts_samples(self._held[microbatch][0][leaf]):
            first = (microbatch * self._ranks + self._index) * self._size
            return grad[first : first + self._size]
        # the same on all ranks and in all microbatches: together they add up to it
        return grad / self._ranks if microbatch == 0 else None

    def _compute(self, by: int, join: Callable[[list[Any]], Any]) -> _Found:
        held = [self._held[number] for number in range(self._count)]
        leaves = [
            self._together(i, list(each)) for i, each in enumerate(zip(*(h[0] for h in held)))
        ]
        learning = [leaf for leaf in leaves if _learns(leaf)]
        batch = LazyBatch(held[0][1], lambda name: self._whole([part[name] for _, part in held]))
        total, weight = weighed_loss(self._loss, join(leaves), batch)
        grads: list[Tensor | None] = [None] * len(learning)
        if total.requires_grad:
            self._refuse_other_weights(total, learning)
            grads = [*torch.autograd.grad(total, learning, allow_unused=True)]
        each = iter(grads)
        weight = torch.as_tensor(weight, device=self._device).detach().double()
        return _Found(
            total.detach().double() / self._ranks,
            weight / self._ranks,
            [next(each) if _learns(leaf) else None for leaf in leaves],
            by,
        )

    def _together(self, place: int, parts: list[Any]) -> Any:
        """One leaf of the output, of all samples."""
        if place in self._pairs:
            return _OfPairs.stand_in(f"tensor {place} of the output", self._name)
        first = parts[0]
        if not isinstance(first, Tensor):
            if not isinstance(first, PLAIN):
                problem = f"the output holds a {type(first).__name__}, whose tensors are not found"
                fix = "let the model return tensors, or tuples, lists and dicts of them"
                raise UnsupportedModel("loss", self._name, problem, fix)
            return first
        if self._counts_samples(first):
            whole = self._whole(parts)
        elif all(part.shape == first.shape and torch.equal(part, first) for part in parts[1:]):
            whole = first
        else:
            rows = f"{list(first.shape)} for {self._size} samples"
            problem = f"tensor {place} of the output, {rows}, differs between microbatches and has"
            fix = "return tensors [samples, ...], and others that do not depend on samples"
            raise UnsupportedModel("loss", self._name, f"{problem} no row for each sample", fix)
        whole = widened(self._loss, whole)
        real = whole.is_floating_point() or whole.is_complex()
        return whole.requires_grad_() if real and torch.is_grad_enabled() else whole

    def _whole(self, parts: list[Tensor]) -> Tensor:
        """[samples of all microbatches and ranks, ...], in the order of the global batch, of this
        rank's part [samples, ...] of each microbatch."""
        local = torch.cat(parts)
        if self._group is None:
            return local
        sent = local.view(torch.uint8) if local.dtype == torch.bool else local
        sent = torch.view_as_real(sent) if sent.is_complex() else sent
        came = all_gather(sent, 0, self._group, None)
        came = torch.view_as_complex(came) if local.is_complex() else came
        ranks = came.view(local.dtype).unflatten(0, (self._ranks, self._count, self._size))
        return ranks.transpose(0, 1).flatten(0, 2)

    def _counts_samples(self, leaf: Tensor) -> bool:
        return leaf.ndim > 0 and leaf.shape[0] == self._size

    def _refuse_other_weights(self, total: Tensor, known: list[Tensor]) -> None:
        """Gradients of these alone are taken: others would be lost without a word."""
        if self._checked:
            return
        self._checked, ours = True, {id(leaf) for leaf in known}
        seen, left = set(), [total.grad_fn]
        while left:
            node = left.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            left += [following for following, _ in node.next_functions]
            variable = getattr(node, "variable", None)
            if variable is not None and id(variable) not in ours:
                problem = f"it computes with its own weight {list(variable.shape)}"
                fix = "let the model's forward return that weight, and read it from the output"
                raise ConfigError("loss", self._name, f"{problem}, which gets no gradient", fix)

    @property
    def _name(self) -> str:
        return getattr(self._loss, "__name__", type(self._loss).__name__)


_OF_NO_SAMPLE = [Tensor.dtype.__get__, Tensor.device.__get__]  # type: ignore[attr-defined]


class _OfPairs(Tensor):
    """Stands for what compares the samples of one microbatch on one rank with one another: a loss
    over the whole batch that reads it would miss the other pairs."""

    about: str
    loss: str

    @staticmethod
    def stand_in(about: str, loss: str) -> _OfPairs:
        made: _OfPairs = make_empty_subclass(_OfPairs)
        made.about, made.loss = about, loss
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func in _OF_NO_SAMPLE:
            with without_function_overrides():
                return func(*args)
        read = next(t for t in tree_leaves((args, kwargs), Tensor) if type(t) is _OfPairs)
        problem = f"it reads {read.about}, which has only the samples of one microbatch on one rank"
        fix = "compare them in the loss, by tensors with a row for each sample"
        raise UnsupportedModel("loss", read.loss, problem, f"{fix} (CLIP: the embeddings)")

    __torch_dispatch__ = __torch_function__


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _learns(leaf: Any) -> bool:
    known = isinstance(leaf, Tensor) and type(leaf) is not _OfPairs
    return known and leaf.requires_grad
