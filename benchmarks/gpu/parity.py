"""Loss and gradients of every layout beside one device on the CPU in float64: small decoders, in
float64 and bf16, compiled and not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from math import inf, isfinite
from typing import Any

import torch
from setting import Batch, Setting
from torch import Tensor, nn

import weft
from weft.core import Refusal, WorkerDied, chunks_of
from weft.engine import local_tensor
from weft.losses import next_token
from weft.models import decoder

STEPS, BATCH, ACCUMULATE, LENGTH, VOCAB = 2, 16, 2, 32, 264
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"kv_heads": 8},
    "experts": {"experts": 8, "balance": 0.0, "hidden": 64},
}
# relative, of the loss and of the norm of a gradient: bf16 has 8 bits, and 8 layers add up to
# 0.006; where rounding sends a token to another expert, to 0.08 (on the CPU). A wrong factor of 2
# gives 0.5 or 1.
BOUNDS: dict[tuple[str, str], tuple[float, float]] = {
    ("dense", "fp64"): (1e-9, 1e-9),
    ("experts", "fp64"): (1e-9, 1e-9),
    ("dense", "bf16"): (1e-3, 0.03),
    ("experts", "bf16"): (1e-3, 0.3),
}
FLOOR = {"fp64": 1e-6, "bf16": 1e-2}  # of all gradients: a smaller one is measured against that


@dataclass(frozen=True)
class Cell:
    model: str
    layout: str
    precision: str
    compiled: bool
    async_tp: bool = False


@dataclass(frozen=True)
class Alone:
    """What one device computes: loss and gradients of each step."""

    losses: list[float]
    gradients: list[dict[str, Tensor]]


def layouts(world: int) -> dict[str, list[str]]:
    """Model -> layouts of all ranks."""
    if world == 1:
        return {"dense": ["dp1", "fsdp1"], "experts": ["dp1"]}
    one = [f"{axis}{world}" for axis in ("dp", "fsdp", "tp", "pp", "cp")]
    dense = [*one, f"fsdp{world}+zero2", f"tp{world}+sequence"]
    experts = [f"ep{world}", f"fsdp{world}+ep"]
    if world % 4 == 0:
        half = world // 2
        dense += [f"dp2.fsdp{half}", f"fsdp{half}.tp2", f"fsdp{half}.tp2+sequence"]
        dense += [f"dp{half}.pp2", f"pp2.tp{half}", f"fsdp{half}.cp2"]
        experts += [f"dp{half}.ep2"]
    if world % 8 == 0:
        dense += ["dp2.pp2.tp2", "fsdp2.cp2.tp2", "pp2.dp2.fsdp2"]
    return {"dense": dense, "experts": experts}


def cells(setting: Setting) -> Iterator[Cell]:
    """Small: everything once, but compiled and bf16 for one layout alone."""
    for model, named in layouts(setting.world).items():
        for layout in named:
            for precision in FLOOR:
                for compiled in (False, True):
                    extra = compiled or precision == "bf16"
                    if not (setting.small and extra and layout != "fsdp2"):
                        yield Cell(model, layout, precision, compiled)
            if layout.endswith("tp2+sequence") or layout == f"tp{setting.world}+sequence":
                for precision in FLOOR:
                    yield Cell(model, layout, precision, True, True)


def build(setting: Setting, model: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    layers = 2 if setting.small else 8
    options = {"vocab": VOCAB, "dim": 64, "layers": layers, "heads": 8, "seq_len": LENGTH}
    return decoder(**options, **MODELS[model]).to(dtype)


def batch_of(step: int) -> Batch:
    """Labels that count unevenly: no two neighbouring rows hold equally many."""
    drawn = torch.Generator().manual_seed(100 + step)
    ids, labels = torch.randint(VOCAB, (2, BATCH, LENGTH), generator=drawn)
    for row in range(BATCH):
        labels[row, LENGTH - row % 5 :] = -100
    return {"input_ids": ids, "labels": labels}


def adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=1e-3)


def alone(setting: Setting, name: str) -> Alone:
    """A plain loop on the CPU."""
    model = build(setting, name, torch.float64)
    optimizer, found = adamw(list(model.named_parameters())), Alone([], [])
    for step in range(STEPS):
        batch = batch_of(step)
        total, weight = next_token(model(batch["input_ids"]), batch)
        (total / weight).backward()
        found.losses.append(float(total.detach() / weight))
        named = model.named_parameters()
        found.gradients.append({n: p.grad.clone() for n, p in named if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    return found


def laid(setting: Setting, cell: Cell, wanted: Alone) -> tuple[float, float, str]:
    """One rank's largest relative errors: of the losses, of gradients, and which one that is."""
    setting.fresh()
    exact = cell.precision == "fp64"
    model = build(setting, cell.model, torch.float64 if exact else torch.float32)
    sample = {key: value[:2] for key, value in batch_of(0).items()}
    plan = weft.plan(
        model,
        cell.layout,
        batch=BATCH,
        accumulate=ACCUMULATE,
        loss=next_token,
        precision=cell.precision,
        sample=sample,
    )
    engine = weft.Engine(
        model,
        plan,
        optimizer=adamw,
        loss=next_token,
        device=setting.device,
        compile=setting.compiled(async_tp=cell.async_tp) if cell.compiled else "off",
    )
    loss_error, gradient_error, worst = 0.0, 0.0, ""
    for step, loss in enumerate(wanted.losses):
        result = engine.step(engine.local(batch_of(step)))
        loss_error = max(loss_error, finite(abs(float(result.loss) - loss) / loss))
        if exact or step == 0:  # in bf16 AdamW's first step has moved the weights apart
            error, name = gradients(engine, wanted.gradients[step], FLOOR[cell.precision])
            if error >= gradient_error:
                gradient_error, worst = error, f"{name} at step {step}"
    if cell.compiled and (engine.compiled is None or not engine.compiled.counts.graphs):
        raise RuntimeError(f"{cell} compiled nothing")
    engine.close()
    return loss_error, gradient_error, worst


