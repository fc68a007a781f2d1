"""What `weft calibrate` prints: progress, then what it measured or fitted."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.filesize import decimal

from weft.core import dump_toml, text_table, translate
from weft.launch import rate_text

from ..cost.hardware import GIB, Cluster, Hardware
from ..search.query_from_run import era_of
from . import fit_runs, measure
from .sheet import ERA, Measurements


def report_calibrate(out: Path | None, as_json: bool) -> None:
    """Measure, write the sheet, and print what was found. Raises Refusal, WorkerDied."""
    console = Console(stderr=True)
    with _telling(console) as say:
        path, seen, made = measure.calibrate(out, say)
    if as_json:
        print(
            json.dumps(
                {"out": str(path), "sheet": made.model_dump(mode="json"), "measured": asdict(seen)}
            )
        )
        return
    found = measurement_rows(seen, made) | {"sheet": str(path)}
    rows = [[translate(name), translate(value)] for name, value in found.items()]
    print("\n".join(text_table(rows)))


def report_fit(runs: Path, cluster: str, era: str | None, out: Path | None, as_json: bool) -> None:
    """Fit an era's constants to measured runs, print them with their errors, and write the sheet.

    Args:
        runs: CSV file of measured runs.
        cluster: hardware sheet and number of devices, as in h100x64.
        era: name of the era; default: weft's own.
        out: where to write the sheet; None: nowhere.
        as_json: print one JSON object.

    Raises:
        Refusal: a row or a sheet that cannot be used.
    """
    path = None if out is None else measure.sheet_path(out)
    at = Cluster.parse(cluster)
    name = era_of(at, era)
    found = fit_runs.fit_runs_to_era(
        fit_runs.read_runs(runs, at.hardware.kind), at, at.hardware.era(name)
    )
    if path is not None:
        measure.put_sheet(
            path,
            dump_toml(
                at.hardware.model_copy(update={"eras": {**at.hardware.eras, name: found.era}})
            ),
        )
    if as_json:
        errors = {
            source: {"fitted": train, "held_out": held}
            for source, (train, held) in found.errors.items()
        }
        said = {
            "out": path and str(path),
            "era": name,
            "constants": found.era.model_dump(),
            "errors": errors,
        }
        print(json.dumps(said))
        return
    rows = map(translate, fit_runs.error_rows(found.errors))
    print("\n".join([*rows, "", f"[eras.{name}]", dump_toml(found.era).strip()]))


@contextmanager
def _telling(console: Console) -> Iterator[Callable[[str], None]]:
    """One line that changes in a terminal, and else one for each part."""
    if console.is_terminal:
        with console.status(translate("measuring")) as line:
            yield lambda name: line.update(translate(f"measuring {name}"))
    else:
        yield lambda name: console.print(
            translate(f"measuring {name}"), markup=False, highlight=False
        )


def measurement_rows(seen: Measurements, made: Hardware) -> dict[str, str]:
    """Name -> what was found, in words."""
    machine, era, peaks, tier = seen.machine, made.eras[ERA], made.device.flops, made.tiers[0]
    found = {"device": f"{made.title}; {made.notes}"}
    found["matrices"] = ", ".join(
        f"{dtype} {era.matmul * peak / 1e9:.3g} GFLOP/s" for dtype, peak in peaks.items()
    )
    found["matrices"] += f"; half of that where one has {era.matmul_flops / 1e6:.2g} MFLOP"
    found["memory"] = (
        f"{rate_text(made.device.memory_bps)}, and operations reach {era.memory:.0%} of it"
    )
    found["launch"] = f"{era.launch_s * 1e6:.3g} us for each operation"
    if machine.ranks > 1:
        found["link"] = f"{rate_text(tier.bps)}, {tier.latency_s * 1e6:.3g} us a hop"
        found["link"] += f"; beside compute a sum costs {era.contention:.0%} of its time"
        found["link"] += (
            f"; beside compute ranks lose {era.meet_s * 1e3:.3g} ms at each" if era.meet_s else ""
        )
    found["step"] = f"{era.fixed_s * 1e3:.3g} ms for a model of no size"
    found["process"] = f"{decimal(int(era.context_gib * GIB))} before it has any tensor"
    if seen.others > measure.QUIET:
        found["note"] = (
            f"other programs used up to {seen.others:.0%} of the processors: measure again when"
            " they are idle"
        )
    return found
