"""Chains of linears that a forward shows, whatever their modules are called: columns whose output
features stay in classes of their own up to the row, and so can be divided by these classes."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import combinations
from types import CodeType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from weft._torch.tensors import FakeTensorMode, fake_mode, quiet_fake_tensors
from weft._torch.trees import tree_leaves
from weft.core import DimShard
from weft.nn import (
    Chain,
    Roles,
    chain_module,
    config_value,
    is_conv1d,
    is_linear,
    local_attributes,
    model_arguments,
    named_inputs,
    set_attribute,
)

from .axes import FEATURE_AXES
from .cut_copy import FAILS, cut_copy
from .feature_trace import FeatureMode, FeatureTrace
from .plan_request import PlanRequest

PASSES, RUNS = 8, 100  # at most: forwards of the model, and of one module


@dataclass
class _Followed:
    """A forward that was followed. calls: module -> (args, kwargs, shapes of its output)."""

    trace: FeatureTrace
    calls: dict[str, tuple[Any, Any, list[torch.Size]]] = field(default_factory=dict)


def traced_roles(request: PlanRequest, roles: Roles) -> Roles:
    """The roles, and the chains that a forward shows of linears that have none."""
    size = request.layout.size(*FEATURE_AXES)
    if size == 1 or request.sample is None:
        return roles
    chains = traced_chains(request, roles, size)
    cut = {name for chain in chains for name in (*chain.columns, chain.row)}
    kinds = {type(request.model.get_submodule(chain_module(c))).__name__ for c in chains}
    notes = [
        note
        for note in roles.notes
        if note.partition(":")[0] not in cut and note.partition(" ")[0] not in kinds
    ]
    if chains:
        notes.append(f"{len(chains)} chains of linears are found along the forward")
    return replace(roles, chains=(*roles.chains, *chains), notes=tuple(notes))


def traced_chains(request: PlanRequest, roles: Roles, size: int) -> tuple[Chain, ...]:
    """Chains of linears that are in none of `roles`, for `size` ranks. Without a sample, or where
    the forward depends on the elements of tensors, there may be none."""
    model = request.model
    linears = _free_linears(model, roles, request.roles or {})
    copies = _alike(model, roles.blocks)
    traced = {n: m for n, m in linears.items() if not any(n.startswith(b + ".") for b in copies)}
    if len(traced) < 2 or request.sample is None:
        return ()
    mode = fake_mode()
    names = request.inputs if request.inputs is not None else named_inputs(model)
    whole = cut_copy(model, model, (), size, mode)
    arguments = model_arguments(names, dict(request.sample))
    left: set[str] = set()
    for _ in range(PASSES):
        followed = _follow(whole, arguments, mode, traced, left)
        found = {row: _columns(followed.trace, row) for row in followed.trace.rows}
        used = [column for columns in found.values() for column in columns]
        again = {
            name
            for name in followed.trace.classes.columns
            if used.count(name) != 1 and name not in left
        }
        if not again:
            break
        left |= again
    else:
        return ()
    chains = []
    for row, columns in found.items():
        if not columns:
            continue
        chain = _Builder(model, followed, mode, row, columns, size).chain()
        if chain is not None:
            chains.append(chain)
            inside = next((b for bs in roles.blocks for b in bs if row.startswith(b + ".")), None)
            others = [c for c, first in copies.items() if first == inside]
            chains += [_renamed(chain, f"{inside}.", f"{other}.") for other in others]
    return tuple(chains)


def _free_linears(
    model: nn.Module, roles: Roles, declared: Mapping[str, object]
) -> dict[str, nn.Module]:
    """The linears that may be cut: in order, plain, no other module's weight, of no role."""
    used = {name for chain in roles.chains for name in (*chain.columns, chain.row)}
    used |= {*roles.heads}
    modules = dict(model.named_modules())
    owned = [n for n, m in modules.items() if isinstance(m, nn.MultiheadAttention)]
    owned += [each.module for each in roles.experts]
    weights = [id(p) for m in modules.values() for p in m.parameters(recurse=False)]
    found = {}
    for name, module in modules.items():
        above = [name[:i] for i in range(len(name)) if name[i] == "."] + [name]
        if (
            is_linear(module)
            and (type(module).forward is nn.Linear.forward or is_conv1d(module))
            and name not in used
            and not any(a in owned for a in above)
            and not any(fnmatchcase(a, pattern) for a in above for pattern in declared)
            and weights.count(id(module.weight)) == 1
        ):
            found[name] = module
    return found


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


