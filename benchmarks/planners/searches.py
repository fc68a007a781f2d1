"""Searches: the layouts that other searches picked, beside weft's pick of the same space.

Calculon's search is run here. Alpa's and Galvatron's picks are those that their repositories ship
(picks.csv). Every price is what a cost model says, and no measurement, but for the column that says
so.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import rows as published
from cells import Row
from peers import NO_LIMIT_S, asked, checkout_of
from runs import Run, of_row

from weft.planner.cost.hardware import Era
from weft.planner.search.candidates import Candidates, find_candidates, join_candidates
from weft.planner.search.layout_pattern import LayoutPattern
from weft.planner.search.query import PlanQuery
from weft.planner.search.ranking import RankedLayout, price, rank, rows_of, simulate_rows

HERE = Path(__file__).resolve().parent
CLOSELY = 12  # layouts of a space that are simulated
# what Calculon's search is given: its model, and the published run whose devices and batch it has
CALCULON = {
    "korthikanti2022_table5-0002": "megatron-22B",
    "korthikanti2022_table5-0004": "gpt3-175B",
    "korthikanti2022_table5-0006": "turing-530B",
    "mlm_sc21_table1-0009": "turing-530B",
}
SYSTEM = "a100_80g"
CALCULON_FILES = f"calculon-ai/calculon, systems/{SYSTEM}.json and models"
AGAIN = {"full": "full", "attn_only": "selective(core attention)", "none": "none"}


@dataclass(frozen=True)
class Space:
    """What a search chooses from, as weft has it. `levels` of ZeRO; `recompute`: shares of blocks
    that run again; `selective`: whether attention's core alone may; `even`: whether all stages have
    as many blocks."""

    schedules: tuple[str, ...]
    levels: tuple[int, ...]
    recompute: tuple[float, ...] = (0.0, 1.0)
    selective: bool = False
    even: bool = False


SPACES = {
    "Calculon": Space(("1f1b", "interleaved"), (1,), selective=True, even=True),
    "Alpa": Space(("1f1b",), (1,), recompute=(1.0,)),  # its suite recomputes all
    "Galvatron": Space(("1f1b",), (2, 3), recompute=(0.0, 1 / 3, 1 / 2, 1.0)),
}


# ---- weft's side ---------------------------------------------------------------------------------


def question(row: Row) -> tuple[PlanQuery, Candidates]:
    """What is asked of weft, and the layout of the row. Raises Uncovered."""
    case = published.case(row)
    group = published.grouped([case])[0]
    setting = group.setting
    sheet = setting.cluster.hardware
    own = sheet.eras.get(setting.era) or Era()
    era = published.sites().get((sheet.name, setting.era)) or own
    choices = group.choices
    if again := row.get("blocks_again"):
        choices = replace(choices, again=np.array([float(again) / setting.dims.layers]))
    asks = PlanQuery(group.model, case.batch, setting.cluster, era, setting.practice)
    return asks, Candidates(choices, np.zeros(1, dtype=np.int64))


def priced(row: Row) -> RankedLayout:
    """What weft says of the layout of a row, pipelines simulated as a search does."""
    asks, layout = question(row)
    return simulate_rows(asks, rows_of(asks, layout))[0]


def best_of(space: Space, asks: PlanQuery) -> RankedLayout:
    """weft's pick of a space: the fastest that fits, of those nearest to it simulated."""
    devices = asks.cluster.devices
    patterns = [
        LayoutPattern.parse(f"pp*+{name}.{data}.tp*")
        for name in space.schedules
        for data in ("dp*", "fsdp*")
    ]
    found = join_candidates([find_candidates(asks, devices, pattern) for pattern in patterns])
    if devices > 1:
        flat = [LayoutPattern.parse(f"{data}.tp*") for data in ("dp*", "fsdp*")]
        found = join_candidates([found, *(find_candidates(asks, devices, one) for one in flat)])
    c = found.choices
    allowed = np.isin(c.again, space.recompute) & (space.selective | ~c.selective)
    allowed &= (c.state_ranks == 1) | np.isin(c.zero, space.levels)
    allowed &= ~np.array(space.even) | (asks.work.depth % (c.stage_ranks * c.chunks) == 0)
    found = found.take(allowed)
    prices = price(asks, found)
    step_s = np.where(prices.over_bytes <= 0, prices.step_s, np.inf)
    nearest = np.argsort(step_s, kind="stable")[:CLOSELY]
    rows = simulate_rows(asks, rows_of(asks, found.take(nearest)))
    return min((row for row in rows if row.fits), key=lambda row: row.step_s)


