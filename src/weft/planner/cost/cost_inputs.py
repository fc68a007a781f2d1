"""The model, layouts and hardware that all parts of an estimate read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from weft.parallel import (
    DATA_AXES,
    EXPERT_AXES,
    TOKEN_AXES,
)

from .breakdown import CostPart
from .hardware import Cluster, Era
from .layout_batch import Array, LayoutBatch
from .memory import shard_counts, stage_params
from .model_work import Held, ModelWork
from .network import Network, RankGroup, choose_group
from .pipeline_stages import StageShare, recomputed_share, stage_shares
from .precision_policy import PrecisionPolicy

if TYPE_CHECKING:
    from weft.core import Sync


class CostInputs:
    """A model's work on a batch of layouts, on a cluster, under one era of software; `traffic`:
    bytes that a rank of the first stage sends in a step over each axis, filled by what prices
    them."""

    def __init__(
        self,
        work: ModelWork,
        choices: LayoutBatch,
        cluster: Cluster,
        era: Era,
        practice: PrecisionPolicy,
        sync: Sync | None,
    ):
        again, self.again_least = recomputed_share(work, choices)
        self.work, self.choices, self.cluster = work, replace(choices, again=again), cluster
        self.era, self.practice, self.sync = era, practice, sync
        self.network = Network(cluster, era)
        self.traffic: dict[str, Array] = {}
        self.samples = choices.microbatch / choices.sequences

    @cached_property
    def stages(self) -> tuple[StageShare, StageShare, StageShare]:
        return stage_shares(self.work, self.choices)

    @cached_property
    def own_params(self) -> Array:
        """Parameters of the first stage that a rank keeps."""
        return self._own("params")

    @cached_property
    def own_int8(self) -> Array:
        """Of these, those that are int8."""
        return self._own("in_int8")

    @cached_property
    def updated_params(self) -> Array:
        """Parameters that a rank of the first stage updates."""
        return self._own("trained")

    def _own(self, held: Held) -> Array:
        routed, plain = stage_params(self.stages[0], self.work, self.choices, held)
        few, many = shard_counts(self.choices)
        return np.where(many > 1, routed / few + plain / many, routed + plain)

    def expert_group(self) -> RankGroup:
        """The ranks over which experts are spread: those of their own axis; with others, of all
        that have other tokens, the nearest."""
        c, net = self.choices, self.network
        everyone = choose_group(
            c.experts <= c.size(*DATA_AXES), net.group(c, *DATA_AXES), net.group(c, *TOKEN_AXES)
        )
        size = np.maximum(c.experts, 1).astype(float)
        near = RankGroup(size, tuple(np.minimum(size, inside) for inside in everyone.inside))
        own = net.group(c, *EXPERT_AXES)
        return choose_group(c.experts <= own.size, own, near)

    def sent_over(self, axes: Sequence[str], nbytes: Array) -> None:
        """Over several axes together: the first one's."""
        left = nbytes
        for axis in axes:
            here = self.choices.sizes[axis] > 1
            self.sent(axis, np.where(here, left, 0.0))
            left = np.where(here, 0.0, left)

    def sent(self, axis: str, nbytes: Array) -> None:
        self.traffic[axis] = self.traffic.get(axis, 0.0) + nbytes

    def exposed(self, name: str, comm: Array, hides: Array, times: Array | int) -> CostPart:
        """What is sent so many `times`, as far as what `hides` it takes less long."""
        hidden = (
            np.minimum(self.era.hidden * comm, hides)
            if self.practice.overlaps
            else np.zeros(len(comm))
        )
        exposed = times * (comm - hidden + self.era.contention * hidden)
        symbols = {
            "times": times + np.zeros(len(comm)),
            "comm_s": comm,
            "hidden_s": hidden,
            "contention": self.era.contention,
        }
        return CostPart(
            name, exposed, "times x (comm_s - hidden_s + contention x hidden_s)", symbols
        )
