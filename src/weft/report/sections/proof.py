"""The table of `weft verify`: errors and collectives of each layout beside one device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import blocks
from ..read_run import RunRecord, as_number, tables
from ..texts import Value, number, text
from .outcome import changed_settings

RESULTS = ("layout", "result", "loss", "gradient", "weight", "worst")
COLLECTIVES = ("kind", "axis", "predicted", "seen")


def proof(runs: Sequence[RunRecord]) -> blocks.Section | None:
    found = [(run.name, _blocks(run)) for run in runs]
    shown = found[0][1] if len(runs) == 1 else [blocks.beside(found)]
    return blocks.section("verify", text("verify.title"), text("verify.intro"), shown)


def _blocks(run: RunRecord) -> list[blocks.Block]:
    layouts = tables(run.verified.get("layouts"))
    if not layouts:
        return [blocks.note(text("verify.missing"))]
    shown: list[blocks.Block] = []
    if others := changed_settings(run):
        shown.append(blocks.note(text("verify.changed", keys=", ".join(others)), "warn"))
    rows: list[list[Value]] = [
        [
            str(one.get("layout")),
            _result(one),
            *(_error(one.get(key)) for key in ("loss_rel_err", "grad_rel_err", "param_rel_err")),
            str(one.get("worst") or ""),
        ]
        for one in layouts
    ]
    head = [text(f"verify.{key}") for key in RESULTS]
    shown.append(blocks.table(head, rows))
    for one in layouts:
        if first := one.get("first_difference"):
            shown.append(blocks.note(f"{one.get('layout')}: {first}", "bad"))
        compared = _collectives(one)
        if compared:
            head = [text(f"verify.{key}") for key in COLLECTIVES]
            caption = text("verify.collectives", layout=str(one.get("layout")))
            shown.append(blocks.table(head, compared, caption))
    return shown


def _result(one: dict[str, Any]) -> Value:
    if one.get("refused"):
        return text("verify.refused", why=str(one["refused"]))
    return text("verify.equal") if one.get("passed") is True else text("verify.different")


def _error(value: Any) -> Value:
    found = as_number(value)
    return None if found is None else f"{found:.2e}"


def _collectives(one: dict[str, Any]) -> list[list[Value]]:
    cells: dict[tuple[str, str], dict[str, Value]] = {}
    for side in ("comms_predicted", "comms_seen"):
        for comm in tables(one.get(side)):
            key = str(comm.get("kind")), str(comm.get("axis"))
            count, nbytes = as_number(comm.get("count")), as_number(comm.get("bytes"))
            cells.setdefault(key, {})[side] = text(
                "verify.total", count=number(count), bytes=number(nbytes, "bytes")
            )
    return [
        [kind, axis, sides.get("comms_predicted"), sides.get("comms_seen")]
        for (kind, axis), sides in cells.items()
    ]
