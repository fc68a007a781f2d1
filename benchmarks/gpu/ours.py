"""The decoder in weft."""

from __future__ import annotations

from typing import Any

from setting import Batch, Setting, Size, fused_adamw
from torch import Tensor

import weft
from weft.core import CompileOptions, emulate_float8
from weft.losses import next_token


class Ours:
    """`step(rows)` is one optimizer step on this rank's rows; returns the loss of all ranks."""

    def __init__(
        self,
        setting: Setting,
        size: Size,
        compile: CompileOptions | Any,
        layout: str | None = None,
        recompute: str = "none",
        offload_activations: bool = False,
        float8: str = "off",
    ):
        model = weft.deferred_init(size.build, 0)
        whole = size.rows(setting.world, setting.device)
        self.plan = weft.plan(
            model,
            layout or f"fsdp{setting.world}",
            batch=size.batch * setting.world,
            loss=next_token,
            precision="bf16",
            recompute=recompute,
            offload_activations=offload_activations,
            float8=float8,
        )
        if setting.small:  # to try the code
            self.plan = emulate_float8(self.plan)
        self.engine = weft.Engine(
            model,
            self.plan,
            optimizer=fused_adamw,
            loss=next_token,
            clip=1.0,
            device=setting.device,
            compile=compile,
        )
        self.rows = self.engine.local({key: value.cpu() for key, value in whole.items()})

    def step(self, rows: Batch | None = None) -> Tensor:
        return self.engine.step(rows or self.rows).loss