def _follow(
    whole: nn.Module,
    arguments: Mapping[str, Any],
    mode: FakeTensorMode,
    linears: Iterable[str],
    left: set[str],
) -> _Followed:
    """One forward, with labels on what these linears make, but for those that are left whole. An
    error ends it: what it has shown by then counts."""
    followed = _Followed(FeatureTrace())
    classes = followed.trace.classes
    features = FeatureMode(followed.trace, {id(p): n for n, p in whole.named_parameters()})
    modules = {name: whole.get_submodule(name) for name in linears}

    def labels(name: str, count: int) -> Tensor | None:
        return None if name in left else classes.of_column(name, count)

    def took(name: str, args: Any, kwargs: Any, output: Any) -> None:
        shapes = [t.shape for t in tree_leaves(output, Tensor)]
        followed.calls.setdefault(name, (args, kwargs, shapes))

    handles = [
        module.register_forward_hook(
            lambda _, args, kwargs, output, n=name: took(n, args, kwargs, output), with_kwargs=True
        )
        for name, module in whole.named_modules()
        if any(linear.startswith(f"{name}." if name else "") for linear in modules)
    ]
    with suppress(*FAILS):
        with _without_elements(mode), features, features.around(modules, labels):
            whole(**arguments)
    for handle in handles:
        handle.remove()
    followed.trace.settle()
    return followed


@contextmanager
def _without_elements(mode: FakeTensorMode) -> Iterator[None]:
    with torch.random.fork_rng([]), quiet_fake_tensors(), mode, torch.no_grad():
        yield


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


