"""Which of the things that a run does `weft verify` has checked, and what checks the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.core import OFF, PrecisionConfig, RunConfig, SyncConfig, text_table, translate

from .difference import BOUNDS
from .training_check import TrainingResult, rate_text
from .verified_settings import deep_precision, deep_sync, exact_sync, is_asynchronous

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
) -> list[Covered]:
    """What verify checks of a run.

    Args:
        run: the run as its user wrote it.
        steps: that were compared.
        precision: that they were compared in.
        changed: how [sync] differs; "" if it does not.
        trained: of training, if that was compared, too.
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
    deep, exact, by_deep = CHECKED if trained else DEEP, exact_sync(run.sync), deep_sync(run.sync)
    if exact.name != run.sync.name:
        rows.append(Covered(NOT, "messages between replicas that step independently"))
    short = _trained_with(run.sync, by_deep)
    happened = {what for result in trained for what in result.happened}
    rows.append(Covered(deep, f"learning rate: {rate_text(run)}{short}"))
    for key, what in (
        ("clip", "clipping, below and above the norm"),
        ("skip", "steps left out by train.skip"),
        ("rollback", "steps taken back by train.rollback"),
    ):
        if getattr(t, key) is not None:
            rows.append(Covered(NOT if trained and key not in happened else deep, what + short))
    if t.ema is not None:
        rows.append(Covered(deep, f"averages of weights: train.ema{short}"))
    if t.eval_every:
        measured = "".join(f", {name}" for name in t.eval_metrics)
        rows.append(Covered(deep, f"validation{measured}{short}"))
    if is_asynchronous(by_deep):
        rows.append(Covered(deep, f"saving; resuming on the same layout, in its own order{short}"))
        again = f"resuming {by_deep.name} bit for bit: updates never come in the same order again"
        rows.append(Covered(NOT, again))
        rows.append(Covered(NOT, f"resuming {by_deep.name} with another number of replicas"))
    elif by_deep.name != exact.name:
        same = "on the same layout, and on others of as many replicas"
        rows.append(Covered(deep, f"saving; resuming {same}{short}"))
        rows.append(Covered(NOT, f"resuming {by_deep.name} with another number of replicas"))
    else:
        rows.append(Covered(deep, f"saving; resuming on the same layout and on others{short}"))
    name = _name(run.precision)
    if name == "float8":
        rows.append(Covered(NOT, "resuming in float8, which needs GPUs"))
    elif deep_precision(run.precision) is not None and not is_asynchronous(by_deep):
        rows.append(Covered(deep, f"resuming bit for bit in {name}, on the same layout{short}"))
    if name != _name(precision):
        how = f": with --precision {name}" if name in BOUNDS else ""
        rows.append(Covered(NOT, f"rounding in {name}, which the run computes in{how}"))
    if changed:
        rows.append(Covered(NOT, changed))
    elif run.sync != exact:
        by = f"[sync] {run.sync.name}, {run.sync.codec}"
        rows.append(Covered(CHECKED, f"{by}: by its own definition"))
        rows += _training_with_codec(run.sync, by_deep, deep, trained)
    for key in ("async_tp", "offload_activations"):
        if getattr(t, key):
            rows.append(Covered(NOT, f"train.{key}, which needs GPUs"))
    return [*rows, Covered(NOT, "speed and memory")]


def _training_with_codec(
    asked: SyncConfig, by_deep: SyncConfig, deep: str, trained: Sequence[TrainingResult]
) -> list[Covered]:
    """Whether training with a codec is proven, and saving what it keeps."""
    codec = _codec_of(asked)
    if codec == "identity":
        return []
    if by_deep.codec != asked.codec:
        return [Covered(NOT, f"training with codec {codec}: --deep trains with identity")]
    left_out = [result for result in trained if result.uncoded]
    found = [
        Covered(NOT, f"training with codec {codec} on {each.layout}: {each.uncoded}")
        for each in left_out
    ]
    if trained and len(left_out) == len(trained):
        return found
    what = f"training with codec {codec}; saving and resuming with what it keeps"
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


def _trained_with(asked: SyncConfig, by_deep: SyncConfig) -> str:
    """What --deep trains with in place of what the run does."""
    if by_deep.name != asked.name:
        return f", with {by_deep.name}"
    return "" if by_deep.codec == asked.codec else f", with codec {by_deep.codec}"


def _name(precision: PrecisionConfig) -> str:
    return precision.compute if precision.float8 == OFF else "float8"
