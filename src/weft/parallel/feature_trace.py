"""Follows the output features of linears through a forward on tensors without elements: which of
them meet before the next linear.

Each output feature of a column has a label (`feature_labels.py`). What an operator combines, by a
sum over features or a product of two, is one class from there on: a head of an attention, a hidden
feature of a feed-forward. A linear that takes features of several classes is a row: the columns
before it can be divided by these classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from weft._torch.modes import TorchDispatchMode, without_dispatch_modes
from weft._torch.trees import tree_leaves, tree_map

from .feature_labels import LabelClasses

# Operators that move elements: labels move as they do.
_MOVES = frozenset(
    "view _unsafe_view reshape permute transpose t unsqueeze squeeze expand slice select split"
    " split_with_sizes unbind unfold alias detach diagonal repeat flip roll"
    " constant_pad_nd chunk narrow pixel_shuffle pixel_unshuffle cat stack".split()
)
# Operators that combine the elements along dims; where none is given, all elements.
_SUMS = frozenset(
    "sum mean amax amin max min argmax argmin prod any all var std var_mean std_mean logsumexp"
    " linalg_vector_norm norm _softmax _log_softmax _safe_softmax softmax log_softmax cumsum"
    " cumprod logcumsumexp sort topk".split()
)
_NORMS = frozenset(["native_layer_norm", "_fused_rms_norm", "rms_norm"])
_PRODUCTS = frozenset(["mm", "bmm", "addmm", "baddbmm"])
# Those that leave each where it is, or make a tensor like another.
_SAME_PLACE = frozenset(
    "_to_copy lift_fresh clone contiguous tril triu native_dropout empty_like zeros_like ones_like"
    " full_like rand_like randn_like bernoulli_ uniform_ normal_ fill_ zero_ bernoulli".split()
)
_ZERO = torch.zeros((), dtype=torch.int64)


@dataclass(frozen=True)
class _Mark:
    """What is known of a tensor.

    labels: of its shape, mostly expanded; None: it has none.
    params: the parameters that it is made of, if it is made of nothing else.
    active: whether it has a gradient, by way of activations.
    """

    labels: Tensor | None = None
    params: frozenset[str] = frozenset()
    active: bool = False
    view: bool = False


_NOTHING = _Mark()


@dataclass
class FeatureTrace:
    """What a forward has shown.

    rows: linear -> the labels [features] of its input, for each call.
    inner: parameters that cut activations met -> labels of these.
    used_whole: parameters that were used otherwise.
    met: labels that a tensor without any combined with, and its shape.
    """

    classes: LabelClasses = field(default_factory=LabelClasses)
    rows: dict[str, list[Tensor]] = field(default_factory=dict)
    inner: dict[str, list[Tensor]] = field(default_factory=dict)
    used_whole: set[str] = field(default_factory=set)
    met: list[tuple[Tensor, tuple[int, ...]]] = field(default_factory=list)

    def settle(self) -> None:
        """At the end: kill the classes that met a tensor which differs from one to the other."""
        for labels, shape in self.met:
            found = self.classes.classes(labels)
            backs = range(1, min(len(shape), found.ndim) + 1)
            if any(shape[-b] > 1 and _varies(found, found.ndim - b) for b in backs):
                self.classes.kill(labels)


class FeatureMode(TorchDispatchMode):
    """Follows labels through operators.

    Args:
        params: id of a parameter -> its name.
    """

    def __init__(self, trace: FeatureTrace, params: Mapping[int, str]):
        super().__init__()
        self.trace, self._params = trace, params
        self._marks: Any = WeakTensorKeyDictionary()
        self._linear = 0  # depth of linears that run

    # ---- linears ----

    @contextmanager
    def around(
        self, linears: Mapping[str, nn.Module], labels: Callable[[str, int], Tensor | None]
    ) -> Iterator[None]:
        """Inside this context, outputs of these linears have new labels, and their inputs are
        taken down.

        Args:
            labels: (linear, its number of output features) -> the labels of these. None: it has no
                labels, and is whole.
        """
        handles = []
        for name, module in linears.items():
            handles.append(
                module.register_forward_pre_hook(lambda _, args, n=name: self._enter(n, args))
            )
            handles.append(
                module.register_forward_hook(
                    lambda _, args, out, n=name: self._leave(n, args, out, labels)
                )
            )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, name: str, args: tuple[Any, ...]) -> None:
        self._linear += 1

    def _leave(
        self,
        name: str,
        args: tuple[Any, ...],
        out: Tensor,
        labels: Callable[[str, int], Tensor | None],
    ) -> None:
        self._linear -= 1
        with without_dispatch_modes():
            found = self._live(args[0]) if args else None
            new = None
            if found is None:
                features = labels(name, out.shape[-1])
                new = None if features is None else features.expand(out.shape)
            else:
                vector = found.reshape(-1, found.shape[-1])
                if bool((vector != vector[:1]).any()) or bool((vector[0] == 0).any()):
                    self.trace.classes.kill(found)
                self.trace.rows.setdefault(name, []).append(vector[0].clone())
            self._marks[out] = _Mark(new, active=True)

    # ---- operators ----

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self._linear == 0:
            with without_dispatch_modes():
                self._follow(func, args, kwargs, out)
        return out

    def _follow(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        name = func._overloadpacket.__name__
        given = tree_leaves((args, kwargs), Tensor)
        made = tree_leaves(out, Tensor)
        live = {id(t): labels for t in given if (labels := self._live(t)) is not None}
        origin = self._origin(given, bool(live))
        moved = name in _MOVES
        found: list[Tensor] | None = None
        if live and made:
            found = self._labels(func, name, args, kwargs, live, made)
            if found is None:
                for labels in live.values():
                    self.trace.classes.kill(labels)
                origin = _Mark(active=True)
        for i, t in enumerate(made):
            labels = found[i] if found is not None and i < len(found) else None
            if any(t is other for other in given):
                self._write(t, labels, origin)
            else:
                self._marks[t] = replace(origin, labels=labels, view=moved)

    def _labels(
        self,
        func: Any,
        name: str,
        args: Any,
        kwargs: Any,
        live: Mapping[int, Tensor],
        made: list[Tensor],
    ) -> list[Tensor] | None:
        """Those of what an operator made. None: it is not known how it combines features."""
        shape = made[0].shape
        if name in _SAME_PLACE:
            return [live[id(args[0])]] * len(made)
        if name in _MOVES:
            return self._moved(func, name, args, kwargs, live)
        if name in _PRODUCTS:
            labels = self._product(*args[-2:], live, shape)
            if len(args) == 3:
                labels = self._combined([(None, labels), self._known(args[0], live)], shape)
            return [labels]
        if name in _SUMS or name in _NORMS:
            if id(args[0]) not in live:
                return None
            dims = _dims(func, name, args, kwargs)
            labels = live[id(args[0])]
            for dim in dims:
                labels = self.trace.classes.join_along(labels, dim)
            for other in (t for t in args[1:] if isinstance(t, Tensor)):
                self._meet(other, labels)
            return [_shaped(labels, dims, t.shape) for t in made]
        if "scaled_dot_product" in name:
            return self._attended(args[:3], live, made)
        if torch.Tag.pointwise in func.tags or name == "copy_":
            operands = args[1:] if name == "copy_" else args
            tensors = tree_leaves(operands, Tensor)
            return [self._combined([self._known(t, live) for t in tensors], shape)]
        return None

    def _moved(
        self,
        func: Any,
        name: str,
        args: Any,
        kwargs: Any,
        live: Mapping[int, Tensor],
    ) -> list[Tensor] | None:
        """The labels, moved by the operator itself."""
        others = [t for t in tree_leaves(args, Tensor) if id(t) not in live]
        if any(self._mark(t).active or self._mark(t).params for t in others):
            return None  # each rank would know a part of the gradient of what it has whole
        args = tree_map(
            lambda t: (
                live.get(id(t), _ZERO.expand(t.shape)) if isinstance(t, Tensor) else t
            ),
            args,
        )
        if name in ("view", "_unsafe_view"):
            return [args[0].reshape(args[1])]
        return tree_leaves(func(*args, **kwargs), Tensor)

    def _combined(
        self, operands: list[tuple[Tensor | None, Tensor | None]], shape: torch.Size
    ) -> Tensor:
        """Of an operator that takes elements one by one. Operands: (tensor, its labels)."""
        labels = [_narrow(known) for _, known in operands if known is not None]
        joined = labels[0]
        for other in labels[1:]:
            joined = self.trace.classes.join(joined, other)
        for t, known in operands:
            if known is None and t is not None:
                self._meet(t, joined)
        return self.trace.classes.classes(joined).expand(shape)

    def _known(self, t: Tensor, live: Mapping[int, Tensor]) -> tuple[Tensor | None, Tensor | None]:
        return t, live.get(id(t))

    def _meet(self, other: Tensor, labels: Tensor, shape: tuple[int, ...] | None = None) -> None:
        """A tensor without labels combines with labels. It must be the same for all classes
        (`settle`), and have no gradient, of which each rank would know a part, unless it is a
        parameter's."""
        mark = self._mark(other)
        self.trace.met.append((labels, tuple(other.shape) if shape is None else shape))
        if mark.active:
            self.trace.classes.kill(labels)
        for name in mark.params:
            self.trace.inner.setdefault(name, []).append(labels.amax().reshape(1))

    def _product(
        self, left: Tensor, right: Tensor, live: Mapping[int, Tensor], shape: torch.Size
    ) -> Tensor:
        classes = self.trace.classes
        rows, columns = live.get(id(left)), live.get(id(right))
        if rows is not None:
            rows = classes.join_along(_narrow(rows), rows.ndim - 1)
        if columns is not None:
            columns = classes.join_along(_narrow(columns), columns.ndim - 2)
        if rows is not None and columns is not None:
            return classes.join(rows, columns).expand(shape)
        labels, other = (rows, right) if rows is not None else (columns, left)
        assert labels is not None
        self._meet(other, labels, (*other.shape[:-2], 1, 1))
        return classes.classes(labels).expand(shape)

    def _attended(
        self, args: Any, live: Mapping[int, Tensor], made: list[Tensor]
    ) -> list[Tensor] | None:
        """Query, key and value [b, heads, s, d]: each head by itself."""
        if any(id(t) not in live for t in args):
            return None
        heads = []
        for t in args:
            labels = live[id(t)]
            for dim in (0, 2, 3):
                labels = self.trace.classes.join_along(labels, dim)
            heads.append(labels.repeat_interleave(args[0].shape[1] // t.shape[1], dim=1))
        joined = self.trace.classes.join(self.trace.classes.join(heads[0], heads[1]), heads[2])
        return [joined.expand(made[0].shape)]

    # ---- marks ----

    def _mark(self, t: Tensor) -> _Mark:
        found = self._marks.get(t)
        if found is None:
            name = self._params.get(id(t))
            found = _Mark(params=frozenset([name])) if name is not None else _NOTHING
        return found

    def _live(self, t: Tensor) -> Tensor | None:
        """Its labels, as classes. None: it has none, or all are dead."""
        if (labels := self._mark(t).labels) is None:
            return None
        small = self.trace.classes.classes(_narrow(labels))
        return small.expand(t.shape) if bool(small.any()) else None

    def _origin(self, given: list[Tensor], live: bool) -> _Mark:
        """What an operator makes of these, without its labels."""
        marks = [(t, self._mark(t)) for t in given]
        names = frozenset(name for _, mark in marks for name in mark.params)
        mixed = any(not mark.params and t.ndim for t, mark in marks)
        if names and (mixed or live):
            if not live:
                self.trace.used_whole |= names
            return _Mark(active=True)
        return _Mark(params=names, active=any(mark.active for _, mark in marks))

    def _write(self, t: Tensor, labels: Tensor | None, origin: _Mark) -> None:
        """What an operator has written into a tensor. Of a view, other tensors would have to know."""
        before = self._mark(t)
        if before.view and labels is not None:
            old = self._live(t)
            if old is None or not torch.equal(old, labels):
                self.trace.classes.kill(labels)
        self._marks[t] = replace(
            before, labels=labels, active=before.active or origin.active, params=origin.params
        )


def _narrow(labels: Tensor) -> Tensor:
    """With size 1 along the dims along which it is expanded."""
    for dim in range(labels.ndim):
        if labels.stride(dim) == 0 and labels.shape[dim] > 1:
            labels = labels.narrow(dim, 0, 1)
    return labels


def _varies(labels: Tensor, dim: int) -> bool:
    return labels.shape[dim] > 1 and bool((labels != labels.narrow(dim, 0, 1)).any())


def _dims(func: Any, name: str, args: Any, kwargs: Any) -> list[int]:
    """The dims along which an operator combines elements."""
    count = args[0].ndim
    if name in _NORMS:
        return list(range(count - len(args[1]), count)) if name != "rms_norm" else [count - 1]
    names = [a.name for a in func._schema.arguments]
    if "dim" not in names:
        return list(range(count))
    place = names.index("dim")
    dims = args[place] if len(args) > place else kwargs.get("dim", None)
    if dims is None or dims == []:
        default = func._schema.arguments[place].default_value
        dims = default if isinstance(default, int) else range(count)
    return [d % count for d in ([dims] if isinstance(dims, int) else dims)] if count else []


def _shaped(labels: Tensor, dims: list[int], shape: torch.Size) -> Tensor:
    """Labels with dims of size 1, as a result of this shape has them."""
    if labels.ndim > len(shape):
        labels = labels.reshape([n for d, n in enumerate(labels.shape) if d not in dims])
    return labels.expand(shape)