class _Builder:
    """Makes a chain of what a forward has shown, and tries it."""

    def __init__(
        self,
        model: nn.Module,
        followed: _Followed,
        mode: FakeTensorMode,
        row: str,
        columns: tuple[str, ...],
        size: int,
    ):
        self.model, self.followed, self.mode, self.size = model, followed, mode, size
        order = [name for name, _ in model.named_modules()]
        self.row, self.columns = row, tuple(sorted(columns, key=order.index))
        classes = followed.trace.classes
        vector = classes.classes(followed.trace.rows[row][0])
        found = dict.fromkeys(vector.tolist())
        self.count = len(found)
        place = {label: i for i, label in enumerate(found)}
        self.features = {row: np.array([place[label] for label in vector.tolist()])}
        for name in self.columns:
            own = classes.classes(classes.of_column(name, 0)).tolist()
            self.features[name] = np.array([place[label] for label in own])
        self.labels = vector.unique()

    def chain(self) -> Chain | None:
        """None: it does not run, or computes something else, on a part."""
        if self.count % self.size:
            return None
        bare = Chain(self.columns, self.row, {}, None, ())
        scope = chain_module(bare)
        while scope not in self.followed.calls:
            if not scope:
                return None
            scope = scope.rpartition(".")[0]
        inner = self._inner(scope)
        if inner is None:
            return None
        heads = self.count if len(self.features[self.row]) > self.count else 0
        for groups in range(1, self.count // self.size + 1):
            if self.count % groups or (self.count // groups) % self.size:
                continue
            cuts = self._cuts(self.count // groups)
            if cuts is None:
                continue
            chain = Chain(
                self.columns, self.row, cuts, None, inner, heads, heads, flat=bool(heads)
            )
            for attributes in self._attributes(scope):
                tried = replace(chain, attributes=attributes)
                if self._runs(tried, scope):
                    return tried
        return None

    def _inner(self, scope: str) -> tuple[str, ...] | None:
        """Parameters that are used on cut activations. None: one is used otherwise too."""
        trace = self.followed.trace
        found = []
        for name, labels in trace.inner.items():
            if bool(torch.isin(trace.classes.classes(torch.cat(labels)), self.labels).any()):
                if name in trace.used_whole or not name.startswith(f"{scope}." if scope else ""):
                    return None
                found.append(name)
        return tuple(found)

    def _cuts(self, each: int) -> dict[str, DimShard] | None:
        """How every linear is divided, where `each` classes in a row are divided among all ranks.
        None: the classes do not lie so."""
        cuts = {}
        for name, places in self.features.items():
            group = places // each
            ends = np.flatnonzero((np.diff(places) < 0) | (np.diff(group) != 0)) + 1
            parts = np.split(places, ends)
            for part in parts:
                first = part[0] // each * each
                if len(part) % each or not np.array_equal(
                    part, np.repeat(np.arange(first, first + each), len(part) // each)
                ):
                    return None
            out = 1 if is_conv1d(self.model.get_submodule(name)) else 0
            dim = 1 - out if name == self.row else out
            cuts[name] = DimShard(dim, tuple(len(part) for part in parts), (each,) * len(parts))
        return cuts

    def _attributes(self, scope: str) -> Iterator[dict[str, tuple[tuple[str, int], ...]]]:
        """Numbers of the modules inside that a rank may have a part of: none, all, all but some."""
        wide = {len(places) for places in self.features.values()}
        width = len(self.features[self.row])
        found = []
        for name, module in self.model.get_submodule(scope).named_modules(prefix=scope):
            if name in self.features:
                continue
            for key, value in numbers_read(module):
                if value <= 0 or value % self.size:
                    continue
                if (value % self.count == 0 and width % value == 0) or value in wide:
                    found.append((name, key, value))
        subsets = [(), *(c for n in range(len(found), 0, -1) for c in combinations(found, n))]
        for chosen in subsets[:RUNS]:
            table: dict[str, list[tuple[str, int]]] = {}
            for name, key, value in chosen:
                table.setdefault(name, []).append((key, value))
            yield {name: tuple(numbers) for name, numbers in table.items()}

    def _runs(self, chain: Chain, scope: str) -> bool:
        """Whether the first rank's part of the module runs, and features meet as in the whole."""
        args, kwargs, shapes = self.followed.calls[scope]
        prefix = f"{scope}." if scope else ""
        part = cut_copy(self.model.get_submodule(scope), self.model, (chain,), self.size, self.mode)
        for name, numbers in local_attributes(chain, self.size).items():
            for key, value in numbers:
                inside = "" if name == scope else name.removeprefix(prefix)
                set_attribute(part.get_submodule(inside), key, value)
        held = {name: _kept(chain.cuts[name], self.size) for name in self.features}
        trace = FeatureTrace()
        names = {n.removeprefix(prefix): n for n in self.features}
        own = {n: part.get_submodule(n) for n in names}

        def labels(name: str, count: int) -> Tensor | None:
            if names[name] not in self.columns:
                return None
            everything = trace.classes.of_column(name, len(self.features[names[name]]))
            return everything[torch.from_numpy(held[names[name]])]

        mode = FeatureMode(trace, {})
        try:
            with _without_elements(self.mode), mode, mode.around(own, labels):
                output = part(*args, **kwargs)
        except FAILS:
            return False
        row = trace.rows.get(self.row.removeprefix(prefix))
        if row is None or [t.shape for t in tree_leaves(output, Tensor)] != shapes:
            return False
        trace.settle()
        here = [trace.classes.classes(row[0])]
        there = [self.features[self.row][held[self.row]]]
        for column in self.columns:
            every = trace.classes.of_column(column.removeprefix(prefix), 0)
            here.append(trace.classes.classes(every[torch.from_numpy(held[column])]))
            there.append(self.features[column][held[column]])
        pairs = set(zip(torch.cat(here).tolist(), np.concatenate(there).tolist(), strict=False))
        local, whole = ({pair[i] for pair in pairs} for i in (0, 1))
        return 0 not in local and len(pairs) == len(local) == len(whole)


def numbers_read(module: nn.Module) -> Iterator[tuple[str, int]]:
    """(attribute, value) of the whole numbers of a module that its methods read; "config.heads" is
    one of its configuration."""
    read = _names_read(type(module))
    for key, value in vars(module).items():
        if type(value) is int and key in read:
            yield key, value
    config = vars(module).get("config")
    if config is not None and "config" in read:
        for key in sorted(read - set(vars(module))):
            if type(value := config_value(config, key)) is int:
                yield f"config.{key}", value


@lru_cache(maxsize=4096)
def _names_read(kind: type[nn.Module]) -> frozenset[str]:
    """The names that the code of a module's methods has, but for that which makes the module."""
    names: set[str] = set()

    def gather(code: CodeType) -> None:
        names.update(code.co_names)
        for const in code.co_consts:
            if isinstance(const, CodeType):
                gather(const)

    for base in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        for name, method in vars(base).items():
            if isinstance(method, FunctionType) and name != "__init__":
                gather(inspect.unwrap(method).__code__)
    return frozenset(names)


def _kept(cut: DimShard, size: int) -> np.ndarray:
    """The features of the first rank."""
    return np.concatenate([np.arange(*interval) for interval in cut.intervals(0, size)])


def _renamed(chain: Chain, old: str, new: str) -> Chain:
    """The same chain of another block."""

    def name(text: str) -> str:
        return new + text.removeprefix(old) if text.startswith(old) else text

    return replace(
        chain,
        columns=tuple(map(name, chain.columns)),
        row=name(chain.row),
        cuts={name(linear): cut for linear, cut in chain.cuts.items()},
        inner=tuple(map(name, chain.inner)),
        attributes={name(f"{module}.")[:-1]: numbers for module, numbers in chain.attributes.items()},
    )
