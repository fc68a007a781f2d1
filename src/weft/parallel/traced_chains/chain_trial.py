"""A trial of a chain on a copy without elements: does the first rank's part of the module run, and
do the same features meet in it as in the whole?"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from weft._torch.tensors import FakeTensorMode
from weft._torch.trees import tree_leaves
from weft.core import DimShard
from weft.nn import Chain, local_attributes, set_attribute

from ..cut_copy import FAILS, cut_copy
from ..divided_arguments import named_arguments, positional_names, take_part
from ..without_elements import without_elements
from .feature_labels import LabelClasses
from .feature_marks import FeatureTrace
from .feature_mode import FeatureMode
from .followed_forward import Call
from .part_shapes import Shapes, lies_as_in


class ChainTrial:
    """Tries numbers of heads and features on the first rank's part of a module.

    Args:
        model: holds the module, whole.
        chain: what is cut.
        scope: the module that runs.
        call: what it is called with.
        classes: column or row -> the class of each of its features [features].
        shapes: of the tensors in the whole that have these classes.
        together: which of these classes each tensor in the whole has.
        size: how many ranks share it.
        mode: that of the tensors in `call`.
    """

    def __init__(
        self,
        model: nn.Module,
        chain: Chain,
        scope: str,
        call: Call,
        classes: Mapping[str, np.ndarray],
        shapes: Shapes,
        together: Collection[frozenset[int]],
        size: int,
        mode: FakeTensorMode,
    ):
        self._chain, self._scope, self._call, self._size = chain, scope, call, size
        self._classes, self._shapes, self._mode = classes, shapes, mode
        self._part = cut_copy(model.get_submodule(scope), model, (chain,), size, mode)
        self._together = together
        self._held = {n: _kept(chain.cuts[n], 0, size) for n in classes}
        self.operators = 0  # how many were run

    def run(self, attributes: dict[str, tuple[tuple[str, int], ...]]) -> Chain | None:
        """The chain with these attributes, and with all parameters that each rank has whole and
        uses on its part. None: it does not run so, or computes something else."""
        chain, names = replace(self._chain, attributes=attributes), self._names()
        trace = FeatureTrace()

        def labels(name: str, count: int) -> Tensor | None:
            column = names[name]
            if column == chain.row:
                return None
            every = trace.classes.of_column(name, len(self._classes[column]))
            return every[torch.from_numpy(self._held[column])]

        cuts = chain.arguments.get(self._scope, {})
        positional = positional_names(self._part)
        with self._mode:
            args, kwargs = take_part(
                positional, self._call.args, self._call.kwargs, cuts, 0, self._size
            )
        mode = FeatureMode(trace, self._part, [], lambda made, now: True)
        try:
            own = {name: self._part.get_submodule(name) for name in names}
            inside = [_inside(name, self._scope) for name in chain.norms]
            norms = {name: self._part.get_submodule(name) for name in inside}
            with (
                self._numbers(chain),
                without_elements(self._mode),
                mode.around(own, norms, labels),
            ):
                mode.enter(self._call.active)
                mode.marks.give("", named_arguments(positional, args, kwargs))
                output = self._part(*args, **kwargs)
                made = tree_leaves(output, Tensor)
        except FAILS:
            return None
        finally:
            self.operators += trace.operators
        # others may be weights of attention, which nobody reads
        if len(made) != len(self._call.outputs):
            return None
        outputs = [made[place] for place in self._call.read]
        shapes = [self._call.outputs[place].shape for place in self._call.read]
        if [t.shape for t in outputs] != shapes or not self._meets_as_whole(trace):
            return None
        if not all(lies_as_in(self._shapes, shape) for _, shape in trace.seen):
            return None  # a view has taken features of one position for those of others
        classes = trace.classes
        seen = {frozenset(classes.classes(each).unique().tolist()) for each, _ in trace.seen}
        if not all(self._takes_as_whole(classes, seen, rank) for rank in range(self._size)):
            return None
        if chain.entry is None:
            return chain
        if trace.before & trace.after or any(mode.has_entered(t) for t in outputs):
            return None  # gradients of a part of the sum, and of the sum, would be added
        ways = {f"{name}.{key}" for name in self._classes for key in ("weight", "bias")}
        before = [f"{self._scope}.{name}" for name in sorted(trace.before)]
        whole = [name for name in before if name not in chain.parameters and name not in ways]
        return replace(chain, inner=tuple(dict.fromkeys((*chain.inner, *whole))))

    def _meets_as_whole(self, trace: FeatureTrace) -> bool:
        """Whether the classes of the part are those of the whole, one for one."""
        inside = {name: own for own, name in self._names().items()}
        rows = trace.rows.get(inside[self._chain.row])
        if rows is None:
            return False
        here, there = [], []
        for name, held in self._held.items():
            found = rows[0]
            if name != self._chain.row:
                found = trace.classes.of_column(inside[name], 0)[torch.from_numpy(held)]
            here.append(trace.classes.classes(found))
            there.append(self._classes[name][held])
        pairs = set(zip(torch.cat(here).tolist(), np.concatenate(there).tolist(), strict=True))
        local, whole = ({pair[i] for pair in pairs} for i in (0, 1))
        return 0 not in local and len(pairs) == len(local) == len(whole)

    def _takes_as_whole(
        self, classes: LabelClasses, seen: Collection[frozenset[int]], rank: int
    ) -> bool:
        """Whether each tensor has those of a rank's classes that one in the whole has. Not so, say,
        where the first four features are scaled, which no other rank has. `seen`: which classes
        each has, in the part."""
        inside = self._names()  # in the part -> in the model
        ranks: dict[int, int] = {}  # class in the part -> in the whole
        for own, name in inside.items():
            if name == self._chain.row:
                continue
            every = classes.of_column(own, 0)[torch.from_numpy(self._held[name])]
            there = self._classes[name][_kept(self._chain.cuts[name], rank, self._size)]
            if len(there) != len(every):
                continue
            here = classes.classes(every)
            ranks |= dict(zip(here.tolist(), there.tolist(), strict=True))
        mine = frozenset(ranks.values())
        whole = {frozenset(), *(each & mine for each in self._together)}
        return all(frozenset(ranks[c] for c in each if c in ranks) in whole for each in seen)

    def _names(self) -> dict[str, str]:
        """Name of a linear inside of the module -> in the model."""
        return {_inside(name, self._scope): name for name in self._classes}

    @contextmanager
    def _numbers(self, chain: Chain) -> Iterator[None]:
        """In this context, modules of the part have the rank's numbers of heads and features."""
        before = []
        for name, numbers in local_attributes(chain, self._size).items():
            module = self._part.get_submodule(_inside(name, self._scope))
            keys = {*(key for key, _ in numbers), "config"} & {*vars(module)}
            before.append((module, {key: vars(module)[key] for key in keys}))
            for key, value in numbers:
                set_attribute(module, key, value)
        try:
            yield
        finally:
            for module, held in before:
                vars(module).update(held)


def _inside(name: str, scope: str) -> str:
    """The name of a module of the scope in it."""
    return "" if name == scope else name.removeprefix(f"{scope}." if scope else "")


def _kept(cut: DimShard, rank: int, size: int) -> np.ndarray:
    """The features of a rank."""
    return np.concatenate([np.arange(*interval) for interval in cut.intervals(rank, size)])
