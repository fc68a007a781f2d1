"""A training step in plain torch: on one device, or on a wrapped model whose wrapper averages
gradients over ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from work import MakeOptimizer


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Trainer:
    """`step(rows)` is one optimizer step on this rank's rows of the batch; returns the global
    batch's mean loss, 0-dim.

    `ranks` share the batch. Each has as many tokens, so the mean of their means, which is what DDP
    and FSDP2 take, is the mean over the global batch. `compiled`: whether the loss is, by
    torch.compile.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: MakeOptimizer,
        clip: float | None,
        ranks: int = 1,
        compiled: bool = False,
    ):
        self.model, self.clip, self.ranks = model, clip, ranks
        self.loss = torch.compile(mean_loss) if compiled else mean_loss
        self.optimizer = optimizer(self.model.parameters())

    def step(self, rows: dict[str, Tensor]) -> Tensor:
        output = self.model(input_ids=rows["input_ids"])
        loss = self.loss(getattr(output, "logits", output), rows["labels"])
        loss.backward()
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        mean = loss.detach()
        if self.ranks > 1:
            mean /= self.ranks
            dist.all_reduce(mean)
        return mean
