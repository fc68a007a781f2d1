"""Which layouts the model allows, and which of them are worth pricing. Each is written once, over
arrays, with the words for what it leaves out.

What the model itself would refuse beyond these (`legal`) is asked of weft's planner at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.core import (
    EXPERTS_OPTION,
    ONE_AXIS_ALONE,
    REPLICA_AXIS,
    STAGE_AXIS,
    Divides,
    Layout,
    Refusal,
)
from weft.parallel import (
    DATA_AXES,
    EXPERT_AXES,
    FEATURE_AXES,
    HEAD_AXES,
    KEY_AXES,
    SEQUENCE_AXES,
    SPREADING,
    STATE_AXES,
    VOCABULARY_AXES,
    axis_table,
)
from weft.pipeline import schedules
from weft.sync import check_sync

from ..cost.layout_batch import AXES, Array
from ..cost.model_work import ModelWork
from .query import PlanQuery

Columns = Mapping[str, Any]  # name -> an array with an entry for each row, or a number of one row
# bit i of the column `spread`: axis i of SPREADING also spreads experts


@dataclass(frozen=True)
class Constraint:
    """`holds` for which rows, once the columns that it `needs` are there; `reason` where it does
    not, of one row. `about`: an axis, or an option of it; where its size is given, or the option, a
    rule of CONVENTIONS is not asked."""

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


def expert_ranks(columns: Columns, of_features: bool = True) -> Any:
    """Ranks over which experts are spread; without those that divide features, which have as much
    of them if they cut each."""
    found = axis_product(columns, *EXPERT_AXES)
    for bit, axis in enumerate(SPREADING):
        if of_features or axis not in FEATURE_AXES:
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


def _features(columns: Columns) -> Any:
    """Ranks that divide heads and features."""
    return axis_product(columns, *FEATURE_AXES)


def _vocabulary(columns: Columns) -> Any:
    """Ranks that divide the vocabulary."""
    return axis_product(columns, *VOCABULARY_AXES)


def _name_axes(columns: Columns, axes: tuple[str, ...]) -> str:
    """These axes with their sizes, as in a layout."""
    return ".".join(f"{axis}{columns[axis]}" for axis in axes)


def _is_cut(work: ModelWork, *cuts: str) -> bool:
    """Whether any op of the model is divided in one of these ways."""
    return any(op.cut in cuts for block in work.blocks for op in block.ops)


def cuts_features(work: ModelWork) -> bool:
    """Whether the model has chains or a vocabulary, whose cuts are priced. Where it has none, the
    ranks cut single layers, which is not."""
    return _is_cut(work, "features", "vocabulary")


def _heads_divide(c: Columns, q: PlanQuery) -> Array:
    return _every(c, [heads % _features(c) == 0 for heads, _ in _heads(q.work)])


def _keys_divide(c: Columns, q: PlanQuery) -> Array:
    return _every(
        c, [(kv % _features(c) == 0) | (_features(c) % kv == 0) for _, kv in _heads(q.work)]
    )


def _shared_heads_divide(c: Columns, q: PlanQuery) -> Array:
    """Ulysses: the heads that a rank has of those that features are divided into divide once
    more."""
    fit, ranks = [], axis_product(c, *HEAD_AXES)
    for heads, kv in _heads(q.work):
        mine, keys = heads // _features(c), np.maximum(1, kv // _features(c))
        fit.append((mine % ranks == 0) & ((keys % ranks == 0) | (ranks % keys == 0)))
    return _every(c, fit)


def _attends(work: ModelWork) -> bool:
    return any(block.key_bytes for block in work.blocks)


def _pieces(c: Columns) -> Any:
    """Into how many equal pieces a sequence is cut."""
    return axis_product(c, *SEQUENCE_AXES) * np.where(
        np.asarray(axis_product(c, *KEY_AXES)) > 1, 2, 1
    )


def _plural(count: float, what: str) -> str:
    return f"{count:,.0f} {what}" + ("" if count == 1 else "s")


def _agree(c: Columns, q: PlanQuery) -> Array:
    """The synchroniser can be run: asked of weft's planner once for each case that it tells
    apart."""
    if q.sync is None or q.sync.plain:
        return _every(c, [])
    cases = np.stack(
        [
            *np.broadcast_arrays(
                c[REPLICA_AXIS],
                axis_product(c, *STATE_AXES) > 1,
                _features(c) > 1,
                c["spread"] & 1,
            )
        ],
        -1,
    )
    known, place = np.unique(cases.reshape(-1, 4), axis=0, return_inverse=True)
    fit = np.array([not _disagreement(q, *map(int, case)) for case in known])
    return fit[place.reshape(cases.shape[:-1])]


def _disagreement(q: PlanQuery, replicas: int, sharded: int, cut: int, spread: int) -> str:
    two = (*(STATE_AXES if sharded else ()), *(FEATURE_AXES if cut else ()))
    sizes = ((REPLICA_AXIS, replicas), *((axis, 2) for axis in two))
    try:
        assert q.sync is not None
        check_sync(
            Layout(sizes, ((REPLICA_AXIS, EXPERTS_OPTION),) if spread else ()),
            axis_table(),
            q.sync,
            None,
            q.practice.compute,
        )
    except Refusal as error:
        return error.problem
    return ""


VOCABULARY_ALONE = tuple(axis for axis in VOCABULARY_AXES if axis not in FEATURE_AXES)


def _one_axis_alone(what: Divides) -> Constraint:
    """No two axes of a layout divide this."""
    axes = axis_table().dividing(what)
    return Constraint(
        axes,
        lambda c, q: np.sum([np.asarray(c[axis]) > 1 for axis in axes], axis=0) <= 1,
        lambda c, q: f"{' and '.join(axes)} both divide the {what}",
    )


def _within_node(axis: str) -> Constraint:
    """This axis, with those inside of it that a search keeps within a node too, fits a node."""
    inner = tuple(
        other for other in AXES[AXES.index(axis) :] if axis_table().traits[other].within_node
    )
    return Constraint(
        inner,
        lambda c, q: (c[axis] == 1) | (axis_product(c, *inner) <= q.cluster.hardware.node),
        lambda c, q: f"{axis} within a node of {q.cluster.hardware.node}",
        about=axis,
    )


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
        FEATURE_AXES,
        lambda c, q: (_features(c) == 1) | cuts_features(q.work),
        lambda c, q: (
            f"the model has no chain of linears and no vocabulary that {' or '.join(FEATURE_AXES)}"
            " cuts, and a cut of single layers is not priced"
        ),
    ),
    Constraint(
        VOCABULARY_AXES,
        lambda c, q: (
            (axis_product(c, *VOCABULARY_ALONE) == 1)
            | (_is_cut(q.work, "vocabulary") & (_vocabulary(c) <= q.work.vocab))
        ),
        lambda c, q: f"a vocabulary of {q.work.vocab:,}",
    ),
    *(_one_axis_alone(what) for what in ONE_AXIS_ALONE),
    Constraint(
        FEATURE_AXES,
        _heads_divide,
        lambda c, q: " and ".join(_plural(heads, "head") for heads, _ in _heads(q.work)),
    ),
    Constraint(
        FEATURE_AXES,
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
        (*FEATURE_AXES, *HEAD_AXES),
        _shared_heads_divide,
        lambda c, q: f"the heads of a rank do not divide over {_name_axes(c, HEAD_AXES)}",
    ),
    Constraint(
        EXPERT_AXES,
        lambda c, q: (axis_product(c, *EXPERT_AXES) == 1) | bool(_experts(q.work)),
        lambda c, q: "the model has no experts",
    ),
    Constraint(
        EXPERT_AXES,
        lambda c, q: _every(
            c, [count % axis_product(c, *EXPERT_AXES) == 0 for count in _experts(q.work)]
        ),
        lambda c, q: " and ".join(_plural(count, "expert") for count in _experts(q.work)),
    ),
    Constraint(
        (*FEATURE_AXES, *SEQUENCE_AXES, "sequence"),
        lambda c, q: (
            ~c["sequence"]
            | (
                (_features(c) > 1)
                & (q.work.tokens % axis_product(c, *FEATURE_AXES, *SEQUENCE_AXES) == 0)
            )
        ),
        lambda c, q: (
            f"{q.work.tokens:,.0f} positions do not divide over {_name_axes(c, FEATURE_AXES)}"
        ),
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
        lambda c, q: _every(
            c,
            [
                (c["spread"] >> SPREADING.index(axis) & 1 == 0) | c["sequence"]
                for axis in FEATURE_AXES
                if axis in SPREADING
            ],
        ),
        lambda c, q: (
            "without sequence the ranks of tp have the same tokens, and experts are not spread over"
            " them"
        ),
    ),
    Constraint(
        (*AXES, "spread", "sequence"),
        _agree,
        lambda c, q: (
            "[sync]: "
            + _disagreement(
                q,
                c[REPLICA_AXIS],
                axis_product(c, *STATE_AXES) > 1,
                _features(c) > 1,
                c["spread"] & 1,
            )
        ),
    ),
    Constraint(
        (*STATE_AXES, "zero", "offload"),
        lambda c, q: (axis_product(c, *STATE_AXES) > 1) | ((c["zero"] == 3) & ~c["offload"]),
        lambda c, q: f"options of {STATE_AXES[0]} need more than one rank",
    ),
    Constraint(
        ("again", "selective"),
        lambda c, q: (c["again"] == 0) | (q.work.depth > 0),
        lambda c, q: "the model has no repeated blocks to run again",
    ),
    Constraint(
        (STAGE_AXIS, "chunks"),
        lambda c, q: c[STAGE_AXIS] * c["chunks"] <= q.work.parts,
        lambda c, q: (
            f"the model has {_plural(q.work.parts, 'part')} for"
            f" {c[STAGE_AXIS] * c['chunks']} stages"
        ),
    ),
)

LEAST_POSITIONS, MOST_POSITIONS = 4096, 65536


def _in_use(c: Columns, q: PlanQuery) -> Array:
    """Enough microbatches for the schedule, and of a number that it divides."""
    fits = True
    for place, name in enumerate(SCHEDULES):
        enough = c["accumulate"] >= schedules.min_microbatches(name, c[STAGE_AXIS])
        even = c["accumulate"] % schedules.microbatch_multiple(name, c[STAGE_AXIS]) == 0
        fits = fits & ((c["schedule"] != place) | (enough & even))
    return (c[STAGE_AXIS] == 1) | fits


def _unsearched_axes() -> list[str]:
    return [name for name in SCHEDULES if not schedules.is_searched(name)]


SCHEDULES = schedules.plannable_schedules()
STAGES = {
    name: schedules.make_schedule(name, 2, 4).stages // 2 for name in SCHEDULES
}  # of a rank, where nothing is asked

CONVENTIONS = (
    *map(_within_node, (axis for axis in reversed(AXES) if axis_table().traits[axis].within_node)),
    Constraint(
        SEQUENCE_AXES,
        lambda c, q: (
            (axis_product(c, *SEQUENCE_AXES) == 1)
            | (q.work.tokens >= LEAST_POSITIONS * axis_product(c, *SEQUENCE_AXES))
        ),
        lambda c, q: (
            f"at least {LEAST_POSITIONS:,} positions on a rank of {' or '.join(SEQUENCE_AXES)}"
        ),
        about=KEY_AXES[0],
    ),
    Constraint(
        (*KEY_AXES, "gather"),
        lambda c, q: ~c["gather"] | (axis_product(c, *KEY_AXES) == 1),
        lambda c, q: f"keys of {KEY_AXES[0]} round a ring",
        about=f"{KEY_AXES[0]}+gather",
    ),
    Constraint(
        (STAGE_AXIS,),
        lambda c, q: (c[STAGE_AXIS] == 1) | (c[STAGE_AXIS] <= max(q.work.depth, 2)),
        lambda c, q: f"a block for each rank of {STAGE_AXIS}",
        about=STAGE_AXIS,
    ),
    Constraint(
        ("spread", *EXPERT_AXES),
        lambda c, q: (c["spread"] == 0) | (axis_product(c, *EXPERT_AXES) == 1),
        lambda c, q: f"experts on {EXPERT_AXES[0]}, or by +{EXPERT_AXES[0]}",
        about=EXPERT_AXES[0],
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
        ("schedule", "accumulate", STAGE_AXIS),
        _in_use,
        lambda c, q: "as many microbatches as stages, or a multiple",
    ),
    Constraint(
        ("schedule", "chunks", STAGE_AXIS),
        lambda c, q: (
            (c[STAGE_AXIS] == 1)
            | (
                c[STAGE_AXIS] * c["chunks"]
                <= np.maximum(q.work.depth, c[STAGE_AXIS] if q.work.depth < 2 else 0)
            )
        ),
        lambda c, q: "a block for each stage",
    ),
    Constraint(
        ("schedule",),
        lambda c, q: np.array([schedules.is_searched(name) for name in SCHEDULES])[c["schedule"]],
        lambda c, q: f"not the {' or '.join(_unsearched_axes())} schedule",
    ),
)
