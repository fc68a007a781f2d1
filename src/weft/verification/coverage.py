"""Which of the things that a run does `weft verify` has checked, and what checks the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.core import (
    OFF,
    REPLICA_AXIS,
    Layout,
    PrecisionConfig,
    RunConfig,
    SyncConfig,
    text_table,
    translate,
)
from weft.parallel import STATE_AXES

from .difference import BOUNDS
from .training_check import TrainingResult, rate_text
from .verified_settings import deep_precision, exact_sync, is_asynchronous

CHECKED, DEEP, NOT = "checked", "with --deep", "not checked"


@dataclass(frozen=True)
class Covered:
    """Something that the run does, and how: CHECKED, DEEP or NOT."""

    how: str
    what: str


def coverage(
    run: RunConfig,
    steps: int,
    precision: PrecisionConfig,
    changed: str,
    trained: Sequence[TrainingResult] = (),
    layouts: Sequence[str] | None = None,
) -> list[Covered]:
    """What verify checks of a run.

    Args:
        run: the run as its user wrote it.
        steps: that were compared.
        precision: that they were compared in.
        changed: how [sync] differs; "" if it does not.
        trained: of training, if that was compared, too.
        layouts: that were verified; None: that of the run.
    """
    t, dtype = run.train, BOUNDS[_name(precision)].precision
    rows = [
        Covered(
            CHECKED, f"loss, gradients, weights, optimizer state, buffers: {steps} steps, {dtype}"
        ),
        Covered(CHECKED, "the samples of each step, and the order of three epochs"),
        Covered(CHECKED, "dropout and random numbers: the same on every layout; their laws"),
    ]
    if run.model.freeze:
        named = ", ".join(run.model.freeze)
        rows.append(Covered(CHECKED, f"frozen, {named}: no gradient, no update, no state"))
    collectives = "collectives: bytes of the first step, kinds and counts of every step"
    if run.workers:
        rows.append(Covered(NOT, "calls between the driver and its workers"))
    else:
        rows.append(Covered(CHECKED, collectives))
    deep, sync = CHECKED if trained else DEEP, run.sync
    if not any(map(_has_replicas, layouts or [str(run.layout.axes)])):
        sync = SyncConfig()
    exact = exact_sync(sync)
    if exact.name != sync.name:
        rows.append(Covered(NOT, "messages between replicas that step independently"))
    happened = {what for result in trained for what in result.happened}
    rows.append(Covered(deep, f"learning rate: {rate_text(run)}"))
    for key, what in (
        ("clip", "clipping, below and above the norm"),
        ("skip", "steps left out by train.skip"),
        ("rollback", "steps taken back by train.rollback"),
    ):
        if getattr(t, key) is not None:
            rows.append(Covered(NOT if trained and key not in happened else deep, what))
    if t.rollback is not None and t.log_every > 1:
        rows.append(Covered(NOT, "train.rollback with train.log_every above 1"))
    if t.ema is not None:
        rows.append(Covered(deep, "averages of weights: train.ema"))
    if t.eval_every:
        measured = "".join(f", {name}" for name in t.eval_metrics)
        rows.append(Covered(deep, f"validation{measured}"))
    if run.checkpoint.keep_best:
        rows.append(Covered(deep, "which checkpoint is the best: checkpoint.keep_best"))
    for key in ("callbacks", "loggers"):
        if named := getattr(t, key):
            names = ", ".join(each if isinstance(each, str) else each["name"] for each in named)
            rows.append(Covered(NOT, f"train.{key}, which verify leaves out: {names}"))
    if is_asynchronous(sync):
        rows.append(Covered(deep, "saving; resuming on the same layout, in its own order"))
        again = f"resuming {sync.name} bit for bit: updates never come in the same order again"
        rows.append(Covered(NOT, again))
        rows.append(Covered(NOT, f"resuming {sync.name} with another number of replicas"))
    elif sync.name != exact.name:
        same = "on the same layout, and on others of as many replicas"
        rows.append(Covered(deep, f"saving; resuming {same}"))
        rows.append(Covered(NOT, f"resuming {sync.name} with another number of replicas"))
    elif run.workers:
        rows.append(Covered(deep, "saving; resuming with [workers], and on one device"))
    else:
        rows.append(Covered(deep, "saving; resuming on the same layout and on others"))
    name = _name(run.precision)
    if name == "float8":
        rows.append(Covered(NOT, "resuming in float8, which needs GPUs"))
    elif deep_precision(run.precision) is not None and not is_asynchronous(sync):
        rows.append(Covered(deep, f"resuming bit for bit in {name}, on the same layout"))
    if name != _name(precision):
        how = f": with --precision {name}" if name in BOUNDS else ""
        rows.append(Covered(NOT, f"rounding in {name}, which the run computes in{how}"))
    if changed:
        rows.append(Covered(NOT, changed))
    elif run.sync != sync:
        by = f"[sync] {run.sync.name}, {run.sync.codec}"
        rows.append(Covered(NOT, f"{by}: no verified layout has ranks that exchange by it"))
    elif sync != exact:
        by = f"[sync] {sync.name}, {sync.codec}"
        rows.append(Covered(CHECKED, f"{by}: by its own definition"))
        rows += _training_with_codec(sync, deep, trained)
    for key in ("async_tp", "offload_activations"):
        if getattr(t, key):
            rows.append(Covered(NOT, f"train.{key}, which needs GPUs"))
    return [*rows, Covered(NOT, "speed and memory")]


def _has_replicas(layout: str) -> bool:
    """Whether ranks exchange gradients or weights by [sync]: data ranks, sharded or not."""
    return Layout.parse(layout).size(REPLICA_AXIS, *STATE_AXES) > 1


def _training_with_codec(
    sync: SyncConfig, deep: str, trained: Sequence[TrainingResult]
) -> list[Covered]:
    """Whether training with a codec is proven, and saving what it keeps."""
    codec = _codec_of(sync)
    if codec == "identity":
        return []
    left_out = [result for result in trained if result.uncoded]
    found = [
        Covered(NOT, f"training with codec {codec} on {each.layout}: {each.uncoded}")
        for each in left_out
    ]
    if trained and len(left_out) == len(trained):
        return found
    what = f"training with codec {codec}; saving and resuming with what it keeps"
    if is_asynchronous(sync):
        what = f"training with codec {codec}; resuming without what it kept, which is not saved"
    return [Covered(deep, what), *found]


def _codec_of(sync: SyncConfig) -> str:
    return sync.codec if isinstance(sync.codec, str) else str(sync.codec.get("name"))


def coverage_text(rows: list[Covered]) -> str:
    """A table, in the language of the locale."""
    hows = {
        CHECKED: translate("checked"),
        DEEP: translate("with --deep"),
        NOT: translate("not checked"),
    }
    lines = [[f"  {hows[row.how]}", translate(row.what)] for row in sorted(rows, key=_order)]
    return "\n".join([translate("what this run does"), *text_table(lines)])


def _order(row: Covered) -> int:
    return (CHECKED, DEEP, NOT).index(row.how)


def _name(precision: PrecisionConfig) -> str:
    return precision.compute if precision.float8 == OFF else "float8"
