"""Follows the output features of linears through a forward on tensors without elements: which of
them meet before the next linear.

Each output feature of a column has a label (`feature_labels.py`). What an operator combines, by a
sum over features or a product of two, is one class from there on: a head of an attention, a hidden
feature of a feed-forward. A linear that takes features of several classes is a row: the columns
before it can be divided by these classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from weft._torch.modes import TorchDispatchMode, without_dispatch_modes
from weft._torch.trees import tree_leaves
from weft.pipeline import run_op_without_data

from .feature_labels import narrow, varies
from .feature_marks import NOTHING, FeatureTrace, Mark, Meeting
from .feature_rules import MOVES, NEW, FeatureRules, moved_places, sizes
from .tensor_marks import TensorMarks

ELEMENTS = 10_000_000  # labels to look at between two linears; what takes more is left whole


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
        self.marks = TensorMarks(model, trace)
        self._readers: Any = WeakTensorKeyDictionary()  # tensor -> modules whose operators took it
        self._linear = 0  # depth of linears that run, and of norms that are passed over
        self._norms: Mapping[str, Any] = {}
        self._normed = set[str]()  # norms that are passed over now
        self._looked_at = 0  # labels, since the last linear
        self._rules = FeatureRules(
            trace.classes, self._meet, lambda t: bool(self.marks.of_parameters(t))
        )

    # ---- linears ----

    @contextmanager
    def around(
        self,
        linears: Mapping[str, nn.Module],
        norms: Mapping[str, nn.Module],
        labels: Callable[[str, int], Tensor | None],
    ) -> Iterator[None]:
        """This mode, in which outputs of these linears have new labels, and their inputs are
        taken down.

        Args:
            norms: of features, by the mean of their squares.
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
        self._norms = norms
        for name, module in norms.items():
            handles.append(
                module.register_forward_pre_hook(lambda _, args, n=name: self._begin_norm(n, args))
            )
            handles.append(
                module.register_forward_hook(
                    lambda _, args, out, n=name: self._end_norm(n, args[0], out)
                )
            )
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()
            with without_dispatch_modes():
                given = {name: each.shape for name, each in self.trace.given.items()}
                self.trace.settle({**self.marks.sizes, **given})

    def enter(self, tensors: Iterable[Tensor]) -> None:
        """Mark these as what enters the module that is tried."""
        for t in tensors:
            self.marks[t] = Mark(active=True, entered=True)

    def has_entered(self, t: Tensor) -> bool:
        """Whether a tensor depends on what entered, other than by a row."""
        return self.marks[t].entered

    def readers(self, t: Tensor) -> set[str]:
        """The modules whose operators took a tensor."""
        return self._readers.get(t, set())

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
        self._looked_at = 0
        with without_dispatch_modes():
            found = self._live(args[0]) if args else None
            new, entered = None, False
            if found is None:
                taken = self.marks[args[0]] if args else NOTHING
                self.trace.used_whole |= taken.params
                entered = taken.entered
                used = self.trace.before if entered else self.trace.after
                used |= {f"{name}.weight", f"{name}.bias"} & {*self.marks.sizes}
                features = labels(name, out.shape[-1])
                new = None if features is None else features.expand(out.shape)
            else:
                vector = narrow(found, range(found.ndim - 1)).reshape(-1, found.shape[-1])
                if bool((vector != vector[:1]).any()) or bool((vector[0] == 0).any()):
                    self.trace.classes.kill(found)
                self.trace.rows.setdefault(name, []).append(vector[0].clone())
            self.marks[out] = Mark(new, active=True, made=self._now, entered=entered)

    # ---- norms ----

    def _begin_norm(self, name: str, args: tuple[Any, ...]) -> None:
        """Pass over its operators if what it normalises is all features."""
        with without_dispatch_modes():
            found = self._live(args[0]) if args and self._linear == 0 else None
            if found is not None and _lies_along(found):
                self.trace.norms[name] = found
                self._normed.add(name)
                self._linear += 1

    def _end_norm(self, name: str, x: Tensor, out: Tensor) -> None:
        if name not in self._normed:
            return
        self._normed.discard(name)
        self._linear -= 1
        with without_dispatch_modes():
            labels, weight = self.trace.norms[name], self._norms[name].weight
            self._meet(weight, labels)
            origin = self.marks.origin([x, weight], True, False, self._now)
            self.trace.seen.append((narrow(labels), labels.shape))
            self.marks[out] = replace(origin, labels=labels)

    @property
    def _now(self) -> str:
        return self._inside[-1] if self._inside else ""

    # ---- operators ----

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = run_op_without_data(func, args, kwargs)
        self.trace.operators += 1
        for t in tree_leaves((args, kwargs), Tensor):
            self._readers.setdefault(t, set()).add(self._now)
        if self._linear == 0:
            with without_dispatch_modes():
                self._follow(func, args, kwargs, out)
        return out

    def _follow(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        name = func._overloadpacket.__name__
        given = tree_leaves((args, kwargs), Tensor)
        made = tree_leaves(out, Tensor)
        read = [] if name in NEW else given
        live = {id(t): labels for t in read if (labels := self._live(t)) is not None}
        pointwise = torch.Tag.pointwise in func.tags
        origin = self.marks.origin(given, bool(live), pointwise, self._now)
        moved = name in MOVES
        found = self._moved_alone(func, name, args, kwargs) if moved else None
        if live and made and found is None:
            if self._looked_at < ELEMENTS:
                found = self._rules.labels(func, name, args, kwargs, live, made)
            if found is None:
                self.trace.unknown = True
                for labels in live.values():
                    self.trace.classes.kill(labels)
                origin = replace(origin, active=True)
        elif origin.params and made and not live:
            known = [t for t in given if t.ndim and self.marks[t].params & origin.params]
            if len(known) == 1 and (places := self.marks[known[0]].places) is not None:
                moved_to = partial(
                    moved_places, places, known[0], func, name, args, kwargs, made[0].shape
                )
                origin = replace(origin, places=moved_to)
        if not live:
            origin = replace(origin, uniform=self._is_uniform(func, name, read))
        for i, t in enumerate(made):
            labels = found[i] if found is not None and i < len(found) else None
            if name in NEW and t.ndim > 1 and t.is_floating_point():
                labels = torch.zeros(t.shape, dtype=torch.int64)  # others write into it
            if labels is not None and live:
                self.trace.seen.append((narrow(labels), labels.shape))
                if name in ("bernoulli_", "bernoulli", "native_dropout"):
                    self.trace.dropped.append(labels)
            if any(t is other for other in given):
                self._write(t, labels, origin)
            elif t.is_floating_point() or t.is_complex():
                self.marks[t] = replace(origin, labels=labels, view=moved)
            else:  # no gradient goes through it
                bare = replace(origin, active=False, entered=False)
                self.marks[t] = replace(bare, labels=labels, view=moved)

    def _moved_alone(self, func: Any, name: str, args: Any, kwargs: Any) -> list[Tensor] | None:
        """The labels of one tensor, moved by the operator itself: views of them where it makes
        views, so that what is written into one is in all."""
        first = args[0] if args else None
        labels = self.marks[first].labels if isinstance(first, Tensor) else None
        if labels is None or len(tree_leaves((args, kwargs), Tensor)) > 1:
            return None
        if name in ("view", "_unsafe_view"):
            return [_reshaped(labels, args[1])]
        if name == "constant_pad_nd":  # what it fills with has no label
            args = args[:2]
        return tree_leaves(func(labels, *args[1:]), Tensor)

    def _is_uniform(self, func: Any, name: str, given: list[Tensor]) -> bool:
        if name in NEW and not name.endswith(("empty", "empty_strided")):
            return True
        moved = name in MOVES or name == "_to_copy" or torch.Tag.pointwise in func.tags
        return bool(given) and moved and all(self.marks[t].uniform or not t.ndim for t in given)

    def _meet(self, other: Tensor, labels: Tensor, shape: tuple[int, ...] | None = None) -> None:
        """A tensor without labels combines with labels. It must be the same for all classes
        (`settle`), and have no gradient, of which each rank would know a part, unless it is a
        parameter's."""
        mark = self.marks[other]
        shown = sizes(other) if shape is None else shape
        if mark.uniform:
            shown = ()
        if shape is not None:
            mark = replace(mark, places=None)
        allowed = self._tolerated(mark.made, self._now)
        self.trace.meetings.append(Meeting(labels, shown, mark, self._now, allowed))
        if mark.active and not allowed:
            self.trace.classes.kill(labels)

    # ---- marks ----

    def _live(self, t: Tensor) -> Tensor | None:
        """Its labels, as classes. None: it has none, or all are dead."""
        if (labels := self.marks[t].labels) is None:
            return None
        small = self.trace.classes.classes(narrow(labels))
        self._looked_at += small.numel()
        return small.expand(t.shape) if bool(small.any()) else None

    def _write(self, t: Tensor, labels: Tensor | None, origin: Mark) -> None:
        """What an operator has written into a tensor, of which others may be views."""
        before = self.marks[t]
        held = before.labels
        if before.view and held is not None and 0 not in held.stride():
            if labels is not None:
                held.copy_(labels)
            elif origin.active or origin.params:  # beside labels that come before or after
                allowed = not origin.params and self._tolerated(origin.made, self._now)
                count = held.untyped_storage().nbytes() // held.itemsize
                base = held.as_strided((count,), (1,), 0)
                mark = replace(origin, active=True)
                self.trace.meetings.append(Meeting(base, (1,), mark, self._now, allowed))
            return
        if before.view and labels is not None:
            old = self._live(t)
            if old is None or not torch.equal(old, labels):
                self.trace.classes.kill(labels)
        self.marks[t] = replace(
            before,
            labels=labels,
            active=before.active or origin.active,
            params=origin.params,
            places=None,
            entered=before.entered or origin.entered,
        )


def _reshaped(labels: Tensor, shape: Sequence[int]) -> Tensor:
    """Labels of another shape, still expanded along the first dims, as far as these stay."""
    made = list(torch.empty(labels.shape, device="meta").view(shape).shape)
    kept = 0
    while kept < min(labels.ndim, len(made)) and labels.shape[kept] == made[kept]:
        kept += 1
    small = narrow(labels, range(kept))
    return small.reshape([*small.shape[:kept], *made[kept:]]).expand(made)


def _lies_along(labels: Tensor) -> bool:
    """Whether labels change along the last dim, and along no other: it counts all features."""
    return [d for d in range(labels.ndim) if varies(labels, d)] == [labels.ndim - 1]
