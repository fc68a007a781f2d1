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

from weft.pipeline import run_op_without_data

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
_MATRICES = frozenset(["linalg_solve_triangular", "triangular_solve", "_linalg_solve_ex"])
_NEW = frozenset(
    "empty zeros ones full new_empty new_zeros new_ones new_full empty_strided new_empty_strided"
    .split()
)
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
    places: [its shape], of the one parameter that it is made of, the number of each element; None:
        not known.
    active: whether it has a gradient, by way of activations.
    made: the module that made it.
    entered: whether it depends on what entered the module that is tried, other than by its row.
    view: whether it may be a view of another.
    uniform: whether all elements are the same number, so that its size is no difference.
    """

    labels: Tensor | None = None
    params: frozenset[str] = frozenset()
    places: Tensor | None = None
    active: bool = False
    made: str = ""
    entered: bool = False
    view: bool = False
    uniform: bool = False


_NOTHING = _Mark()


@dataclass(frozen=True)
class Meeting:
    """Labels combined with a tensor that has none. shape: of that tensor, right-aligned with the
    labels, with 1 where it does not matter; now: the module where they met; allowed: whether it may
    have a gradient."""

    labels: Tensor
    shape: tuple[int, ...]
    mark: _Mark
    now: str
    allowed: bool = True


@dataclass
class FeatureTrace:
    """What a forward has shown.

    rows: linear -> the labels [features] of its input, for each call.
    inner: parameters that are the same for all classes they met -> labels of these.
    parts: parameter -> of each element the class that it met, 0: none.
    before: parameters that made something which depends on what entered; after: the other ones.
    used_whole: parameters that something without labels was made of.
    seen: labels of everything that has some.
    dropped: labels of what dropout was applied to.
    operators: how many were run.
    """

    classes: LabelClasses = field(default_factory=LabelClasses)
    rows: dict[str, list[Tensor]] = field(default_factory=dict)
    inner: dict[str, list[Tensor]] = field(default_factory=dict)
    parts: dict[str, Tensor] = field(default_factory=dict)
    before: set[str] = field(default_factory=set)
    after: set[str] = field(default_factory=set)
    used_whole: set[str] = field(default_factory=set)
    meetings: list[Meeting] = field(default_factory=list)
    seen: list[Tensor] = field(default_factory=list)
    dropped: list[Tensor] = field(default_factory=list)
    operators: int = 0

    def settle(self, shapes: Mapping[str, torch.Size]) -> None:
        """At the end: kill the classes that met a tensor which differs from one to the other,
        unless it is a parameter that can be divided with them.

        Args:
            shapes: of the parameters.
        """
        for met in self.meetings:
            found = self.classes.classes(met.labels)
            if met.mark.active and not met.allowed:
                self.classes.kill(met.labels)
            backs = range(1, min(len(met.shape), found.ndim) + 1)
            if not any(met.shape[-b] > 1 and varies(found, found.ndim - b) for b in backs):
                for name in met.mark.params:
                    self.inner.setdefault(name, []).append(found.amax().reshape(1))
            elif met.mark.places is None or not self._divide(met, found, shapes):
                self.classes.kill(met.labels)

    def _divide(self, met: Meeting, found: Tensor, shapes: Mapping[str, torch.Size]) -> bool:
        """Note which class each element of a parameter met. False: one met two."""
        (name,) = met.mark.params
        assert met.mark.places is not None
        if name not in self.parts:
            self.parts[name] = torch.zeros(shapes[name].numel(), dtype=torch.int64)
        parts = self.parts[name]
        places, classes = torch.broadcast_tensors(_narrow(met.mark.places), found)
        places, classes = places.reshape(-1), classes.reshape(-1)
        places, classes = places[classes != 0], classes[classes != 0]
        before = self.classes.classes(parts[places])
        parts[places] = classes
        return bool(((before == 0) | (before == classes)).all() and (parts[places] == classes).all())


class FeatureMode(TorchDispatchMode):
    """Follows labels through operators.

    Args:
        model: what runs.
        inside: the modules that run, the innermost last (`module_calls`).
        tolerated: (the module that made an activation without labels, the one in which it meets
            labels) -> whether it may. Its gradient is a part of a sum on each rank.
    """

    def __init__(
        self,
        trace: FeatureTrace,
        model: nn.Module,
        inside: list[str],
        tolerated: Callable[[str, str], bool],
    ):
        super().__init__()
        self.trace, self._inside, self._tolerated = trace, inside, tolerated
        self._params = {id(p): name for name, p in model.named_parameters()}
        self._sizes = {name: p.shape for name, p in model.named_parameters()}
        self._marks: Any = WeakTensorKeyDictionary()
        self._linear = 0  # depth of linears that run

    # ---- linears ----

    @contextmanager
    def around(
        self,
        linears: Mapping[str, nn.Module],
        labels: Callable[[str, int], Tensor | None],
    ) -> Iterator[None]:
        """This mode, in which outputs of these linears have new labels, and their inputs are
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
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()
            with without_dispatch_modes():
                self.trace.settle(self._sizes)

    def enter(self, tensors: Iterable[Tensor]) -> None:
        """Mark these as what enters the module that is tried."""
        for t in tensors:
            self._marks[t] = _Mark(active=True, entered=True)

    def has_gradient(self, t: Tensor) -> bool:
        """Whether a tensor depends on parameters."""
        return self._mark(t).active or bool(self._mark(t).params)

    def has_entered(self, t: Tensor) -> bool:
        """Whether a tensor depends on what entered, other than by a row."""
        return self._mark(t).entered

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
            new, entered = None, False
            if found is None:
                entered = bool(args) and self._mark(args[0]).entered
                used = self.trace.before if entered else self.trace.after
                used |= {f"{name}.weight", f"{name}.bias"} & {*self._sizes}
                features = labels(name, out.shape[-1])
                new = None if features is None else features.expand(out.shape)
            else:
                vector = found.reshape(-1, found.shape[-1])
                if bool((vector != vector[:1]).any()) or bool((vector[0] == 0).any()):
                    self.trace.classes.kill(found)
                self.trace.rows.setdefault(name, []).append(vector[0].clone())
            self._marks[out] = _Mark(new, active=True, made=self._now, entered=entered)

    @property
    def _now(self) -> str:
        return self._inside[-1] if self._inside else ""

    # ---- operators ----

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = run_op_without_data(func, args, kwargs)
        self.trace.operators += 1
        if self._linear == 0:
            with without_dispatch_modes():
                self._follow(func, args, kwargs, out)
        return out

    def _follow(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        name = func._overloadpacket.__name__
        given = tree_leaves((args, kwargs), Tensor)
        made = tree_leaves(out, Tensor)
        read = [] if name in _NEW else given
        live = {id(t): labels for t in read if (labels := self._live(t)) is not None}
        origin = self._origin(given, bool(live))
        moved = name in _MOVES
        found: list[Tensor] | None = None
        if live and made:
            found = self._labels(func, name, args, kwargs, live, made)
            if found is None:
                for labels in live.values():
                    self.trace.classes.kill(labels)
                origin = replace(origin, active=True)
        elif origin.params and made:
            origin = replace(origin, places=self._places(func, name, args, kwargs, made[0]))
        if not live and moved:
            found = self._moved_blank(func, name, args, kwargs)
        if not live:
            origin = replace(origin, uniform=self._is_uniform(func, name, read))
        for i, t in enumerate(made):
            labels = found[i] if found is not None and i < len(found) else None
            if name in _NEW and t.ndim > 1 and t.is_floating_point():
                labels = torch.zeros(t.shape, dtype=torch.int64)  # others write into it
            if labels is not None and live:
                self.trace.seen.append(_narrow(labels))
                if name in ("bernoulli_", "bernoulli", "native_dropout"):
                    self.trace.dropped.append(labels)
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
        if name in _MATRICES:
            both = []
            for t in args[:2]:
                labels = live.get(id(t))
                for back in (1, 2) if labels is not None else ():
                    labels = self.trace.classes.join_along(labels, t.ndim - back)
                both.append((t, labels))
            return [self._combined(both, shape)] * len(made)
        if "scaled_dot_product" in name:
            return self._attended(args[:3], live, made)
        if name == "convolution":
            return self._convolved(args, live, shape)
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
        dim = args[1] if len(args) > 1 and isinstance(args[1], int) else 0
        for t in others:  # beside labels in one tensor
            if name != "cat":
                return None
            labels = next(iter(live.values())).narrow(dim, 0, 1).expand(t.shape)
            if self._mark(t).params:
                live = {**live, id(t): labels}
            self._meet(t, _narrow(labels))
        args = tree_map(
            lambda t: (
                live.get(id(t), _ZERO.expand(t.shape)) if isinstance(t, Tensor) else t
            ),
            args,
        )
        if name in ("view", "_unsafe_view"):
            return [args[0].reshape(args[1])]
        return tree_leaves(func(*args, **kwargs), Tensor)

    def _moved_blank(self, func: Any, name: str, args: Any, kwargs: Any) -> list[Tensor] | None:
        """A view of labels that nothing has been written into."""
        first = args[0] if args else None
        labels = self._mark(first).labels if isinstance(first, Tensor) else None
        if labels is None or len(tree_leaves((args, kwargs), Tensor)) > 1:
            return None
        if name in ("view", "_unsafe_view"):
            return [labels.reshape(args[1])]
        return tree_leaves(func(labels, *args[1:]), Tensor)

    def _is_uniform(self, func: Any, name: str, given: list[Tensor]) -> bool:
        if name in _NEW and not name.endswith(("empty", "empty_strided")):
            return True
        moved = name in _MOVES or name == "_to_copy" or torch.Tag.pointwise in func.tags
        return bool(given) and moved and all(self._mark(t).uniform or not t.ndim for t in given)

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
        sizes = _sizes(other) if shape is None else shape
        if mark.uniform:
            sizes = ()
        if shape is not None:
            mark = replace(mark, places=None)
        allowed = self._tolerated(mark.made, self._now)
        self.trace.meetings.append(Meeting(labels, sizes, mark, self._now, allowed))
        if mark.active and not allowed:
            self.trace.classes.kill(labels)

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
        self._meet(other, labels, (*_sizes(other)[:-2], 1, 1))
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

    def _convolved(
        self, args: Any, live: Mapping[int, Tensor], shape: torch.Size
    ) -> list[Tensor] | None:
        """Each channel by itself [b, channels, ...]."""
        x, weight, bias = args[:3]
        channels = x.shape[1]
        if id(x) not in live or args[6] or args[8] != channels or shape[1] != channels:
            return None
        labels = live[id(x)]
        for dim in (0, *range(2, labels.ndim)):
            labels = self.trace.classes.join_along(labels, dim)
        self._meet(weight, labels.reshape(channels, *[1] * (weight.ndim - 1)))
        if bias is not None:
            self._meet(bias, labels.reshape(channels))
        return [self.trace.classes.classes(labels).expand(shape)]

    # ---- marks ----

    def _mark(self, t: Tensor) -> _Mark:
        found = self._marks.get(t)
        if found is None:
            name = self._params.get(id(t))
            if name is None:
                return _NOTHING
            places = torch.arange(t.numel()).reshape(t.shape)
            found = self._marks[t] = _Mark(params=frozenset([name]), places=places)
        return found

    def _places(self, func: Any, name: str, args: Any, kwargs: Any, out: Tensor) -> Tensor | None:
        """Of what is made of one parameter alone, which of its elements each is made of."""
        given = tree_leaves((args, kwargs), Tensor)
        known = [t for t in given if t.ndim and self._mark(t).params]
        if len(known) != 1 or (places := self._mark(known[0]).places) is None:
            return None
        if name in _SAME_PLACE:
            return places
        if name in ("view", "_unsafe_view"):
            return places.reshape(args[1])
        if name in _MOVES:
            own = {key: value for key, value in kwargs.items() if key not in _LAYOUT_KEYS}
            moved = func(*tree_map(lambda t: places if t is known[0] else t, args), **own)
            return moved if isinstance(moved, Tensor) else None
        if name == "embedding":  # a row for each, and each has all columns
            return places[:1].expand(out.shape)
        return places.expand(out.shape) if torch.Tag.pointwise in func.tags else None

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
        entered = any(mark.entered for _, mark in marks)
        mixed = live or any(not m.params and t.ndim and t.is_floating_point() for t, m in marks)
        if names and mixed:
            used = self.trace.before if entered else self.trace.after
            used |= names
            if not live:
                self.trace.used_whole |= names
            return _Mark(active=True, made=self._now, entered=entered)
        active = any(mark.active for _, mark in marks)
        return _Mark(params=names, active=active, made=self._now, entered=entered)

    def _write(self, t: Tensor, labels: Tensor | None, origin: _Mark) -> None:
        """What an operator has written into a tensor. Of a view, other tensors would have to know."""
        before = self._mark(t)
        held = before.labels
        if before.view and held is not None and 0 not in held.stride():
            if labels is not None:
                held.copy_(labels)
            elif origin.active or origin.params:  # beside labels that come before or after
                allowed = not origin.params and self._tolerated(origin.made, self._now)
                base = held if held._base is None else held._base
                mark = replace(origin, active=True)
                self.trace.meetings.append(Meeting(base, (1,), mark, self._now, allowed))
            return
        if before.view and labels is not None:
            old = self._live(t)
            if old is None or not torch.equal(old, labels):
                self.trace.classes.kill(labels)
        self._marks[t] = replace(
            before,
            labels=labels,
            active=before.active or origin.active,
            params=origin.params,
            places=None,
            entered=before.entered or origin.entered,
        )


def _sizes(t: Tensor) -> tuple[int, ...]:
    """Its shape, with 1 along the dims along which it is expanded."""
    return tuple(1 if step == 0 else n for n, step in zip(t.shape, t.stride(), strict=True))


def _narrow(labels: Tensor) -> Tensor:
    """With size 1 along the dims along which it is expanded."""
    for dim in range(labels.ndim):
        if labels.stride(dim) == 0 and labels.shape[dim] > 1:
            labels = labels.narrow(dim, 0, 1)
    return labels


def varies(labels: Tensor, dim: int) -> bool:
    """Whether labels change along a dim."""
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
