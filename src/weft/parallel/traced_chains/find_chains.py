"""Chains of linears that a forward shows, whatever their modules are called: columns whose output
features stay in classes of their own up to the row, and so can be divided by these classes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from weft._torch.tensors import fake_mode
from weft.nn import (
    NO_ROW,
    Chain,
    Roles,
    chain_module,
    is_linear,
    is_plain_linear,
    linear_features,
    rms_rule,
)

from ..axes import FEATURE_AXES
from ..free_modules import free_modules, is_declared
from ..plan_request import PlanRequest
from ..without_elements import copy_without_elements
from .chain_builder import ChainBuilder
from .feature_marks import FeatureTrace
from .followed_forward import Followed, follow, within

PASSES = 12  # forwards of the model, at most
_SEVERAL = "more than one tensor that needs a gradient enters"
BOTTLENECK = 4  # times narrower than what it reads and makes, linears are left whole


def traced_roles(request: PlanRequest, roles: Roles) -> Roles:
    """The roles without chains that the forward contradicts, and with the chains that it shows of
    linears that have none."""
    size = request.layout.size(*FEATURE_AXES)
    if size == 1 or request.sample is None:
        return roles
    misread = misread_chains(request, roles, size)
    left = {chain_module(c): misread[c.row] for c in roles.chains if misread.get(c.row)}
    kept = (c for c in roles.chains if not misread.get(c.row))
    corrected = (replace(c, entry=None) if c.row in misread else c for c in kept)
    roles = replace(roles, chains=tuple(corrected))
    chains, all_seen, uneven = traced_chains(request, roles, size)
    cut = {name for chain in chains for name in chain.linears}
    kinds = {type(request.model.get_submodule(chain_module(c))).__name__ for c in chains}
    notes = [
        note
        for note in roles.notes
        if note.partition(":")[0] not in cut
        and note.partition(" ")[0] not in kinds
        and not (all_seen and note.endswith(NO_ROW))  # of names alone
    ]
    if chains:
        notes.append(f"{len(chains)} chains of linears are found along the forward")
    found = {chain_module(chain) for chain in chains}
    notes += [f"{module}: {why}: left whole" for module, why in left.items() if module not in found]
    every = (*roles.chains, *chains)
    return replace(roles, chains=every, notes=tuple(notes), all_seen=all_seen, uneven=uneven)


def misread_chains(request: PlanRequest, roles: Roles, size: int) -> dict[str, str]:
    """Row -> why its chain, found by names and shapes, cannot be divided: the forward shows it.
    "": it can, if ranks part at each of its columns, and not where its module begins."""
    model = request.model
    copies = _alike(model, roles.blocks)
    guessed = [c for c in roles.chains if not is_declared(c.row, request.roles or {})]
    linears = {n for c in guessed for n in c.linears if not _within_any(n, copies)}
    if not linears:
        return {}
    mode = fake_mode()
    whole = copy_without_elements(model, mode)
    arguments = request.arguments()
    norms = _norms(model)
    followed = follow(whole, arguments, mode, linears, set(), roles.blocks, norms)
    found: dict[str, str] = {}
    for chain in (c for c in guessed if c.row in followed.trace.rows):
        if _parts_classes(chain, followed.trace, size):
            found[chain.row] = "its heads are not where the names of its linears say"
        elif why := _no_entry(chain, followed):
            found[chain.row] = "" if _meets_nothing_else(chain, followed.trace) else why
    for block, first in copies.items():
        alike = {row: why for row, why in found.items() if row.startswith(f"{first}.")}
        found |= {block + row.removeprefix(first): why for row, why in alike.items()}
    rows = {c.row for c in guessed}
    return {row: why for row, why in found.items() if row in rows}


def _no_entry(chain: Chain, followed: Followed) -> str:
    """Why the module where a chain begins is not where ranks can part. "": it is."""
    if not chain.entry or chain.by_entry:
        return ""
    call = followed.calls.get(chain.entry)
    if call is None:
        return "the forward calls its linears, and never the module itself" * followed.ended
    return _SEVERAL * (len({id(t) for t in call.active}) > 1)


def _meets_nothing_else(chain: Chain, trace: FeatureTrace) -> bool:
    """Whether what the columns of a chain make meets no tensor with a gradient but parameters of
    their module, and meets all that are inside of the chain: none stands before a column."""
    made = [trace.classes.of_column(n, 0) for n in chain.columns if n in trace.classes.columns]
    labels = trace.classes.classes(torch.cat(made))

    def meets(found: Tensor) -> bool:
        return bool(torch.isin(trace.classes.classes(found), labels).any())

    used = {name: torch.cat(met) for name, met in trace.inner.items()} | trace.parts
    params = {name for name, met in used.items() if name not in trace.given and meets(met)}
    outside = any(not within(name, chain.entry or "") for name in params)
    beside = any(met.mark.active and meets(met.labels) for met in trace.meetings)
    return not (outside or beside) and {*chain.inner} <= params


def _parts_classes(chain: Chain, trace: FeatureTrace, size: int) -> bool:
    """Whether a chain divides a class among ranks; False where that is not known, or meant: ranks
    that share a key head each have some of its query heads."""
    if any(cut.shared(size) for cut in chain.cuts.values()):
        return False
    labels = {chain.row: trace.rows[chain.row][0]}
    labels |= {
        n: trace.classes.of_column(n, 0) for n in chain.columns if n in trace.classes.columns
    }
    classes = {name: trace.classes.classes(found).numpy() for name, found in labels.items()}
    known = [name for name, found in classes.items() if found.all()]
    if chain.row not in known:
        return False
    entering = {*classes[chain.row].tolist()}
    rank_of: dict[int, int] = {}
    for name in known:
        for rank in range(size):
            for interval in chain.cuts[name].intervals(rank, size):
                held = {*classes[name][slice(*interval)].tolist()} & entering
                if any(rank_of.setdefault(each, rank) != rank for each in held):
                    return True
    return False


def traced_chains(
    request: PlanRequest, roles: Roles, size: int
) -> tuple[tuple[Chain, ...], bool, tuple[tuple[str, int], ...]]:
    """Chains of linears that are in none of `roles`, for `size` ranks; whether the forward shows
    that there are no others to declare; and rows of others, which so many ranks do not divide, with
    how many features or heads enter. Where it depends on the elements of tensors, it may show
    none."""
    model = request.model
    linears = free_modules(model, roles, request.roles or {}, is_plain_linear)
    copies = _alike(model, roles.blocks)
    traced = {n: m for n, m in linears.items() if not _within_any(n, copies)}
    if len(traced) < 2:
        return (), False, ()
    mode = fake_mode()
    whole = copy_without_elements(model, mode)
    arguments = request.arguments()
    tables = [model.get_submodule(name) for name in (*roles.embeddings, *roles.heads)]
    others = {id(p) for module in tables for p in module.parameters()}
    left, narrow, unknown = set[str](), set[str](), False
    all_seen = {n for n, m in model.named_modules() if is_linear(m)} <= {*linears}
    norms = _norms(model)
    built: dict[str, Chain | None] = {}
    counts: dict[str, int] = {}
    for _ in range(PASSES):
        followed = follow(whole, arguments, mode, traced, left, roles.blocks, norms)
        unknown |= followed.trace.unknown
        elsewhere = {n for n in traced if f"{n}.weight" in followed.trace.read}
        if elsewhere:  # an operator would meet a rank's part
            traced = {n: m for n, m in traced.items() if n not in elsewhere}
            continue
        found = {row: _columns(followed.trace, row) for row in followed.trace.rows}
        narrow |= _bottlenecks(model, found)
        if again := narrow - left or _undividable(followed.trace, found) - left:
            left |= again
            continue
        for row, columns in found.items():
            if columns and (row not in built or built[row] is None):
                builder = ChainBuilder(model, followed, mode, row, columns, size, others)
                built[row], counts[row] = builder.chain(), builder.count
        failed = [columns for row, columns in found.items() if columns and built[row] is None]
        again = {name for columns in failed for name in _narrower(model, columns)}
        if not again:
            all_seen &= followed.ended and not narrow and not unknown
            break
        left |= again
    else:
        all_seen = False
    chains = []
    for chain in built.values():
        if chain is not None:
            chains.append(chain)
            row = chain.row
            inside = next((b for bs in roles.blocks for b in bs if row.startswith(b + ".")), None)
            alike = [c for c, first in copies.items() if first == inside]
            chains += [_renamed(chain, f"{inside}.", f"{other}.") for other in alike]
    uneven = [(row, n) for row, n in counts.items() if built[row] is None and n % size]
    return tuple(chains), all_seen, tuple(uneven)


def _narrower(model: nn.Module, columns: tuple[str, ...]) -> list[str]:
    """The columns with the fewest features, where others have more: heads may share these."""
    widths = {name: linear_features(model.get_submodule(name))[1] for name in columns}
    fewest = min(widths.values())
    return [name for name in columns if widths[name] == fewest != max(widths.values())]


def _bottlenecks(model: nn.Module, found: Mapping[str, tuple[str, ...]]) -> set[str]:
    """The columns of rows that are left whole: ranks would save little of them, and sum more than
    that. Without them, chains that begin at these rows are seen."""
    narrow = set[str]()
    for row, columns in found.items():
        width, out = linear_features(model.get_submodule(row))
        ins = [linear_features(model.get_submodule(name))[0] for name in columns]
        if columns and width * BOTTLENECK <= min(out, *ins):
            narrow |= {*columns}
    return narrow


def _undividable(trace: FeatureTrace, found: Mapping[str, tuple[str, ...]]) -> set[str]:
    """The columns that cannot be divided: first those that enter a row in part, without which
    others may be; then those of dead classes; then those that enter no row, or more than one."""
    classes = trace.classes
    own = {name: classes.classes(classes.of_column(name, 0)) for name in classes.columns}
    for row in (row for row, columns in found.items() if not columns):
        labels = classes.classes(torch.cat(trace.rows[row]))
        entering = {n for n, mine in own.items() if bool(torch.isin(mine, labels).any())}
        if bool(labels.all()) and entering:
            return entering
    if dead := {name for name, labels in own.items() if not bool(labels.all())}:
        return dead
    used = [column for columns in found.values() for column in columns]
    return {name for name in own if used.count(name) != 1}


def _norms(model: nn.Module) -> list[str]:
    """Modules that normalise by the root mean square."""
    return [name for name, module in model.named_modules() if rms_rule(module) is not None]


def _within_any(name: str, blocks: Iterable[str]) -> bool:
    return any(name.startswith(f"{block}.") for block in blocks)


def _alike(model: nn.Module, lists: Iterable[tuple[str, ...]]) -> dict[str, str]:
    """Block -> the first block of its list that is like it: same modules, shapes and numbers."""
    found = {}
    for blocks in lists:
        first: dict[Any, str] = {}
        for block in blocks:
            module = model.get_submodule(block)
            kind = tuple(
                (
                    name,
                    type(m),
                    tuple((n, p.shape) for n, p in m.named_parameters(recurse=False)),
                    tuple((k, v) for k, v in vars(m).items() if type(v) in (int, float, bool)),
                )
                for name, m in module.named_modules()
            )
            # the number of a layer is no difference
            kind = tuple((*k[:3], tuple(i for i in k[3] if "layer" not in i[0])) for k in kind)
            if kind in first:
                found[block] = first[kind]
            else:
                first[kind] = block
    return found


def _columns(trace: FeatureTrace, row: str) -> tuple[str, ...]:
    """The columns all features of which meet in this row; none if it cannot be divided."""
    first, *rest = (trace.classes.classes(labels) for labels in trace.rows[row])
    if not bool(first.all()) or any(not torch.equal(first, other) for other in rest):
        return ()
    known = first.unique()
    found = []
    for name in trace.classes.columns:
        inside = torch.isin(trace.classes.classes(trace.classes.of_column(name, 0)), known)
        if bool(inside.all()):
            found.append(name)
        elif bool(inside.any()):
            return ()
    return tuple(found)


def _renamed(chain: Chain, old: str, new: str) -> Chain:
    """The same chain of another block."""

    def name(text: str) -> str:
        return new + text.removeprefix(old) if text.startswith(old) else text

    return replace(
        chain,
        columns=tuple(map(name, chain.columns)),
        row=name(chain.row),
        cuts={name(linear): cut for linear, cut in chain.cuts.items()},
        entry=name(f"{chain.entry}.")[:-1] if chain.entry is not None else None,
        inner=tuple(map(name, chain.inner)),
        parameters={name(each): cut for each, cut in chain.parameters.items()},
        norms=tuple(map(name, chain.norms)),
        arguments={name(f"{module}.")[:-1]: cuts for module, cuts in chain.arguments.items()},
        attributes={
            name(f"{module}.")[:-1]: numbers for module, numbers in chain.attributes.items()
        },
    )