def row_of(like: Row, chosen: RankedLayout) -> Row:
    """The row with this layout, as published runs are written."""
    c = chosen.chosen.choices
    sharded, schedule = int(c.state_ranks[0]) > 1, chosen.schedule or "1f1b"
    cells = {
        "row_id": f"weft of {like['row_id']}",
        "tp": int(c.feature_ranks[0]),
        "pp": int(c.stage_ranks[0]),
        "vp": int(c.chunks[0]),
        "dp": int(c.replicas[0] * c.state_ranks[0]),
        "zero_stage": int(c.zero[0]) if sharded else 0,
        "sp": "Y" if c.sequence[0] else "N",
        "schedule": "interleaved-1F1B" if schedule == "interleaved" else "1F1B",
        "mbs": chosen.microbatch,
        "recompute": "selective(core attention)" if c.selective[0] else _share(c.again[0]),
        "blocks_again": float(c.again[0]) * int(like["layers"]) if 0 < c.again[0] < 1 else "",
        "d_iter_time_s": "",
    }
    return like | {name: str(value) for name, value in cells.items()}


def _share(again: float) -> str:
    return "full" if again == 1 else "none"


# ---- Calculon's search ---------------------------------------------------------------------------


def optimal(folder: Path, model: str, row: Row) -> dict[str, Any]:
    """What Calculon's search finds, its best execution and statistics. It takes minutes, so what it
    wrote is kept in `folder`/searches."""
    checkout, (n, batch) = checkout_of("calculon", folder), (row["n_accel"], row["gbs"])
    out = folder.resolve() / "searches" / f"{model}-{n}-{batch}.json"
    if not out.exists():
        out.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory() as scratch:
            system = Path(scratch, "system.json")
            config = json.loads((checkout / f"systems/{SYSTEM}.json").read_text())
            config["mem2"]["GiB"] = 0  # nothing rests in host memory
            system.write_text(json.dumps(config))
            command = [".venv/bin/python", "bin/calculon", "llm-optimal-execution"]
            command += [f"models/{model}.json", n, batch, "float16", str(system), str(out)]
            command += ["--mbs-break", "--cpus", "1", "--no-tp-overlap"]
            environment = {"PYTHONPATH": ".", "OMP_NUM_THREADS": "1"}
            subprocess.run(command, check=True, cwd=checkout, env=environment)
    found: dict[str, Any] = json.loads(out.read_text())["0"]
    return found


def row_of_execution(like: Row, execution: Mapping[str, Any]) -> Row:
    """The row with a layout of Calculon's."""
    chunks = execution["pipeline_interleaving"]
    cells = {
        "row_id": f"Calculon of {like['row_id']}",
        "tp": execution["tensor_par"],
        "pp": execution["pipeline_par"],
        "vp": chunks,
        "dp": execution["data_par"],
        "zero_stage": int(execution["optimizer_sharding"]),
        "sp": "Y" if execution["tensor_par_comm_type"] == "rs_ag" else "N",
        "schedule": "interleaved-1F1B" if chunks > 1 else "1F1B",
        "mbs": execution["microbatch_size"],
        "gbs": execution["batch_size"],
        "recompute": AGAIN[execution["activation_recompute"]],
        "d_iter_time_s": "",
    }
    return like | {name: str(value) for name, value in cells.items()}


# ---- the part ------------------------------------------------------------------------------------


def measure(folder: Path) -> dict[str, Any]:
    """Each space with its picks, priced."""
    known = {row["row_id"]: row for row in published.own()}
    spaces = [_space("Calculon", known[row_id], known.values(), folder) for row_id in CALCULON]
    spaces += [_space(row["source_id"], row, ()) for row in published.read(HERE / "picks.csv")]
    layouts = [of_row(pick.pop("row")) for space in spaces for pick in space["picks"]]
    calculon = [run for run in layouts if _id(run.id) in CALCULON]
    said = asked("calculon-search", folder, calculon, NO_LIMIT_S)
    for pick in (pick for space in spaces for pick in space["picks"]):
        if answer := said["runs"].get(pick["id"]):
            pick["calculon"] = {
                name: value if isinstance(value, str) else round(value, 3)
                for name, value in answer.items()
            }
    return {"commit": said["commit"], "spaces": spaces}


def _id(pick: str) -> str:
    return pick.split(" of ")[-1]


def _space(who: str, row: Row, known: Iterable[Row], folder: Path | None = None) -> dict[str, Any]:
    """One model on one machine: the other's pick, weft's of the same space, weft's of its own, and
    the published run if it is another."""
    asks, _ = question(row)
    if folder is None:
        theirs = row
    else:
        theirs = row_of_execution(row, optimal(folder, CALCULON[row["row_id"]], row)["execution"])
    ours = best_of(SPACES[who], asks)
    by = f"by {row['by']}" if row.get("by") else who
    picks = [
        _pick(by, theirs, priced(theirs), known),
        _pick("weft", row_of(row, ours), ours, known),
    ]
    if folder is not None:
        picks.append(_pick("published", row, priced(row), known))
    free = rank(asks).rows[0]
    return {
        "searcher": who,
        "model": row["model"],
        "devices": int(row["n_accel"]),
        "accelerator": row["accelerator"],
        "batch": int(row["gbs"]),
        "source": _source(row)
        if folder is None
        else f"{CALCULON_FILES}: {CALCULON[row['row_id']]}",
        "notes": (row.get("notes") or "") if folder is None else f"beside {row['row_id']}",
        "picks": picks,
        "own": _said("weft, all that it has", free),
    }


