"""The same decoder by hand, after torchtitan's recipe: every block compiled, FSDP2 around it with
bf16 weights and float32 sums, the loss compiled, fused AdamW, clipping."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from setting import Batch, Setting, Size
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def fill(model: nn.Module) -> None:
    """Weights as weft.models.decoder draws them, but of another stream of numbers; each rank its
    shards."""
    torch.manual_seed(dist.get_rank())
    branch = 0.02 / (2 * len(model.blocks)) ** 0.5
    for name, p in model.named_parameters():
        local = p.detach().to_local() if isinstance(p, DTensor) else p.detach()
        if p.dim() == 1:
            local.fill_(1.0)
        else:
            narrow = name.endswith(("attention.wo.weight", "down.weight"))
            local.normal_(std=branch if narrow else 0.02)


class Plain:
    """`step(rows)` is one optimizer step on this rank's rows; returns the loss of all ranks."""

    def __init__(self, setting: Setting, size: Size, compiled: bool = True):
        with torch.device("meta"):
            self.model = model = size.build()
        mesh = init_device_mesh(setting.device.type, (setting.world,))
        # rotary tables stay in float32
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        self.loss = mean_loss
        if compiled:
            self.loss = torch.compile(mean_loss, backend=setting.backend)
            for block in model.blocks:
                block.compile(backend=setting.backend, fullgraph=True)
        fully_shard(model.embedding, mesh=mesh, mp_policy=policy)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        # gathered for backward already
        last = [model.norm, model.head]
        fully_shard(last, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        model.to_empty(device=setting.device)
        fill(model)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(self, rows: Batch) -> Tensor:
        loss = self.loss(self.model(rows["input_ids"]), rows["labels"])
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        return mean
