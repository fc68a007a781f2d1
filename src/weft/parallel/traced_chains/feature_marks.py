"""What a forward on tensors without elements has shown of each tensor: which labels it has, and
which parameters and activations it is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .feature_labels import LabelClasses, narrow, varies


@dataclass(frozen=True)
class Mark:
    """What is known of a tensor.

    labels: of its shape, mostly expanded; None: it has none.
    params: the parameters that it is made of, if it is made of nothing else.
    places: makes [its shape], of the one parameter that it is made of, the number of each element,
        or None; it is called where that is asked for, as few are. None: not known.
    active: whether it has a gradient, by way of activations.
    made: the module that made it.
    entered: whether it depends on what entered the module that is tried, other than by its row.
    view: whether it may be a view of another.
    uniform: whether all elements are the same number, so that its size is no difference.
    """

    labels: Tensor | None = None
    params: frozenset[str] = frozenset()
    places: Callable[[], Tensor | None] | None = None
    active: bool = False
    made: str = ""
    entered: bool = False
    view: bool = False
    uniform: bool = False


NOTHING = Mark()


@dataclass(frozen=True)
class Meeting:
    """Labels combined with a tensor that has none. shape: of that tensor, right-aligned with the
    labels, with 1 where it does not matter; now: the module where they met; allowed: whether it may
    have a gradient."""

    labels: Tensor
    shape: tuple[int, ...]
    mark: Mark
    now: str
    allowed: bool = True


@dataclass(frozen=True)
class Given:
    """An argument of a module, at its first call."""

    module: str
    name: str
    shape: torch.Size


@dataclass
class FeatureTrace:
    """What a forward has shown.

    rows: linear -> the labels [features] of its input, for each call.
    inner: parameters that are the same for all classes they met -> labels of these.
    parts: parameter -> of each element the class that it met, 0: none.
    before: parameters that made something which depends on what entered; after: the other ones.
    read: parameters that an operator outside of the linears took.
    used_whole: parameters that something without labels was made of.
    seen: labels of everything that has some, and its shape.
    dropped: labels of what dropout was applied to.
    norms: module that normalises all features by the mean of their squares, which ranks may share
        -> the labels of these, in the last call.
    given: a name of its own -> an argument of a module that has no gradient. It is treated as a
        parameter is: `inner`, `parts`, `used_whole` and `Mark.params` know it by this name.
    operators: how many were run.
    unknown: whether one of them combines features in a way that is not known.
    """

    classes: LabelClasses = field(default_factory=LabelClasses)
    rows: dict[str, list[Tensor]] = field(default_factory=dict)
    inner: dict[str, list[Tensor]] = field(default_factory=dict)
    parts: dict[str, Tensor] = field(default_factory=dict)
    before: set[str] = field(default_factory=set)
    after: set[str] = field(default_factory=set)
    read: set[str] = field(default_factory=set)
    used_whole: set[str] = field(default_factory=set)
    meetings: list[Meeting] = field(default_factory=list)
    seen: list[tuple[Tensor, torch.Size]] = field(default_factory=list)
    dropped: list[Tensor] = field(default_factory=list)
    norms: dict[str, Tensor] = field(default_factory=dict)
    given: dict[str, Given] = field(default_factory=dict)
    operators: int = 0
    unknown: bool = False

    def settle(self, shapes: Mapping[str, torch.Size]) -> None:
        """At the end: make one class of those that met a tensor which differs from one to the
        other, unless it is a parameter that can be divided with them.

        Args:
            shapes: of the parameters.
        """
        settled = False
        while not settled:
            settled = True
            self.inner.clear()
            self.parts.clear()
            for met in self.meetings:
                found = self.classes.classes(met.labels)
                if met.mark.active and not met.allowed:
                    self.classes.kill(met.labels)
                dims = [found.ndim - back - 1 for back in range(min(len(met.shape), found.ndim))]
                apart = [d for d in dims if met.shape[d - found.ndim] > 1 and varies(found, d)]
                if not apart:
                    for name in met.mark.params:
                        self.inner.setdefault(name, []).append(found.amax().reshape(1))
                elif not self._divide(met, found, shapes):
                    for dim in apart:
                        self.classes.join_along(self.classes.classes(met.labels), dim)
                    settled = False

    def _divide(self, met: Meeting, found: Tensor, shapes: Mapping[str, torch.Size]) -> bool:
        """Note which class each element of a parameter met. False: one met two, or it is not known
        which elements they are."""
        known = met.mark.places() if met.mark.places is not None else None
        if known is None:
            return False
        (name,) = met.mark.params
        if name not in self.parts:
            self.parts[name] = torch.zeros(shapes[name].numel(), dtype=torch.int64)
        parts = self.parts[name]
        places, classes = torch.broadcast_tensors(narrow(known), found)
        places, classes = places.reshape(-1), classes.reshape(-1)
        places, classes = places[classes != 0], classes[classes != 0]
        before = self.classes.classes(parts[places])
        parts[places] = classes
        return bool(
            ((before == 0) | (before == classes)).all() and (parts[places] == classes).all()
        )
