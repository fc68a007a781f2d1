"""Does a model or a loss mix samples? One sample alone is compared with the same sample in a batch
of two: what differs depends on how a layout divides the batch.

Only what the loss uses is looked at, in the mode in which the model is. What draws random numbers
is left out, and so are batch norms that have no running statistics, and models whose state a
forward changes: none is the same for one sample and for two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from weft._torch.tensors import without_function_modes
from weft.core import ConfigError, Refusal, UnsupportedModel
from weft.nn import is_whole_batch, weighed_loss, widened
from weft.pipeline import PlaceholderTensor, map_tensors, tensors_in

from .draw_watch import DrawWatch, default_generators
from .microbatch import Batch
from .random_projection import RandomProjection, size_of
from .trial_run import first_tensor

REPEATS = 5  # one of two branches, drawn each time, is the same in all of them in 1 of 32 runs
SMALL = 1e-6  # of a mean loss: roundings are all that is left of it
Seen = Callable[[str, Any], None]


class Forward(Protocol):
    def __call__(self, batch: Batch, seen: Seen | None = None) -> Any:
        """What the model returns. `seen` gets name and output of each module that has run."""


@dataclass(frozen=True)
class Mixing:
    """What differs between one sample alone and the same in a batch of two. `module`: the first
    that does; "" where the loss does, or the model as a whole."""

    problem: str
    of_loss: bool = False
    module: str = ""


class SamplePair:
    """Two samples of a batch, together and one by one.

    Args:
        model: whose weights and buffers a forward may change.
        forward: runs it.
        loss: its loss.
        pair: a batch of two samples.
        bound: relative error that counts as none.
        fine: a smaller one, which counts if it comes with another neighbour in the batch: sums over
            as many rows are rounded alike.
    """

    def __init__(
        self,
        model: nn.Module,
        forward: Forward,
        loss: Callable[..., Any],
        pair: Batch,
        bound: float,
        fine: float,
    ):
        self._model, self._run, self._loss = model, forward, loss
        self._pair, self._bound, self._fine = pair, bound, fine
        self._changes = False  # whether a forward changes weights or buffers
        self._state = [
            (held, name, tensor, tensor.clone())
            for module in model.modules()
            for held in (module._parameters, module._buffers)
            for name, tensor in held.items()
            if tensor is not None and not (tensor.is_meta or isinstance(tensor, PlaceholderTensor))
        ]
        self._device = next(iter(pair.values())).device

    def find(self) -> Mixing | None:
        """What mixes the samples; None if nothing does, or if that cannot be said."""
        if any(isinstance(m, _BatchNorm) and m.running_mean is None for m in self._model.modules()):
            return None
        watch = DrawWatch(self._model, default_generators(self._device))
        with torch.random.fork_rng([self._device] if self._device.type == "cuda" else []):
            watch.begin(0)
            found: Mixing | None = None
            try:
                found = self._find()
            finally:
                drew = any(watch.end())
        # what it keeps of its microbatches one device keeps too; StateWatch compares ranks
        return None if drew or self._changes else found

    def _forward(self, batch: Batch, seen: Seen | None = None) -> Any:
        """A forward, after which weights and buffers are as they were."""
        output = self._run(batch, seen)
        with without_function_modes():
            for held, name, tensor, before in self._state:
                if held[name] is not tensor or not torch.equal(tensor, before):
                    self._changes, held[name] = True, tensor
                    tensor.data.copy_(before)
        return output

    def _repeats(self, alone: list[Any], bound: float) -> bool:
        """Whether a sample alone gives again what it gave, each time. What keeps state of its own
        says nothing, nor does what is drawn from a source that is not watched."""
        for _ in range(REPEATS):
            again, _ = self._leaves(_sample(self._pair, 0))
            both = zip(alone, again, strict=True)
            if any(isinstance(x, Tensor) and _differ(x, y, bound) for x, y in both):
                return False
        return True

    def _mixed(self, leaf: int, dim: int, place: int, alone: Tensor, pair: list[Any]) -> float:
        """The bound above which a sample's row of a leaf differs beside another sample; 0 if it
        does not."""
        row = pair[leaf].narrow(dim, place, 1)
        if _differ(alone, row, self._bound):
            return self._bound
        if not _differ(alone, row, self._fine):
            return 0.0
        beside, _ = self._leaves({key: value[[place, place]] for key, value in self._pair.items()})
        other = beside[leaf].narrow(dim, place, 1)
        return self._fine if _differ(other, row, self._fine) else 0.0

    def _find(self) -> Mixing | None:
        together, join = self._leaves(self._pair)
        singles = [self._leaves(_sample(self._pair, place))[0] for place in (0, 1)]
        if any(len(leaves) != len(together) for leaves in singles):
            return None
        used = self._used(together, join)
        dims = [_sample_dim(*both) for both in zip(together, singles[0], strict=True)]
        for leaf in used:
            dim = dims[leaf]
            for place in (0, 1):  # a recurrence knows what came before
                if dim is None:
                    continue
                bound = self._mixed(leaf, dim, place, singles[place][leaf], together)
                if bound:
                    if not self._repeats(singles[0], bound):
                        return None
                    module = self._first_module(bound)
                    what = f"the output of {module or 'the model'} for a sample"
                    problem = f"{what} depends on the other samples of its batch"
                    return Mixing(problem, module=module)
        if is_whole_batch(self._loss):
            return self._ungathered(used, together, singles[0], dims)
        mixing = self._of_loss(join(together), *map(join, singles))
        return mixing if mixing is None or self._repeats(singles[0], self._bound) else None

    def _leaves(self, batch: Batch) -> tuple[list[Any], Callable[[list[Any]], Any]]:
        output = widened(self._loss, self._forward(batch))

        def join(others: list[Any]) -> Any:
            rest = iter(others)
            return map_tensors(output, lambda _: next(rest))

        return tensors_in(output), join

    def _used(self, leaves: list[Any], join: Callable[[list[Any]], Any]) -> list[int]:
        """Which leaves of the output the loss depends on."""
        leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and _real(x)]
        learning = [leaves[place].requires_grad_() for place in places]
        with torch.enable_grad():
            total, _ = weighed_loss(self._loss, join(leaves), self._pair)
        if not total.requires_grad:
            return []
        grads = torch.autograd.grad(total, learning, allow_unused=True)
        return [place for place, grad in zip(places, grads, strict=True) if grad is not None]

    def _of_loss(self, together: Any, first: Any, second: Any) -> Mixing | None:
        """Means, as a run takes them: of two samples at once, and of one and one."""
        total, weight = _numbers(weighed_loss(self._loss, together, self._pair))
        parts = [
            _numbers(weighed_loss(self._loss, output, _sample(self._pair, i)))
            for i, output in enumerate((first, second))
        ]
        sums = sum(part[0] for part in parts), sum(part[1] for part in parts)
        mean = total / weight if weight else 0.0
        apart = sums[0] / sums[1] if sums[1] else 0.0
        large = max(abs(mean), abs(apart))
        if not (SMALL < large < float("inf") and abs(mean - apart) > self._bound * large):
            return None
        problem = f"the mean loss of two samples is {mean:.6g} together and {apart:.6g} one by one"
        return Mixing(problem, of_loss=True)

    def _ungathered(
        self,
        used: list[int],
        together: list[Any],
        alone: list[Any],
        dims: list[int | None],
    ) -> Mixing | None:
        """A leaf that a loss over the whole batch would not get of all samples."""
        for place in used:
            two, one = together[place], alone[place]
            same = two.shape == one.shape and not _differ(one, two, self._bound)
            if dims[place] == 0 or same:
                continue
            shapes = f"{list(one.shape)} for one sample and {list(two.shape)} for two"
            problem = f"it reads tensor {place} of the output, {shapes}: no row for each sample"
            return Mixing(problem, of_loss=True)
        return None

    def _first_module(self, bound: float) -> str:
        """The first module whose output for the first sample is another in the pair."""
        project = RandomProjection(self._device)
        alone: list[dict[tuple[str, int], tuple[Tensor, tuple[int, ...]]]] = [{}, {}]
        calls: Counter[str] = Counter()
        found: list[str] = []

        def record(name: str, output: Any, place: int | None) -> None:
            with without_function_modes(), torch.no_grad():
                tensor, call = first_tensor(output), (name, calls[name])
                calls[name] += 1
                if tensor is None or found:
                    return
                if place is not None:
                    shape = tuple(tensor.shape)
                    alone[place][call] = project(tensor, [None] * tensor.ndim), shape
                    return
                for row in (0, 1):
                    want, shape = alone[row].get(call, (None, ()))
                    dim = _sample_dim(tensor, tensor.new_empty(shape, device="meta"))
                    if want is not None and dim is not None:
                        part = tensor.narrow(dim, row, 1)
                        error = size_of(project(part, [None] * part.ndim) - want)
                        if float(error) > bound * float(size_of(want)):
                            found[:] = [name]

        for place in (0, 1, None):
            batch = self._pair if place is None else _sample(self._pair, place)
            calls.clear()
            self._forward(batch, partial(record, place=place))
        return found[0] if found else ""


def mixing_error(found: Mixing, model: nn.Module, loss: Callable[..., Any], layout: str) -> Refusal:
    """The refusal of what mixes samples.

    Args:
        found: what does.
        model: whose module is named.
        loss: its loss.
        layout: what divides the batch, in words.
    """
    name = getattr(loss, "__name__", type(loss).__name__)
    if found.of_loss and is_whole_batch(loss):
        fix = (
            "let the model return tensors [samples, ...], one for each view of the samples, and"
            " others that do not depend on samples"
        )
        return ConfigError("loss", name, found.problem, fix)
    if found.of_loss:
        fix = (
            "mark it @weft.losses.whole_batch if it compares samples; else return a sum over what"
            " counts, and how many count"
        )
        problem = f"depends on how {layout} divides the batch: {found.problem}"
        return ConfigError("loss", name, problem, fix)
    module = model.get_submodule(found.module) if found.module else model
    if getattr(module, "batch_first", None) is False:
        fix = f"give {found.module} batch_first=True: batches are [samples, positions, ...]"
    else:
        fix = (
            "compute each sample by itself, compare samples in a loss that is marked"
            " @weft.losses.whole_batch, or keep the batch whole: accumulate = 1, no dp and no fsdp"
        )
    value = found.module or type(model).__name__
    return UnsupportedModel("model", value, f"{found.problem}, which {layout} divides", fix)


def _sample(pair: Batch, place: int) -> Batch:
    return {key: value[place : place + 1] for key, value in pair.items()}


def _sample_dim(two: Any, one: Any) -> int | None:
    """The dim of a tensor that counts samples: the only one that differs, 2 and 1."""
    if not (isinstance(two, Tensor) and isinstance(one, Tensor)) or two.ndim != one.ndim:
        return None
    differ = [d for d in range(two.ndim) if two.shape[d] != one.shape[d]]
    if len(differ) != 1 or (two.shape[differ[0]], one.shape[differ[0]]) != (2, 1):
        return None
    return differ[0]


def _differ(want: Tensor, found: Tensor, bound: float) -> bool:
    want, found = want.detach(), found.detach()
    size = float(want.abs().double().norm())
    error = float((found - want).abs().double().norm())
    return error > bound * size and error > 0.0  # false where either is no number


def _real(leaf: Tensor) -> bool:
    return leaf.is_floating_point() or leaf.is_complex()


def _numbers(found: tuple[Tensor, Any]) -> tuple[float, float]:
    return float(found[0].detach()), float(found[1])
