"""What a search is asked: a model, a batch, a cluster, and what is fixed of the layout. All
that a search does not choose."""

from __future__ import annotations

from dataclasses import dataclass, replace

from weft.core import Sync

from ..cost.belief import Move
from ..cost.estimate import Estimate, estimate, missing_memory
from ..cost.hardware import GIB, Cluster, Era
from ..cost.layout_batch import Array, LayoutBatch
from ..cost.model_work import ModelWork
from ..cost.precision_policy import PrecisionPolicy


@dataclass(frozen=True)
class PlanQuery:
    """Lay `work`, `batch` samples a step, over `cluster`, with software of an `era`."""

    work: ModelWork
    batch: int
    cluster: Cluster
    era: Era
    practice: PrecisionPolicy
    sync: Sync | None = None

    @property
    def memory_bytes(self) -> float:
        """Of one device."""
        return self.cluster.hardware.device.memory_gib * GIB

    def moved(self, move: Move) -> PlanQuery:
        """The same with an era whose constants are moved."""
        return replace(self, era=move(self.era))

    def price(self, choices: LayoutBatch) -> Estimate:
        """What each of these would take."""
        return estimate(self.work, choices, self.cluster, self.era, self.practice, self.sync)

    def missing_memory(self, choices: LayoutBatch) -> Array:
        """By how many bytes each of these does not fit."""
        return missing_memory(self.work, choices, self.cluster, self.era, self.practice, self.sync)