def _source(row: Row) -> str:
    return f"{row['repo']}@{row['commit'][:10]}, {row['path']}"


def _pick(who: str, row: Row, chosen: RankedLayout, known: Iterable[Row]) -> dict[str, Any]:
    run = of_row(row)
    alike = [other for other in known if other["d_iter_time_s"] and _same(run, other)]
    times = [float(other["d_iter_time_s"]) for other in [row, *alike] if other["d_iter_time_s"]]
    found = _said(who, chosen) | {"id": row["row_id"], "row": row}
    return found | ({"measured_s": times[0]} if times else {})


def _same(run: Run, row: Row) -> bool:
    """Whether a published run has this layout of this model, with the batch and recomputation."""
    if row["layers"] != str(run.layers) or row["n_accel"] != str(run.devices):
        return False
    other = of_row(row)
    return other.layout == run.layout and all(
        getattr(other, name) == getattr(run, name)
        for name in ("hidden", "heads", "accelerator", "batch", "recompute")
    )


def _said(who: str, chosen: RankedLayout) -> dict[str, Any]:
    """What weft says of a layout."""
    c = chosen.chosen.choices
    again = "selective" if c.selective[0] else f"{c.again[0]:.0%}" if 0 < c.again[0] < 1 else ""
    return {
        "who": who,
        "layout": chosen.layout,
        "schedule": f"{chosen.schedule} {int(c.chunks[0])}" if chosen.schedule else "",
        "microbatch": chosen.microbatch,
        "recompute": again or _share(c.again[0]),
        "weft_s": round(chosen.step_s, 3),
        "weft_gib": round(chosen.held_bytes / 2**30, 1),
        "fits": chosen.fits,
    }


# ---- tables --------------------------------------------------------------------------------------


def table(found: Mapping[str, Any]) -> list[str]:
    """Each space with its picks; then how far picks are apart, and where they stand."""
    lines = [
        "| their searches | pick of | layout | microbatch | recompute | weft, s | GiB |"
        " Calculon, s | GiB | measured, s |",
        "| --- | --- | --- | ---: | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for space in found["spaces"]:
        about = f"{space['model']}, {space['devices']} {space['accelerator']}"
        about = f"{space['searcher']}: {about}, batch {space['batch']:,}"
        for pick in [*space["picks"], space["own"]]:
            lines.append(f"| {' | '.join([about, *_cells(pick)])} |")
            about = ""
    lines += ["", *(_apart(who, found["spaces"]) for who in SPACES), "", "Where they stand:", ""]
    sources: dict[str, list[str]] = {}
    for space in found["spaces"]:
        sources.setdefault(space["source"], []).append(space["notes"])
    for source, notes in sources.items():
        said = "; ".join(dict.fromkeys(note for note in notes if note))
        lines.append(f"- {source}{f' ({said})' if said else ''}")
    return lines


def _apart(who: str, spaces: Iterable[Mapping[str, Any]]) -> str:
    """By both cost models, as far as they say it."""
    both = [space["picks"][:2] for space in spaces if space["picks"][0]["who"] == who]
    over = sum(not theirs["fits"] for theirs, _ in both)
    longer = [theirs["weft_s"] / ours["weft_s"] - 1 for theirs, ours in both]
    text = f"- By weft's price {who}'s pick takes {_range(longer)} longer than weft's"
    text += f" ({over} of {len(both)} do not fit, by weft)."
    says = [[pick.get("calculon", {}).get("step_s") for pick in picks] for picks in both]
    said = [ours / theirs - 1 for theirs, ours in says if theirs and ours]
    return text + (f" By {who}'s, weft's takes {_range(said)} longer." if said else "")


def _range(shares: Sequence[float]) -> str:
    least, most = f"{100 * min(shares):.0f}", f"{100 * max(shares):.0f}"
    return f"{least}%" if least == most else f"{least} to {most}%"


def _cells(pick: Mapping[str, Any]) -> list[str]:
    layout = ", ".join(part for part in (pick["layout"], pick["schedule"]) if part)
    cells = [pick["who"], layout, str(pick["microbatch"]), pick["recompute"]]
    cells += [_seconds(pick["weft_s"]), f"{pick['weft_gib']:.1f}{_over(not pick['fits'])}"]
    calculon, measured = pick.get("calculon", {}), pick.get("measured_s")
    if "step_s" in calculon:
        cells += [_seconds(calculon["step_s"]), f"{calculon['peak_gib']:.1f}"]
    else:
        cells += [calculon.get("cannot", ""), ""]
    return [*cells, "" if measured is None else _seconds(measured)]


def _seconds(value: float) -> str:
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def _over(is_over: bool) -> str:
    return ", does not fit" if is_over else ""
