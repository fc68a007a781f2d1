"""Whether weft itself would run a layout: plans it, as a run would. The last word, after the
rules."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from functools import cached_property

from torch import nn

from weft.core import (
    STAGE_AXIS,
    Layout,
    NeedsData,
    Refusal,
    RunConfig,
)
from weft.nn import block_lists
from weft.train import Dataset, check_sizes, on_own_layout, plan_without_weights

from .query_from_run import run_with_layout
from .ranking import RankedLayout

DEEP = 16  # repeated blocks from which on a layout is tried on fewer
LOADED = 10**9  # parameters at most of a model that is built to be asked about
KEPT = 2  # at each end of a row of equal blocks, which are cut alike


def run_with_row(run: RunConfig, row: RankedLayout) -> RunConfig:
    """The run as this row has it."""
    return run_with_layout(
        run, row.layout, row.accumulate, row.recompute, row.schedule, dict(row.options)
    )


@dataclass
class FeasibilityChecker:
    """Asks weft's planner, on a model without weights."""

    run: RunConfig
    bare: nn.Module
    held: Dataset
    refused: list[tuple[RankedLayout, Refusal]] = field(default_factory=list)

    def first(self, rows: tuple[RankedLayout, ...]) -> RankedLayout | None:
        """The first of these that weft would lay so; those before it are then among `refused`. A
        row is not asked about where an axis of it has been refused by itself."""
        barred: set[str] = set()
        for row in rows:
            parts = row.layout.split(".")
            if barred.intersection(parts):
                continue
            problem = self._refusal(row)
            if problem is None:
                return row
            self.refused.append((row, problem))
            if len(parts) > 1:
                barred |= {part for part in parts if self._check_axis(part) is not None}
        return None

    def check_layout(self, layout: Layout) -> None:
        """Raises Refusal for a layout in which weft would not lay the model, whatever the
        microbatches and stages."""
        problem = self._with_room(layout.without(STAGE_AXIS))
        if problem is not None:
            raise problem

    def _refusal(self, row: RankedLayout) -> Refusal | None:
        there = run_with_row(self.run, row)
        if not row.schedule:
            return self._check_both(there)
        if self._short is not self.bare:
            layout = Layout.parse(row.layout)
            two = Layout(
                tuple((a, 2 if a == STAGE_AXIS else n) for a, n in layout.sizes), layout.options
            )
            options = {**row.options, "chunks": 2} if row.options else {}
            fewer = run_with_layout(
                self.run, str(two), row.accumulate, row.recompute, row.schedule, options
            )
            if self._check_run(fewer, self._short) is None:
                return None
        return self._check_run(there, self.bare)

    def _check_both(self, run: RunConfig) -> Refusal | None:
        """Of a run without stages: first with fewer blocks, which takes less time."""
        if self._short is not self.bare and self._check_run(run, self._short) is None:
            return None
        return self._check_run(run, self.bare)

    @cached_property
    def _short(self) -> nn.Module:
        return shorten_model(self.bare)

    def _check_axis(self, part: str) -> Refusal | None:
        """Of one axis."""
        return None if Layout.parse(part).stage_ranks > 1 else self._with_room(Layout.parse(part))

    def _with_room(self, layout: Layout) -> Refusal | None:
        """With as many samples as there are ranks."""
        train = self.run.train.model_copy(
            update={"batch": layout.world * self.run.train.batch, "accumulate": 1}
        )
        return self._check_both(on_own_layout(self.run.model_copy(update={"train": train}), layout))

    def _check_run(self, run: RunConfig, model: nn.Module) -> Refusal | None:
        """A pipeline of a model that would have to be loaded, and is large, is asked about without
        its stages."""
        load = sum(p.numel() for p in model.parameters()) <= LOADED
        try:
            check_sizes(model, self.held, [plan_without_weights(run, model, self.held, load)])
        except NeedsData:
            return self._check_run(on_own_layout(run, run.layout.axes.without(STAGE_AXIS)), model)
        except Refusal as problem:
            return problem
        return None


def shorten_model(model: nn.Module) -> nn.Module:
    """The same model with KEPT blocks at each end of every row of equal blocks; itself where none
    is longer than DEEP. The model is not changed, and shares its modules."""
    rows = block_lists(model)
    if not any(len(blocks) > DEEP for blocks in rows):
        return model
    made = _shallow_copy(model)
    for blocks in rows:
        owner, _, leaf = blocks[0].rpartition(".")[0].rpartition(".")
        parent = made
        for name in filter(None, owner.split(".")):
            parent._modules[name] = parent = _shallow_copy(parent._modules[name])
        kept = _representative([model.get_submodule(block) for block in blocks])
        whole = parent._modules[leaf]
        parent._modules[leaf] = (
            nn.Sequential(*kept) if isinstance(whole, nn.Sequential) else nn.ModuleList(kept)
        )
    return made


def _shallow_copy(module: nn.Module | None) -> nn.Module:
    """A copy of one module that shares all that is below it."""
    assert module is not None
    made = copy.copy(module)
    made._modules = dict(module._modules)
    return made


def _representative(blocks: list[nn.Module]) -> list[nn.Module]:
    """Of each row of blocks with the same shapes, those at the ends."""
    shapes = [[(name, tuple(p.shape)) for name, p in block.named_parameters()] for block in blocks]
    kept = []
    for place, block in enumerate(blocks):
        before = [shapes[i] == shapes[place] for i in range(max(0, place - KEPT), place)]
        after = [
            shapes[i] == shapes[place] for i in range(place + 1, min(len(blocks), place + KEPT + 1))
        ]
        if not (len(before) == len(after) == KEPT and all(before) and all(after)):
            kept.append(block)
    return kept
