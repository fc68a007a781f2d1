"""Where the parts run: one process per GPU over NCCL, or two on the CPU with tiny sizes, which try
the same code."""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.core import CompileOptions
from weft.launch import Pool
from weft.models import decoder
from weft.planner.cost.hardware import Hardware, named_sheet
from weft.planner.predict_run import sheet_of_card

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Size:
    """A decoder, and the samples of `seq_len` tokens that each rank has of a batch."""

    name: str
    vocab: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    seq_len: int
    batch: int

    @property
    def model(self) -> dict[str, Any]:
        """The arguments of weft.models.decoder."""
        return {k: v for k, v in asdict(self).items() if k not in ("name", "batch")}

    def build(self) -> nn.Module:
        return decoder(**self.model)

    def rows(self, ranks: int, device: torch.device) -> Batch:
        """A batch for so many ranks, the same at every call."""
        drawn = torch.Generator().manual_seed(0)
        shape = (self.batch * ranks, self.seq_len + 1)
        ids = torch.randint(self.vocab, shape, generator=drawn).to(device)
        return {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}

    def smaller(self) -> Size | None:
        """What to try where this one has no room: fewer samples, then fewer layers."""
        if self.batch > 1:
            return replace(self, batch=self.batch // 2)
        return replace(self, layers=self.layers * 3 // 4) if self.layers > 1 else None


# the shapes of Llama 3.2 1B, with a head of its own, and of Llama 3 8B
ONE = Size("1B", 128256, 2048, 16, 32, 8, 8192, 4096, 2)
EIGHT = Size("8B", 128256, 4096, 32, 32, 8, 14336, 4096, 2)
TINY = Size("tiny", 256, 64, 2, 4, 2, 128, 32, 2)


@dataclass(frozen=True)
class Setting:
    """What every process has to know."""

    small: bool
    world: int

    @classmethod
    def found(cls, small: bool) -> Setting | None:
        """None: there is no GPU."""
        if small:
            return cls(True, 2)
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return cls(False, count) if count else None

    @property
    def title(self) -> str:
        """The device's name, as its driver has it, and how many."""
        name = "CPU" if self.small else torch.cuda.get_device_name(0)
        return f"{name} x {self.world}"

    @property
    def file(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")

    @property
    def device(self) -> torch.device:
        """Of this process."""
        if self.small:
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    @property
    def sheet(self) -> Hardware | None:
        """The device's peaks; None: weft has no sheet of it."""
        if self.small:
            return named_sheet("h100")  # to try the code
        name = sheet_of_card(torch.cuda.get_device_name(0))
        return named_sheet(name) if name else None

    @property
    def backend(self) -> str:
        """Of torch.compile: the CPU's takes a compiler and minutes."""
        return "aot_eager" if self.small else "inductor"

    def compiled(self, mode: Any = "default", async_tp: bool = False) -> CompileOptions:
        return CompileOptions(mode, self.backend, async_tp)

    def sized(self, size: Size) -> Size:
        return TINY if self.small else size

    def pool(self) -> Pool:
        return Pool(self.world, backend="gloo" if self.small else "nccl")

    def wait(self) -> None:
        """Until the device has done what it was given."""
        if not self.small:
            torch.cuda.synchronize()

    def fresh(self) -> None:
        """Nothing of what ran before in this process stays."""
        torch.compiler.reset()
        gc.collect()
        if not self.small:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def seconds(self, call: Callable[[], Any]) -> float:
        """Of one call on this rank, from when all ranks are ready until its device is done."""
        self.wait()
        dist.barrier()
        began = time.perf_counter()
        call()
        self.wait()
        return time.perf_counter() - began


def fused_adamw(named: Any) -> torch.optim.Optimizer:
    """AdamW with the fused step of torch, for an Engine."""
    return partial(torch.optim.AdamW, lr=1e-4, fused=True)([p for _, p in named])
