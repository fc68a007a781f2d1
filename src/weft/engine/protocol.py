"""What trains a model, as the training loop sees it: `Engine`, or `Remote` where modules live
on named workers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from weft.core import LocalShard, Plan, Segment
from weft.parallel import ExpertCommStats, Mesh

from .context_parallel.sequence import ContextParallel
from .expert_load import ExpertLoad
from .microbatch import Batch
from .pipeline.stage_compute import Loss
from .replica_sync.replicas import ReplicaSync


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step gave, over all ranks.

    Attributes:
        loss: 0-dim float64, the mean over `weight` items (tokens, samples).
        weight: 0-dim float64, the number of items that the mean is over.
        grad_norm: global norm of the mean gradient; None where nothing asked for it.
        skipped: the weights did not change: a gradient was not finite (fp16), or its norm was an
            outlier (`Engine`'s `skip`).
        metrics: of an evaluation, what its metrics gave: name -> [2] float64, sum and weight.
    """

    loss: Tensor
    weight: Tensor
    grad_norm: Tensor | None = None
    skipped: bool = False
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


class TrainingEngine(Protocol):
    """One optimizer step after another, and what a checkpoint holds of them."""

    model: nn.Module
    plan: Plan  # of one replica, where replicas step independently
    global_plan: Plan  # of all ranks
    mesh: Mesh
    params: dict[str, nn.Parameter]
    optimizer: torch.optim.Optimizer
    replicas: ReplicaSync
    sequence: ContextParallel
    loads: ExpertLoad
    dispatch: ExpertCommStats
    steps_done: int
    data_rank: int
    data_size: int

    updated_whole: frozenset[str]  # parameters that one rank updates for all with a part of them

    @property
    def loss_scale(self) -> float: ...
    @property
    def waited_s(self) -> float: ...
    @property
    def codec_state_lost(self) -> bool: ...
    def step(self, batch: Batch) -> StepResult: ...
    def evaluate(self, batch: Batch, metrics: Mapping[str, Loss] = ...) -> StepResult: ...
    def forward(self, batch: Batch) -> Any: ...
    def connect(self) -> None: ...
    def gather(self, last: bool = False) -> bool: ...
    def leave(self) -> None: ...
    def close(self) -> None: ...
    def tensors(self, saved: Collection[str] | None = None) -> Iterator[LocalShard]: ...
    def scalars(self) -> dict[str, Any]: ...
    def load_scalars(self, scalars: dict[str, Any]) -> None: ...
    def segments(self, name: str) -> list[list[Segment]]: ...
    def updates(self, name: str) -> bool: ...
    def holds(self, name: str) -> bool: ...
    def now(self) -> tuple[str, int]: ...
