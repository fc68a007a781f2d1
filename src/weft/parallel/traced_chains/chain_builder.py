"""Makes chains of linears from what a forward has shown of their features."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from itertools import combinations

import numpy as np
import torch
from torch import Tensor, nn

from weft._torch.tensors import FakeTensorMode
from weft._torch.trees import tree_leaves
from weft.core import DimShard
from weft.nn import Chain, chain_module, is_conv1d, numbers_read

from .chain_trial import ChainTrial
from .feature_labels import varies
from .feature_marks import Meeting
from .followed_forward import Followed, within
from .part_shapes import Shapes

OPERATORS = 100_000  # at most, of the runs of one module


class ChainBuilder:
    """Makes a chain of what a forward has shown, and tries it.

    Args:
        model: holds the linears.
        followed: its forward.
        mode: that of the tensors in it.
        row: the linear that ends the chain.
        columns: the linears before it.
        size: how many ranks share them.
        others: ids of the parameters that have another role.
    """

    def __init__(
        self,
        model: nn.Module,
        followed: Followed,
        mode: FakeTensorMode,
        row: str,
        columns: tuple[str, ...],
        size: int,
        others: Collection[int],
    ):
        self.others = others
        self.model, self.followed, self.mode, self.size = model, followed, mode, size
        order = [name for name, _ in model.named_modules()]
        self.row, self.columns = row, tuple(sorted(columns, key=order.index))
        classes = followed.trace.classes
        vector = classes.classes(followed.trace.rows[row][0])
        self.place = place = {each: i for i, each in enumerate(dict.fromkeys(vector.tolist()))}
        self.count = len(place)
        self.features = {row: np.array([place[label] for label in vector.tolist()])}
        for name in self.columns:
            own = classes.classes(classes.of_column(name, 0)).tolist()
            self.features[name] = np.array([place[label] for label in own])
        self.labels = vector.unique()
        self.shapes = self._shapes()
        self.together = self._together(place)
        self.operators = 0

    def chain(self) -> Chain | None:
        """None: it does not run, or computes something else, on a part."""
        if self.count % self.size:
            return None
        bare = Chain(self.columns, self.row, {}, None, ())
        scope = chain_module(bare)
        while scope not in self.followed.calls:
            if not scope:
                return None
            scope = scope.rpartition(".")[0]
        parameters = self._parameters(scope)
        if parameters is None:
            return None
        inner, divided = parameters
        entry = self._entry(scope)
        if entry is None:
            return None
        heads = self.count if len(self.features[self.row]) > self.count else 0
        norms = tuple(name for name in self.followed.trace.norms if f"{name}.weight" in divided)
        chain = Chain(
            self.columns,
            self.row,
            {},
            entry or None,
            inner,
            heads,
            heads,
            flat=bool(heads),
            norms=norms,
        )
        for groups in range(1, self.count // self.size + 1):
            if self.count % groups or (self.count // groups) % self.size:
                continue
            cuts = self._cuts({**self.features, **divided}, self.count // groups)
            if cuts is None:
                continue
            if not self._drops_well(groups == 1):
                return None
            own = {name: cuts.pop(name) for name in divided}
            arguments = self._arguments(own)
            if arguments is None:
                continue
            tried = replace(chain, cuts=cuts, parameters=own, arguments=arguments)
            call, model = self.followed.calls[scope], self.model
            trial = ChainTrial(
                model,
                tried,
                scope,
                call,
                self.features,
                self.shapes,
                self.together,
                self.size,
                self.mode,
            )
            for attributes in self._attributes(scope):
                if self.operators + trial.operators > OPERATORS:
                    return None
                if (made := trial.run(attributes)) is not None:
                    return _of_needed(trial, made)
            self.operators += trial.operators
        return None

    def _parameters(self, scope: str) -> tuple[tuple[str, ...], dict[str, np.ndarray]] | None:
        """Parameters that are used whole on cut activations, and those that are divided: the class
        of each of their elements. None: one is used otherwise too."""
        trace = self.followed.trace
        inner = [
            name
            for name, labels in trace.inner.items()
            if name not in trace.given
            and bool(torch.isin(trace.classes.classes(torch.cat(labels)), self.labels).any())
        ]
        divided = {}
        for name, found in trace.parts.items():
            classes = trace.classes.classes(found)
            if bool(torch.isin(classes, self.labels).any()):
                if not bool((torch.isin(classes, self.labels) | (classes == 0)).all()):
                    return None
                divided[name] = np.array([self.place.get(each, -1) for each in classes.tolist()])
        for name in (*inner, *divided):
            if (argument := trace.given.get(name)) is not None:
                elsewhere = argument.module != scope
            else:
                taken = id(self.model.get_parameter(name)) in self.others
                elsewhere = taken or not within(name, scope)
            if elsewhere or name in trace.used_whole:
                return None
        return None if {*inner} & {*divided} else (tuple(inner), divided)

    def _entry(self, scope: str) -> str | None:
        """The module in which activations that each rank has whole meet cut ones: its input is
        where ranks part. "": they meet none. None: it cannot be that module."""
        met = [
            meeting
            for meeting in self.followed.trace.meetings
            if meeting.mark.active and bool(torch.isin(self._classes(meeting), self.labels).any())
        ]
        if not met:
            return ""
        call = self.followed.calls[scope]
        first = next(iter(tree_leaves((call.args, call.kwargs), Tensor)), None)
        inside = all(within(m.mark.made, scope) and within(m.now, scope) for m in met)
        alone = len(call.active) == 1 and call.active[0] is first
        return scope if scope and inside and alone else None

    def _classes(self, meeting: Meeting) -> Tensor:
        return self.followed.trace.classes.classes(meeting.labels)

    def _cuts(self, features: Mapping[str, np.ndarray], each: int) -> dict[str, DimShard] | None:
        """How each linear and parameter is divided, where `each` classes in a row are divided among
        all ranks. None: the classes do not lie so.

        Args:
            features: linear -> the class of each feature that is cut; parameter -> of each element.
        """
        cuts = {}
        for name, found in features.items():
            dim, places = 0, found
            if name not in self.features:
                argument = self.followed.trace.given.get(name)
                shape = argument.shape if argument else self.model.get_parameter(name).shape
                dim, places = along(found.reshape(shape))
                if dim < 0:
                    return None
            group = places // each
            ends = np.flatnonzero((np.diff(places) < 0) | (np.diff(group) != 0)) + 1
            parts = np.split(places, ends)
            for part in parts:
                first = part[0] // each * each
                if len(part) % each or not np.array_equal(
                    part, np.repeat(np.arange(first, first + each), len(part) // each)
                ):
                    return None
            if name in self.features:
                out = 1 if is_conv1d(self.model.get_submodule(name)) else 0
                dim = 1 - out if name == self.row else out
            cuts[name] = DimShard(dim, tuple(len(part) for part in parts), (each,) * len(parts))
        return cuts

    def _arguments(self, divided: dict[str, DimShard]) -> dict[str, dict[str, DimShard]] | None:
        """Takes the arguments out of what is divided: module -> its own -> all heads in a row, once
        or for each sample. None: they lie otherwise."""
        found: dict[str, dict[str, DimShard]] = {}
        for name in self.followed.trace.given.keys() & divided.keys():
            cut, argument = divided.pop(name), self.followed.trace.given[name]
            if any(units != self.count for units in cut.units) or len({*cut.parts}) > 1:
                return None
            heads = DimShard(cut.dim, cut.parts[:1], cut.units[:1])
            found.setdefault(argument.module, {})[argument.name] = heads
        return found

    def _attributes(self, scope: str) -> Iterator[dict[str, tuple[tuple[str, int], ...]]]:
        """Numbers of the modules inside that a rank may have a part of: none, all, all but some.
        Sizes along which classes change, those of linears, and of classes, are such numbers."""
        sizes = {len(places) for places in self.features.values()} | self._sizes() | {self.count}
        found = []
        for name, module in self.model.get_submodule(scope).named_modules(prefix=scope):
            if name not in self.features:
                numbers = [(k, v) for k, v in numbers_read(module) if v > 0 and v % self.size == 0]
                found += [(name, key, value) for key, value in numbers if value in sizes]
        yield {}
        for count in range(len(found), 0, -1):
            for chosen in combinations(found, count):
                table: dict[str, list[tuple[str, int]]] = {}
                for name, key, value in chosen:
                    table.setdefault(name, []).append((key, value))
                yield {name: tuple(numbers) for name, numbers in table.items()}

    def _sizes(self) -> set[int]:
        """Of the dims along which these classes change."""
        return {n for shape, apart in self.shapes for n, varied in zip(shape, apart) if varied}

    def _shapes(self) -> Shapes:
        """Of all tensors with these classes."""
        found = set()
        for labels, shape in self.followed.trace.seen:
            classes = self.followed.trace.classes.classes(labels)
            if bool(torch.isin(classes, self.labels).any()):
                apart = tuple(varies(classes, dim) for dim in range(classes.ndim))
                found.add((tuple(shape), apart))
        return found

    def _together(self, place: Mapping[int, int]) -> set[frozenset[int]]:
        """Which of these classes each tensor has."""
        classes = self.followed.trace.classes
        found = (
            classes.classes(labels).unique().tolist() for labels, _ in self.followed.trace.seen
        )
        return {frozenset(place[label] for label in each if label in place) for each in found}

    def _drops_well(self, one_run: bool) -> bool:
        """Whether the masks of dropout can be those of one device: heads before queries and keys,
        or beside samples in dim 0 of 3; features in the last dim.

        Args:
            one_run: whether each rank has neighbouring classes.
        """
        for labels in self.followed.trace.dropped:
            found = self.followed.trace.classes.classes(labels)
            if not bool(torch.isin(found, self.labels).any()):
                continue
            dims = [dim for dim in range(found.ndim) if varies(found, dim)]
            heads = len(self.features[self.row]) > self.count
            want = found.ndim - (3 if heads and found.ndim > 2 else 1)
            if not one_run or dims not in ([], [want], [found.ndim - 1] if found.ndim < 4 else []):
                return False
        return True


def _of_needed(trial: ChainTrial, made: Chain) -> Chain:
    """The chain without the numbers that may stay as they are: they count something else, as the
    taps of a convolution that are as many as heads."""
    for module, number in [(m, n) for m, numbers in made.attributes.items() for n in numbers]:
        fewer = {
            m: tuple(n for n in numbers if (m, n) != (module, number))
            for m, numbers in made.attributes.items()
        }
        fewer = {m: numbers for m, numbers in fewer.items() if numbers}
        made = (trial.run(fewer) if fewer else None) or made
    return made


def along(classes: np.ndarray) -> tuple[int, np.ndarray]:
    """(the dim along which the class of a parameter's elements changes, the classes along it). Dim
    -1: more than one does. -1 is no class."""
    for dim in range(classes.ndim):
        rows = np.moveaxis(classes, dim, 0).reshape(classes.shape[dim], -1)
        most = rows.max(axis=1)
        if ((rows == most[:, None]) | (rows == -1)).all() and (most >= 0).all():
            return dim, most
    return -1, classes
