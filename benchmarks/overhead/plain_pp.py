"""Pipeline parallelism by hand: stages and the schedule 1F1B of torch.distributed.pipelining."""

from __future__ import annotations

import torch
import torch.distributed as dist
from plain_single import mean_loss
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from work import MakeOptimizer, compile_blocks, decoder_file

MICROBATCHES = 4
rotary_table = decoder_file().rotary_table


class Part(nn.Module):
    """What one rank has of weft's plain decoder: the embedding and the first half of the blocks, or
    the other half and the head."""

    def __init__(self, model: nn.Module, rank: int, ranks: int):
        super().__init__()
        each = len(model.blocks) // ranks
        self.head_dim, self.rope_base = model.head_dim, model.rope_base
        self.embedding = model.embedding if rank == 0 else nn.Identity()
        self.blocks = model.blocks[each * rank : each * (rank + 1)]
        last = rank == ranks - 1
        self.norm, self.head = (model.norm, model.head) if last else (nn.Identity(), nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        rotary = rotary_table(x.size(1), self.head_dim, self.rope_base, x)
        for block in self.blocks:
            x = block(x, rotary)
        return self.head(self.norm(x))


class Trainer:
    """`step` takes the whole batch, on every rank; returns its mean loss, 0-dim."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: MakeOptimizer,
        clip: float | None,
        compiled: bool = False,
    ):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.first, self.last, self.clip = rank == 0, rank == ranks - 1, clip
        self.part = Part(model, rank, ranks)
        if compiled:
            compile_blocks(self.part)
        stage = PipelineStage(self.part, rank, ranks, torch.device("cpu"))
        loss = torch.compile(mean_loss) if compiled else mean_loss
        self.schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss)
        self.optimizer = optimizer(self.part.parameters())

    def step(self, batch: dict[str, Tensor]) -> Tensor:
        losses: list[Tensor] = []
        inputs = (batch["input_ids"],) if self.first else ()
        if self.last:
            self.schedule.step(*inputs, target=batch["labels"], losses=losses, return_outputs=False)
        else:
            self.schedule.step(*inputs, return_outputs=False)
        if self.clip is not None:
            self._clip(self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        mean = torch.stack(losses).detach().mean() if losses else torch.zeros(())
        mean = mean.to(next(self.part.parameters()).dtype)
        dist.broadcast(mean, dist.get_world_size() - 1)
        return mean

    def _clip(self, clip: float) -> None:
        """By the norm of the whole model's gradient."""
        gradients = [p.grad for p in self.part.parameters() if p.grad is not None]
        square = nn.utils.get_total_norm(gradients) ** 2
        dist.all_reduce(square)
        nn.utils.clip_grads_with_norm_(self.part.parameters(), clip, square.sqrt())
