"""The constants of an era after steps that were measured: those that a user names, and those of
runs that this machine has trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np

from weft.core import METRICS, ConfigError, Refusal, RunConfig

from .calibrate.kept_runs import kept_runs
from .calibrate.measured_runs import MeasuredRun, predict_steps, read_rows, read_run_folder
from .cost.belief import CALIBRATED, MOVED, PUBLISHED, Belief, ModelError, Move
from .cost.hardware import LOCAL, Cluster, Era, Hardware
from .cost.layout_batch import Array
from .search.query_from_run import era_of

OPTION, KEPT_OPTION = "--measured", "--no-kept-runs"
SAID = 0.02  # of a constant: changes that are less are not worth a word


@dataclass(frozen=True)
class MeasuredConstants:
    """The era as measurements have it; what is believed about factors on its constants; and notes:
    which measurements were used, from where, and what they changed."""

    era: Era
    belief: Belief
    notes: tuple[str, ...]


def measured_constants(
    run: RunConfig, cluster: Cluster, era: str, files: Sequence[str | Path], kept: bool
) -> MeasuredConstants:
    """What is known of an era's constants on a cluster.

    Args:
        run: The run that is planned; CSV rows without a run file are of it.
        cluster: The cluster that is planned for. Steps may be measured on fewer of its devices.
        era: The name of the era.
        files: metrics.jsonl of runs, or CSV files with measured steps.
        kept: Whether to use the runs too that `weft train` has noted on this machine.

    Raises:
        Refusal: A file cannot be used.
    """
    hardware = cluster.hardware
    given = [one for file in files for one in _read(Path(file), run, hardware.kind)]
    own, notes = _kept(hardware, given) if kept else ([], [])
    known = {_setting(one) for one in given}
    runs = [*_merged(given), *_merged([one for one in own if _setting(one) not in known])]
    belief, before = Belief.of(error_of(hardware)), hardware.era(era)
    if not runs:
        return MeasuredConstants(before, belief, tuple(notes))
    plain = era_of(cluster, None, run)

    def era_of_run(one: RunConfig) -> str:
        natural = era_of(cluster, None, one)
        return era if natural == plain else natural

    predict_eras = predict_steps(runs, cluster, era_of_run)

    def predict(move: Move) -> Array:
        return predict_eras(lambda name: move(hardware.era(name)))

    expected = predict(lambda one: one)
    elsewhere = [era_of_run(one.run) != era for one in runs]
    after = belief.learn(predict, [one.step_s for one in runs], elsewhere)
    names = {one.name for one in own}
    for one, seconds in zip(runs, expected, strict=True):
        ours = f", kept by weft train: {KEPT_OPTION} leaves it out" if one.name in names else ""
        took = f"{one.step_s:.4g} s a step, where {seconds:.4g} s were expected"
        notes.append(f"measured: {one.run.layout.axes} took {took} ({one.name}{ours})")
    notes.append(f"so {_changes(after.shift)}")
    return MeasuredConstants(after.move(before), after.settled(), tuple(notes))


def error_of(hardware: Hardware) -> ModelError:
    """How far estimates with this sheet are from what is measured."""
    return CALIBRATED if hardware.name == LOCAL else PUBLISHED


def _read(file: Path, run: RunConfig, device: str) -> list[MeasuredRun]:
    """Raises Refusal."""
    if file.suffix == ".csv":
        return read_rows(file, device, OPTION, run=run)
    folder = file if file.is_dir() else file.parent
    if folder != file and file.name != METRICS:
        fix = f"name the {METRICS} of a run, or a .csv file with the columns layout and step_s"
        raise ConfigError(OPTION, str(file), "is not a file of measured steps", fix)
    return [read_run_folder(folder, device, OPTION)]


def _kept(hardware: Hardware, given: Sequence[MeasuredRun]) -> tuple[list[MeasuredRun], list[str]]:
    """Runs that `weft train` has noted on this machine, but for those `given`; and why others are
    left out."""
    named = {Path(one.file).resolve() for one in given if one.file}
    found, notes = [], []
    for folder in kept_runs(hardware):
        if folder in named:
            continue
        try:
            found.append(read_run_folder(folder, hardware.kind, OPTION))
        except Refusal as error:
            notes.append(f"left out: {folder}, kept by weft train: {error.problem}")
        except Exception as error:  # of the code of another run: this one is planned without it
            notes.append(f"left out: {folder}, kept by weft train: {type(error).__name__}: {error}")
    return found, notes


def _setting(one: MeasuredRun) -> str:
    """What decides how long a step takes: a run that differs in none of it is the same measured
    again."""
    run = one.run
    return repr((run.model, run.precision, run.layout, run.pipeline, run.sync, _priced(run)))


def _priced(run: RunConfig) -> tuple[object, ...]:
    return run.train.batch, run.train.accumulate, run.train.recompute, run.train.compile


def _merged(runs: Sequence[MeasuredRun]) -> list[MeasuredRun]:
    """One of each setting, with the median of its steps."""
    alike: dict[str, list[MeasuredRun]] = {}
    for one in runs:
        alike.setdefault(_setting(one), []).append(one)
    return [
        replace(
            those[0],
            name=", ".join(dict.fromkeys(one.name for one in those)),
            step_s=median(one.step_s for one in those),
        )
        for those in alike.values()
    ]


def _changes(shift: Array) -> str:
    """As in `matmul x 1.12, link x 0.9`."""
    parts = [
        f"{name} x {factor:.2f}"
        for name, factor in zip(MOVED, np.exp(shift), strict=True)
        if abs(factor - 1) > SAID
    ]
    return f"constants moved: {', '.join(parts)}" if parts else "no constant moved"
