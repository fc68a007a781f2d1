"""The work that every framework does: one model, one text with samples of unequal length, and the
log of what a rank did. Nothing of any framework."""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

sys.path.append(str(Path(__file__).parents[1] / "overhead"))
from work import llama

LENGTH, RANKS, MICROBATCH, ACCUMULATE = 256, 2, 4, 2
BATCH = RANKS * MICROBATCH * ACCUMULATE
STEPS = int(os.environ.get("STEPS", "20"))
LR = 1e-3
CHECK = "CHECK" in os.environ  # one step of SGD, whose weights are saved


def build_model(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """transformers' Llama of 6 layers of width 320; the same weights at every call."""
    return llama(LENGTH, dtype)


class Text(Dataset):
    """Windows of a source file of the standard library, padded at the end, each to another length:
    {"input_ids", "labels", "attention_mask"}, int64 [LENGTH] each. Labels of padding are -100."""

    def __init__(self) -> None:
        source = Path(sysconfig.get_path("stdlib"), "_pydecimal.py").read_bytes()
        self.tokens = torch.frombuffer(bytearray(source), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return min(len(self.tokens) // LENGTH, BATCH * STEPS)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = self.tokens[index * LENGTH : (index + 1) * LENGTH].clone()
        real = LENGTH - (index * 37) % (LENGTH // 2)
        ids[real:] = 0
        mask = (torch.arange(LENGTH) < real).long()
        return {
            "input_ids": ids,
            "labels": ids.masked_fill(mask == 0, -100),
            "attention_mask": mask,
        }


def stack(samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    if CHECK:
        return torch.optim.SGD(parameters, lr=1.0)
    return torch.optim.AdamW(parameters, lr=LR)


def log(step: int, loss: float) -> None:
    """One finished optimizer step, of rank 0."""
    with open(os.environ["LOG"], "a") as file:
        file.write(json.dumps({"step": step, "loss": loss, "time": time.time()}) + "\n")


def save(weights: dict[str, Tensor]) -> None:
    torch.save({name.removeprefix("module."): w for name, w in weights.items()}, os.environ["SAVE"])


class Clock:
    """weft's callback."""

    def on_step_end(self, run: Any, result: Any, metrics: Any) -> None:
        if run.rank == 0:
            log(run.step - 1, float(result.loss))

    def on_run_end(self, run: Any) -> None:
        if CHECK and run.rank == 0:
            save(run.engine.model.state_dict())