def gradients(engine: weft.Engine, wants: dict[str, Tensor], floor: float) -> tuple[float, str]:
    """The largest error of this rank's parts, relative to the norm of the whole gradient."""
    every = sum(float(want.square().sum()) for want in wants.values()) ** 0.5
    errors = [(0.0, "nothing")]
    for name, p in engine.params.items():
        if not engine.updates(name):
            continue
        if p.grad is None or name not in wants:
            errors.append((inf, name))
            continue
        here, squares = local_tensor(p.grad).detach().double().cpu(), 0.0
        for mine, there in chunks_of(engine.segments(name)):
            squares += float((here[mine] - wants[name][there]).square().sum())
        size = max(float(wants[name].norm()), floor * every)
        errors.append((finite(squares**0.5 / size), name))
    return max(errors)


def finite(error: float) -> float:
    return error if isfinite(error) else inf


def measure(setting: Setting) -> list[dict[str, Any]]:
    references = {model: alone(setting, model) for model in MODELS}
    rows = []
    with setting.pool() as pool:
        for cell in cells(setting):
            row: dict[str, Any] = dict(vars(cell))
            try:
                run = partial(pool.run, laid, setting, cell, references[cell.model])
                ranks = run(timeout=300)
            except Refusal as refusal:
                row["refused"] = str(refusal)
            except WorkerDied as problem:
                row["failure"] = str(problem)
            else:
                row["loss"] = max(rank[0] for rank in ranks)
                row["gradient"], row["worst"] = max(rank[1:] for rank in ranks)
            rows.append(row)
            print(row, flush=True)
    return rows


def passed(row: dict[str, Any]) -> bool:
    if "failure" in row:
        return False
    of_loss, of_gradient = BOUNDS[row["model"], row["precision"]]
    return "refused" in row or (row["loss"] < of_loss and row["gradient"] < of_gradient)


def table(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["| model, layout | precision | compiled | loss | gradients | |"]
    lines += ["| --- | --- | --- | ---: | ---: | --- |"]
    for row in rows:
        says = "" if passed(row) else "**failed**"
        figures = "- | -"
        if "loss" in row:
            figures = f"{row['loss']:.0e} | {row['gradient']:.0e}"
        elif "refused" in row:
            says = "refused"
        how = "async_tp" if row["async_tp"] else "yes" if row["compiled"] else "no"
        name = f"{row['model']}, `{row['layout']}`"
        lines.append(f"| {name} | {row['precision']} | {how} | {figures} | {says} |")
    return lines
