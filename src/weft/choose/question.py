"""Question: what is to be laid over what. All that a search does not choose."""

from __future__ import annotations

from dataclasses import dataclass

from ..cost.choices import Choices
from ..cost.estimate import Estimate, estimate
from ..cost.hardware import GIB, Cluster, Era
from ..cost.practice import Practice
from ..cost.work import Work
from ..syncs import Sync


@dataclass(frozen=True)
class Question:
    """Lay `work`, `batch` samples a step, over `cluster`, with software of an `era`."""

    work: Work
    batch: int
    cluster: Cluster
    era: Era
    practice: Practice
    sync: Sync | None = None

    @property
    def memory_bytes(self) -> float:
        """Of one device."""
        return self.cluster.hardware.device.memory_gib * GIB

    def price(self, choices: Choices) -> Estimate:
        """What each of these would take."""
        return estimate(self.work, choices, self.cluster, self.era, self.practice, self.sync)
