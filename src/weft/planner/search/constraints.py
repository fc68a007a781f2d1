"""Rules: which choices can be, by the work alone, and which are worth a look. Each is written once,
over arrays, with the words for what it leaves out.

What the model itself would refuse beyond these (`legal`) is asked of weft's planner at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.core import (
    Layout,
    Refusal,
)
from weft.parallel import (
    DATA_AXES,
    SEQUENCE_AXES,
)
from weft.pipeline import schedules
from weft.sync import check_sync

from ..cost.layout_batch import AXES, Array
from ..cost.model_work import ModelWork
from .query import PlanQuery

Columns = Mapping[str, Any]  # name -> an array with an entry for each row, or a number of one row
SPREADING = ("dp", "fsdp", "cp", "up", "tp")  # bit i of `spread`: axis i also spreads experts


@dataclass(frozen=True)
class Constraint:
    """`holds` for which rows, once the columns that it `needs` are there; `reason` where it does
    not, of one row. `about`: an axis, or an option of it; where its size is given, or the option, a
    rule of HABITS is not asked."""

    needs: tuple[str, ...]
    holds: Callable[[Columns, PlanQuery], Array]
    reason: Callable[[Columns, PlanQuery], str]
    about: str = ""


def axis_product(columns: Columns, *axes: str) -> Any:
    """Of the sizes of these axes."""
    found: Any = 1
    for axis in axes:
        found = found * columns[axis]
    return found


def expert_ranks(columns: Columns, of_tp: bool = True) -> Any:
    """Ranks over which experts are spread; without those of tp, which has as much of them if it
    cuts each."""
    found = columns["ep"]
    for bit, axis in enumerate(SPREADING):
        if of_tp or axis != "tp":
            found = found * np.where(columns["spread"] >> bit & 1, columns[axis], 1)
    return found


def _heads(work: ModelWork) -> set[tuple[int, int]]:
    return {(block.heads, block.kv_heads or block.heads) for block in work.blocks if block.heads}


def _experts(work: ModelWork) -> list[int]:
    return sorted({block.experts for block in work.blocks if block.experts})


def _every(columns: Columns, conditions: list[Array]) -> Array:
    found = np.ones(np.shape(next(iter(columns.values()))), dtype=bool)
    for condition in conditions:
        found = found & condition
    return found


def _heads_divide(c: Columns, q: PlanQuery) -> Array:
    return _every(c, [heads % c["tp"] == 0 for heads, _ in _heads(q.work)])


def _keys_divide(c: Columns, q: PlanQuery) -> Array:
    return _every(c, [(kv % c["tp"] == 0) | (c["tp"] % kv == 0) for _, kv in _heads(q.work)])


def _shared_heads_divide(c: Columns, q: PlanQuery) -> Array:
    """Ulysses: the heads of a rank of tp divide over the ranks of up."""
    fit = []
    for heads, kv in _heads(q.work):
        mine, keys = heads // c["tp"], np.maximum(1, kv // c["tp"])
        fit.append((mine % c["up"] == 0) & ((keys % c["up"] == 0) | (c["up"] % keys == 0)))
    return _every(c, fit)


def _attends(work: ModelWork) -> bool:
    return any(block.key_bytes for block in work.blocks)


def _pieces(c: Columns) -> Any:
    """Into how many equal pieces a sequence is cut."""
    return axis_product(c, *SEQUENCE_AXES) * np.where(np.asarray(c["cp"]) > 1, 2, 1)


def _plural(count: float, what: str) -> str:
    return f"{count:,.0f} {what}" + ("" if count == 1 else "s")


def _agree(c: Columns, q: PlanQuery) -> Array:
    """The synchroniser can be run: asked of weft's planner once for each case that it tells
    apart."""
    if q.sync is None or q.sync.plain:
        return _every(c, [])
    cases = np.stack(
        [*np.broadcast_arrays(c["dp"], c["fsdp"] > 1, c["tp"] > 1, c["spread"] & 1)], -1
    )
    known, place = np.unique(cases.reshape(-1, 4), axis=0, return_inverse=True)
    fit = np.array([not _disagreement(q, *map(int, case)) for case in known])
    return fit[place.reshape(cases.shape[:-1])]


def _disagreement(q: PlanQuery, dp: int, fsdp: int, tp: int, spread: int) -> str:
    sizes = (("dp", dp), *((("fsdp", 2),) if fsdp else ()), *((("tp", 2),) if tp else ()))
    try:
        assert q.sync is not None
        check_sync(
            Layout(sizes, (("dp", "ep"),) if spread else ()), q.sync, None, q.practice.compute
        )
    except Refusal as error:
        return error.problem
    return ""


LEGAL = (
    Constraint(
        DATA_AXES,
        lambda c, q: q.batch % axis_product(c, *DATA_AXES) == 0,
        lambda c, q: (
            f"a batch of {q.batch:,} does not divide over"
            f" {_plural(axis_product(c, *DATA_AXES), 'data rank')}"
        ),
    ),
    Constraint(
        (*DATA_AXES, "microbatch"),
        lambda c, q: q.batch % (axis_product(c, *DATA_AXES) * c["microbatch"]) == 0,
        lambda c, q: (
            f"microbatches of {c['microbatch']} do not divide"
            f" {q.batch // axis_product(c, *DATA_AXES)}"
        ),
    ),
    Constraint(
        ("tp",),
        lambda c, q: (
            (c["tp"] == 1) | any(op.cut == "tp" for block in q.work.blocks for op in block.ops)
        ),
        lambda c, q: "the model has nothing that tp cuts",
    ),
    Constraint(
        ("tp",),
        _heads_divide,
        lambda c, q: " and ".join(_plural(heads, "head") for heads, _ in _heads(q.work)),
    ),
    Constraint(
        ("tp",),
        _keys_divide,
        lambda c, q: " and ".join(_plural(kv, "key head") for _, kv in _heads(q.work)),
    ),
    Constraint(
        SEQUENCE_AXES,
        lambda c, q: (axis_product(c, *SEQUENCE_AXES) == 1) | _attends(q.work),
        lambda c, q: "the model has no attention that could share a sequence",
    ),
    Constraint(
        SEQUENCE_AXES,
        lambda c, q: q.work.tokens % _pieces(c) == 0,
        lambda c, q: f"{q.work.tokens:,.0f} positions do not divide into {_pieces(c)} pieces",
    ),
    Constraint(
        ("tp", "up"),
        _shared_heads_divide,
        lambda c, q: f"the heads of a rank do not divide over up{c['up']}",
    ),
    Constraint(
        ("ep",),
        lambda c, q: (c["ep"] == 1) | bool(_experts(q.work)),
        lambda c, q: "the model has no experts",
    ),
    Constraint(
        ("ep",),
        lambda c, q: _every(c, [count % c["ep"] == 0 for count in _experts(q.work)]),
        lambda c, q: " and ".join(_plural(count, "expert") for count in _experts(q.work)),
    ),
    Constraint(
        ("tp", *SEQUENCE_AXES, "sequence"),
        lambda c, q: (
            ~c["sequence"]
            | ((c["tp"] > 1) & (q.work.tokens % (c["tp"] * axis_product(c, *SEQUENCE_AXES)) == 0))
        ),
        lambda c, q: f"{q.work.tokens:,.0f} positions do not divide over tp{c['tp']}",
    ),
    Constraint(
        (*AXES, "spread", "sequence"),
        lambda c, q: _every(
            c, [(c["spread"] >> bit & 1 == 0) | (c[axis] > 1) for bit, axis in enumerate(SPREADING)]
        ),
        lambda c, q: "an axis of one rank spreads no experts",
    ),
    Constraint(
        (*AXES, "spread", "sequence"),
        lambda c, q: (
            (c["spread"] == 0)
            | _every(c, [count % expert_ranks(c) == 0 for count in _experts(q.work)])
        ),
        lambda c, q: f"experts do not divide over {expert_ranks(c)} ranks",
    ),
    Constraint(
        (*AXES, "spread", "sequence"),
        lambda c, q: (c["spread"] >> SPREADING.index("tp") & 1 == 0) | c["sequence"],
        lambda c, q: (
            "without sequence the ranks of tp have the same tokens, and experts are not spread over"
            " them"
        ),
    ),
    Constraint(
        (*AXES, "spread", "sequence"),
        _agree,
        lambda c, q: (
            f"[sync]: {_disagreement(q, c['dp'], c['fsdp'] > 1, c['tp'] > 1, c['spread'] & 1)}"
        ),
    ),
    Constraint(
        ("fsdp", "zero", "offload"),
        lambda c, q: (c["fsdp"] > 1) | ((c["zero"] == 3) & ~c["offload"]),
        lambda c, q: "options of fsdp need more than one rank",
    ),
    Constraint(
        ("again", "selective"),
        lambda c, q: (c["again"] == 0) | (q.work.depth > 0),
        lambda c, q: "the model has no repeated blocks to run again",
    ),
    Constraint(
        ("pp", "chunks"),
        lambda c, q: c["pp"] * c["chunks"] <= q.work.parts,
        lambda c, q: (
            f"the model has {_plural(q.work.parts, 'part')} for {c['pp'] * c['chunks']} stages"
        ),
    ),
)

LEAST_POSITIONS, MOST_POSITIONS = 4096, 65536


def _in_use(c: Columns, q: PlanQuery) -> Array:
    """Enough microbatches for the schedule, and of a number that it divides."""
    fits = True
    for place, name in enumerate(SCHEDULES):
        enough = c["accumulate"] >= schedules.min_microbatches(name, c["pp"])
        even = c["accumulate"] % schedules.microbatch_multiple(name, c["pp"]) == 0
        fits = fits & ((c["schedule"] != place) | (enough & even))
    return (c["pp"] == 1) | fits


def _unsearched() -> list[str]:
    return [name for name in SCHEDULES if not schedules.is_searched(name)]


SCHEDULES = schedules.plannable_schedules()
STAGES = {
    name: schedules.make_schedule(name, 2, 4).stages // 2 for name in SCHEDULES
}  # of a rank, where nothing is asked

HABITS = (
    Constraint(
        ("tp",),
        lambda c, q: c["tp"] <= q.cluster.hardware.node,
        lambda c, q: f"tp within a node of {q.cluster.hardware.node}",
        about="tp",
    ),
    Constraint(
        ("tp", "up"),
        lambda c, q: (c["up"] == 1) | (c["up"] * c["tp"] <= q.cluster.hardware.node),
        lambda c, q: f"up within a node of {q.cluster.hardware.node}",
        about="up",
    ),
    Constraint(
        SEQUENCE_AXES,
        lambda c, q: (
            (axis_product(c, *SEQUENCE_AXES) == 1)
            | (q.work.tokens >= LEAST_POSITIONS * axis_product(c, *SEQUENCE_AXES))
        ),
        lambda c, q: f"at least {LEAST_POSITIONS:,} positions on a rank of cp or up",
        about="cp",
    ),
    Constraint(
        ("cp", "gather"),
        lambda c, q: ~c["gather"] | (c["cp"] == 1),
        lambda c, q: "keys of cp round a ring",
        about="cp+gather",
    ),
    Constraint(
        ("pp",),
        lambda c, q: (c["pp"] == 1) | (c["pp"] <= max(q.work.depth, 2)),
        lambda c, q: "a block for each rank of pp",
        about="pp",
    ),
    Constraint(
        ("spread", "ep"),
        lambda c, q: (c["spread"] == 0) | (c["ep"] == 1),
        lambda c, q: "experts on ep, or by +ep",
        about="ep",
    ),
    Constraint(
        ("microbatch", *SEQUENCE_AXES),
        lambda c, q: (
            (c["microbatch"] == 1)
            | (c["microbatch"] * q.work.tokens <= MOST_POSITIONS * axis_product(c, *SEQUENCE_AXES))
        ),
        lambda c, q: f"at most {MOST_POSITIONS:,} positions in a microbatch on a rank",
    ),
    Constraint(
        ("microbatch", "accumulate"),
        lambda c, q: (c["microbatch"] & (c["microbatch"] - 1) == 0) | (c["accumulate"] == 1),
        lambda c, q: "microbatches of powers of two",
    ),
    Constraint(
        ("schedule", "accumulate", "pp"),
        _in_use,
        lambda c, q: "as many microbatches as stages, or a multiple",
    ),
    Constraint(
        ("schedule", "chunks", "pp"),
        lambda c, q: (
            (c["pp"] == 1)
            | (c["pp"] * c["chunks"] <= max(q.work.depth, c["pp"] if q.work.depth < 2 else 0))
        ),
        lambda c, q: "a block for each stage",
    ),
    Constraint(
        ("schedule",),
        lambda c, q: np.array([schedules.is_searched(name) for name in SCHEDULES])[c["schedule"]],
        lambda c, q: f"not the {' or '.join(_unsearched())} schedule",
    ),
)
