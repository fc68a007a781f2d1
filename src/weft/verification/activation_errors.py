"""The first module whose output or gradient differs from the one-device run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from math import sqrt

import torch
from torch import Tensor

from weft.core import COPY, EXPERTS, Plan, computes_whole_sequences, is_inside
from weft.engine import TrainingEngine
from weft.parallel import DATA_AXES, FEATURE_AXES

from .activation_recorder import ActivationRecorder
from .difference import Calls, Difference
from .tensor_errors import error_ratio, wide


def first_activation(
    engine: TrainingEngine,
    trace: ActivationRecorder,
    references: list[ActivationRecorder],
    bound: float,
    scale: float = 1.0,
) -> list[Difference]:
    """The first output that differs by more than `bound`, in order of execution, and the first
    gradient of an output, in backward order. `scale`: what the backward of the references began
    with."""
    found: list[Difference] = []
    whole, parted = references[0], engine.plan.sequence_size > 1
    unused = whole.giving - whole.reached  # as a pooler's: of the first of a rank's own positions
    for place, (name, call) in enumerate(_calls(whole.forward)):
        if parted and place in unused:
            continue
        wanted = [r.outputs for r in references]
        if _differs(engine, name, call, trace.outputs, wanted, 1.0, bound):
            given = _giver(engine, trace, references, place, bound)
            found.append(((0, "output", place), f"output of {given or name or 'the model'}"))
            break
    agreed = ""
    factor = engine.plan.batch * scale / engine.loss_scale
    factor = 1.0 if engine.plan.schedule.versions else factor
    for place, (name, call) in enumerate(_calls(references[0].backward)):
        around = name.rpartition(".")[0]
        if _partial(engine.plan, name) or computes_whole_sequences(engine.plan.steps, around):
            continue
        differs = _differs(
            engine, name, call, trace.gradients, [r.gradients for r in references], factor, bound
        )
        if differs:
            after = f", after that of {agreed} agreed" if agreed else ", where backward begins"
            found.append(
                (
                    (0, "output gradient", place),
                    f"gradient of the output of {name or 'the model'}{after}",
                )
            )
            break
        agreed = (name or agreed or "the model") if differs is False else agreed
    return found


def _giver(
    engine: TrainingEngine,
    trace: ActivationRecorder,
    references: list[ActivationRecorder],
    place: int,
    bound: float,
) -> str | None:
    """The first module beside that of this place, whose output differs, that had given it something
    else than its first tensor, as a gate gives weights beside logits, and that differs."""
    calls = [*_calls(references[0].forward)]
    around = calls[place][0].rpartition(".")[0]
    for name, call in calls[:place] if around else ():
        for number, mine in trace.beside.items() if name.rpartition(".")[0] == around else ():
            wanted = [r.beside.get(number, {}) for r in references]
            if name in mine and _differs(engine, name, call, mine, wanted, 1.0, bound):
                return name
    return None


def _calls(names: list[str]) -> Iterator[tuple[str, int]]:
    """Each name with how often it came before."""
    count: Counter[str] = Counter()
    for name in names:
        yield name, count[name]
        count[name] += 1


def _partial(plan: Plan, name: str) -> bool:
    """Modules whose output several ranks compute, each on the way to other heads: their gradients
    are partial sums."""
    params = [p for step in plan.steps if step.module == name for p in step.params]
    return any(
        (p.cut is not None and p.stored == COPY)
        or (p.cut is None and p.grad != COPY and p.axis in FEATURE_AXES and not plan.sliced(name))
        for p in params
    )


def _differs(
    engine: TrainingEngine,
    name: str,
    call: int,
    mine: Calls,
    references: list[Calls],
    factor: float,
    bound: float,
) -> bool | None:
    """Whether a call's tensor differs, in any microbatch, from the reference's; None if it cannot
    be compared."""
    plan = engine.plan
    wholes = [r.get(name, []) for r in references]
    got = mine.get(name, [])
    calls = len(got) // plan.accumulate
    if any(name.startswith(module + ".") for module in engine.loads.modules):
        return None  # of the tokens of an expert, on some ranks of a part of it
    if call >= calls or len(got) % plan.accumulate or any(len(whole) != calls for whole in wholes):
        return None
    if not name and 0 in plan.pairs:
        return None  # of samples with those of the same microbatch, on one rank
    if any(not w[call].ndim for w in wholes):
        return None  # a sum over all samples, of which each microbatch has its own
    of_call, values = [w[call] for w in wholes], got[call::calls]
    vary = len({t.shape[0] for w in wholes for t in w}) > 1  # rows as data choose: of experts
    found = [_rows_differ(engine, name, of_call, values, factor, bound, vary)]
    for dim in _later_sample_dims(plan, of_call, values[0]):
        first = [t.movedim(dim, 0) for t in of_call], [t.movedim(dim, 0) for t in values]
        differs = _rows_differ(engine, name, *first, factor, bound, vary)
        size = engine.mesh.size(*FEATURE_AXES)
        features = size > 1 and values[0].shape[dim] * size == plan.batch  # or a rank's heads
        found.append(None if features and differs else differs)
    known = [differs for differs in found if differs is not None]
    return all(known) if known else None


def _rows_differ(
    engine: TrainingEngine,
    name: str,
    wholes: list[Tensor],
    values: list[Tensor],
    factor: float,
    bound: float,
    vary: bool,
) -> bool | None:
    """Whether a call's tensor differs, whose first dim counts samples if any does.

    Args:
        wholes: of references, one after the other.
        values: this rank's, one per microbatch.
        vary: whether data choose the number of rows.
    """
    plan = engine.plan
    whole = torch.cat(wholes) if len(wholes) > 1 else wholes[0]
    positions = (
        plan.sequence_size > 1 and whole.shape[0] == engine.sequence.now.length
    )  # no samples in it
    batched = whole.shape[0] % plan.batch == 0 and not positions
    if not batched and factor != 1.0:
        return None  # made once for all samples: each microbatch's gradient is a part of the sum
    data = engine.mesh.index(*DATA_AXES)
    compared = None
    for micro in range(plan.accumulate):
        value = wide(values[micro]) * factor
        sample = (micro * plan.data_size + data) * plan.microbatch
        candidates = _arranged(plan, whole, len(wholes), sample) if batched else iter([whole])
        want = next(candidates)
        if plan.sequence_size > 1 and factor != 1.0 and value.shape == want.shape:
            continue  # of no position: each rank that shares the sequence has a part of the sum
        want_local = _local_part(engine, name, value, want)
        if want_local is None:
            continue
        compared = False
        size = float(wide(whole).norm()) / sqrt(
            max(1, plan.accumulate * plan.data_size if batched else 1)
        )

        def equals(want: Tensor, value: Tensor = value, size: float = size) -> bool:
            error = float((value - wide(want)).norm())
            return error_ratio(error, max(size, 1e-300)) <= bound or error <= 1e-14

        if equals(want_local):
            continue
        others = (_local_part(engine, name, value, other) for other in candidates)
        if any(equals(other) for other in others if other is not None):
            continue
        complete = want.shape[0] == whole.shape[0] and plan.sequence_size == 1
        if not (batched or vary) or complete:
            return True
        elsewhere = (s for s in range(0, plan.batch, plan.microbatch) if s != sample)
        swapped = (next(_arranged(plan, whole, len(wholes), s)) for s in elsewhere)
        others = (_local_part(engine, name, value, other) for other in swapped)
        if any(equals(other) for other in others if other is not None):
            return True  # another microbatch's
        if not _same_rows(value, whole, equals):
            return True
    return compared


def _arranged(plan: Plan, whole: Tensor, pieces: int, sample: int) -> Iterator[Tensor]:
    """Of rows of all samples, those of a microbatch that begins with this sample: as they are if
    the rows of a sample stand together, and if some number of groups (views of the batch, experts)
    have each a part of the rows of every sample.

    Args:
        plan: tells the sizes.
        whole: [rows, ...], of references one after the other.
        pieces: how many references.
        sample: number of the first sample in the batch.
    """
    rows = whole.shape[0] // plan.batch
    yield whole[sample * rows : (sample + plan.microbatch) * rows]
    piece, first = divmod(sample, plan.batch // pieces)
    for groups in (n for n in range(2, rows + 1) if rows % n == 0):
        split = whole.unflatten(0, (pieces, groups, -1, rows // groups))[piece]
        yield split[:, first : first + plan.microbatch].flatten(0, 2)


def _same_rows(value: Tensor, whole: Tensor, equals: Callable[[Tensor], bool]) -> bool:
    """Whether each row is one of the whole batch, in an order that the batch decides, as where
    tokens are sorted by their experts."""
    if value.shape[1:] != whole.shape[1:] or value.ndim > 2 or value.is_complex():
        return False
    width = 1 if value.ndim == 1 else value.shape[1]
    direction = torch.linspace(1, 2, width, dtype=torch.float64, device=value.device)
    keys, order = (whole.double().reshape(-1, width) @ direction).sort()
    mine = value.reshape(-1, width) @ direction
    after = torch.searchsorted(keys, mine).clamp(1, len(keys) - 1)
    nearest = torch.where(mine - keys[after - 1] < keys[after] - mine, after - 1, after)
    return equals(whole[order[nearest]])


def _later_sample_dims(plan: Plan, wholes: list[Tensor], mine: Tensor) -> list[int]:
    """The dims between first and last that may count samples: [positions, samples, features]."""
    return [
        dim
        for dim in range(1, mine.ndim - 1)
        if all(t.ndim == mine.ndim and t.shape[:dim] == mine.shape[:dim] for t in wholes)
        and sum(t.shape[dim] for t in wholes) == plan.batch
        and mine.shape[dim] == plan.microbatch
    ]


def _in_sequence_region(plan: Plan, name: str) -> bool:
    """Whether a module stands in a block between whose chains the sequence is cut."""
    blocks = (step.module for step in plan.steps if step.activation_sharding == "sequence")
    return any(name != block and is_inside(name, block) for block in blocks)


def _own_positions(engine: TrainingEngine, value: Tensor, want: Tensor) -> Tensor:
    """Of a whole activation, the positions that this rank has, where ranks share the sequence."""
    length, size = engine.sequence.now.length, engine.plan.sequence_size
    if size == 1 or value.ndim != want.ndim or not want.ndim:
        return want
    mine = engine.sequence.positions(length, want.device)
    for dim in range(1, want.ndim):
        if want.shape[dim] == length and value.shape[dim] * size <= length:
            return want.index_select(dim, mine)
    if (
        want.shape[0] % length == 0 and value.shape[0] * size == want.shape[0]
    ):  # samples and positions in one dim
        return want.unflatten(0, (-1, length)).index_select(1, mine).flatten(0, 1)
    return want


def _local_part(engine: TrainingEngine, name: str, value: Tensor, want: Tensor) -> Tensor | None:
    """The part of a whole activation that this rank holds; None where it cannot be told from the
    plan, as of rows that are samples, positions and heads in one dim."""
    want = _own_positions(engine, value, want)
    if value.shape == want.shape:
        return want
    if value.ndim != want.ndim:
        return None
    dims = [d for d in range(want.ndim) if value.shape[d] != want.shape[d]]
    if len(dims) != 1:
        return None
    dim = dims[0]
    index, size = engine.mesh.index(*FEATURE_AXES), engine.mesh.size(*FEATURE_AXES)
    samples = engine.plan.microbatch
    if dim == 0 and engine.plan.sliced(name) and value.shape[0] * size == want.shape[0]:
        rows = want.unflatten(0, (samples, -1))  # samples and positions in one dim, positions cut
        return rows.narrow(1, index * (rows.shape[1] // size), rows.shape[1] // size).flatten(0, 1)
    # samples and positions in one dim, which ranks have gathered in an order of their own
    flat = value.ndim == 2 and _in_sequence_region(engine.plan, name)
    # a module that gives what a linear in it makes is cut as that one, which may be part by part
    inside = [s for s in engine.plan.steps if is_inside(s.module, name)] if not flat else []
    for step in sorted(inside, key=lambda step: step.module != name):
        for p in step.params:
            if (
                p.cut is not None
                and p.axis != EXPERTS
                and p.name.endswith("weight")
                and dim == want.ndim - 1
                and sum(p.cut.parts) == want.shape[dim]
            ):
                here = engine.mesh.index(p.axis), engine.mesh.size(p.axis)
                pieces = [want.narrow(dim, a, b - a) for a, b in p.cut.intervals(*here)]
                part = torch.cat(pieces, dim)
                return part if part.shape == value.shape else None
    if dim and value.shape[dim] * size == want.shape[dim] and not flat:
        return want.narrow(dim, index * value.shape[dim], value.shape[dim])
    return None
