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
    linear_features,
    local_attributes,
    model_arguments,
    module_calls,
    named_inputs,
    set_attribute,
)

from .axes import FEATURE_AXES
from .cut_copy import FAILS, cut_copy
from .feature_trace import FeatureMode, FeatureTrace, Meeting, varies
from .plan_request import PlanRequest

PASSES, OPERATORS = 12, 100_000  # at most: forwards of the model; of the runs of one module
BOTTLENECK = 4  # times narrower than what it reads and makes, linears are left whole


@dataclass(frozen=True)
class _Call:
    """A call of a module: what it was given, the shapes of what it gave, and the tensors given that
    have a gradient."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shapes: list[torch.Size]
    active: list[Tensor]


@dataclass
class _Followed:
    """A forward that was followed, and the first call of each module."""

    trace: FeatureTrace
    calls: dict[str, _Call] = field(default_factory=dict)


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
        followed = _follow(whole, arguments, mode, traced, left, roles.blocks)
        found = {row: _columns(followed.trace, row) for row in followed.trace.rows}
        again = _undividable(followed.trace, found) - left
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
    lists: tuple[tuple[str, ...], ...],
) -> _Followed:
    """One forward, with labels on what these linears make, but for those that are left whole. An
    error ends it: what it has shown by then counts."""
    followed = _Followed(FeatureTrace())
    classes = followed.trace.classes
    modules = {name: whole.get_submodule(name) for name in linears}
    holders = [n for n in dict(whole.named_modules()) if any(_within(each, n) for each in modules)]
    blocks = {block for blocks in lists for block in blocks}

    def labels(name: str, count: int) -> Tensor | None:
        return None if name in left else classes.of_column(name, count)

    def tolerated(made: str, now: str) -> bool:
        """Both in one module, which is inside of a block: its input may be where ranks part."""
        both = _common(made, now)
        return any(both.startswith(f"{block}.") for block in blocks)

    with module_calls(whole) as inside:
        features = FeatureMode(followed.trace, whole, inside, tolerated)

        def took(name: str, args: Any, kwargs: Any, output: Any) -> None:
            given = tree_leaves((args, kwargs), Tensor)
            active = [t for t in given if features.has_gradient(t)]
            shapes = [t.shape for t in tree_leaves(output, Tensor)]
            followed.calls.setdefault(name, _Call(args, kwargs, shapes, active))

        handles = [
            whole.get_submodule(name).register_forward_hook(
                lambda _, args, kwargs, output, n=name: took(n, args, kwargs, output),
                with_kwargs=True,
            )
            for name in holders
        ]
        with suppress(*FAILS):
            with _without_elements(mode), features.around(modules, labels):
                whole(**arguments)
    for handle in handles:
        handle.remove()
    return followed


def _within(name: str, module: str) -> bool:
    """Whether a module is inside of another, or the other itself."""
    return not module or name == module or name.startswith(f"{module}.")


def _common(one: str, other: str) -> str:
    """The innermost module that holds both."""
    same = []
    for a, b in zip(one.split("."), other.split("."), strict=False):
        if a != b:
            break
        same.append(a)
    return ".".join(same)


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
        self.place = place = {each: i for i, each in enumerate(dict.fromkeys(vector.tolist()))}
        self.count = len(place)
        self.features = {row: np.array([place[label] for label in vector.tolist()])}
        for name in self.columns:
            own = classes.classes(classes.of_column(name, 0)).tolist()
            self.features[name] = np.array([place[label] for label in own])
        self.labels = vector.unique()
        self.operators = 0

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
        width = len(self.features[self.row])
        if width * BOTTLENECK <= min(self._widths()):
            return None  # a rank would save little, and sum more than that
        parameters = self._parameters(scope)
        if parameters is None:
            return None
        inner, divided = parameters
        entry = self._entry(scope)
        if entry is None:
            return None
        heads = self.count if width > self.count else 0
        chain = Chain(
            self.columns, self.row, {}, entry or None, inner, heads, heads, flat=bool(heads)
        )
        for groups in range(1, self.count // self.size + 1):
            if self.count % groups or (self.count // groups) % self.size:
                continue
            cuts = self._cuts({**self.features, **divided}, self.count // groups)
            if cuts is None:
                continue
            if not self._drops_well(groups == 1):
                return None
            own = {name: cuts.pop(name) for name in divided}
            tried = replace(chain, cuts=cuts, parameters=own)
            module = self.model.get_submodule(scope)
            part = cut_copy(module, self.model, (tried,), self.size, self.mode)
            for attributes in self._attributes(scope):
                if self.operators > OPERATORS:
                    return None
                tried = replace(tried, attributes=attributes)
                with self._numbers(part, tried, scope):
                    if (made := self._tried(part, tried, scope)) is not None:
                        return made
        return None

    def _widths(self) -> Iterator[int]:
        for name in (*self.columns, self.row):
            yield linear_features(self.model.get_submodule(name))[name == self.row]

    def _parameters(self, scope: str) -> tuple[tuple[str, ...], dict[str, np.ndarray]] | None:
        """Parameters that are used whole on cut activations, and those that are divided: the class
        of each of their elements. None: one is used otherwise too."""
        trace = self.followed.trace
        inner = [
            name
            for name, labels in trace.inner.items()
            if bool(torch.isin(trace.classes.classes(torch.cat(labels)), self.labels).any())
        ]
        divided = {}
        for name, found in trace.parts.items():
            classes = trace.classes.classes(found)
            if bool(torch.isin(classes, self.labels).any()):
                if not bool((torch.isin(classes, self.labels) | (classes == 0)).all()):
                    return None
                divided[name] = np.array([self.place.get(each, -1) for each in classes.tolist()])
        for name in (*inner, *divided):
            if name in trace.used_whole or not _within(name, scope):
                return None
        return None if {*inner} & {*divided} else (tuple(inner), divided)

    def _entry(self, scope: str) -> str | None:
        """The module in which activations that each rank has whole meet cut ones: its input is
        where ranks part. "": they meet none. None: it cannot be that module."""
        met = [
            meeting
            for meeting in self.followed.trace.meetings
            if meeting.mark.active and bool(torch.isin(self._classes(meeting), self.labels).any())
        ]
        if not met:
            return ""
        call = self.followed.calls[scope]
        first = next(iter(tree_leaves((call.args, call.kwargs), Tensor)), None)
        inside = all(_within(m.mark.made, scope) and _within(m.now, scope) for m in met)
        alone = len(call.active) == 1 and call.active[0] is first
        return scope if scope and inside and alone else None

    def _classes(self, meeting: Meeting) -> Tensor:
        return self.followed.trace.classes.classes(meeting.labels)

    def _cuts(self, features: Mapping[str, np.ndarray], each: int) -> dict[str, DimShard] | None:
        """How each linear and parameter is divided, where `each` classes in a row are divided among
        all ranks. None: the classes do not lie so.

        Args:
            features: linear -> the class of each feature that is cut; parameter -> of each element.
        """
        cuts = {}
        for name, found in features.items():
            dim, places = 0, found
            if name not in self.features:
                dim, places = along(found.reshape(self.model.get_parameter(name).shape))
                if dim < 0:
                    return None
            group = places // each
            ends = np.flatnonzero((np.diff(places) < 0) | (np.diff(group) != 0)) + 1
            parts = np.split(places, ends)
            for part in parts:
                first = part[0] // each * each
                if len(part) % each or not np.array_equal(
                    part, np.repeat(np.arange(first, first + each), len(part) // each)
                ):
                    return None
            if name in self.features:
                out = 1 if is_conv1d(self.model.get_submodule(name)) else 0
                dim = 1 - out if name == self.row else out
            cuts[name] = DimShard(dim, tuple(len(part) for part in parts), (each,) * len(parts))
        return cuts

    def _attributes(self, scope: str) -> Iterator[dict[str, tuple[tuple[str, int], ...]]]:
        """Numbers of the modules inside that a rank may have a part of: none, all, all but some.
        Sizes along which classes change, and those of linears, are such numbers."""
        sizes = {len(places) for places in self.features.values()} | self._sizes()
        found = []
        for name, module in self.model.get_submodule(scope).named_modules(prefix=scope):
            if name not in self.features:
                numbers = [(k, v) for k, v in numbers_read(module) if v > 0 and v % self.size == 0]
                found += [(name, key, value) for key, value in numbers if value in sizes]
        yield {}
        for count in range(len(found), 0, -1):
            for chosen in combinations(found, count):
                table: dict[str, list[tuple[str, int]]] = {}
                for name, key, value in chosen:
                    table.setdefault(name, []).append((key, value))
                yield {name: tuple(numbers) for name, numbers in table.items()}

    def _sizes(self) -> set[int]:
        """Of the dims along which these classes change."""
        sizes = set()
        for labels in self.followed.trace.seen:
            found = self.followed.trace.classes.classes(labels)
            if bool(torch.isin(found, self.labels).any()):
                sizes |= {n for dim, n in enumerate(found.shape) if varies(found, dim)}
        return sizes

    def _drops_well(self, one_run: bool) -> bool:
        """Whether the masks of dropout can be those of one device: heads in dim 1 of 4, or beside
        samples in dim 0 of 3; features in the last dim.

        Args:
            one_run: whether each rank has neighbouring classes.
        """
        for labels in self.followed.trace.dropped:
            found = self.followed.trace.classes.classes(labels)
            if not bool(torch.isin(found, self.labels).any()):
                continue
            dims = [dim for dim in range(found.ndim) if varies(found, dim)]
            heads = len(self.features[self.row]) > self.count
            want = {4: 1, 3: 0}.get(found.ndim, found.ndim - 1) if heads else found.ndim - 1
            if not one_run or dims not in ([], [want], [found.ndim - 1] if found.ndim < 4 else []):
                return False
        return True

    @contextmanager
    def _numbers(self, part: nn.Module, chain: Chain, scope: str) -> Iterator[None]:
        """In this context, modules of the part have the rank's numbers of heads and features."""
        before = []
        for name, numbers in local_attributes(chain, self.size).items():
            module = part.get_submodule(_inside(name, scope))
            before.append((module, {key: vars(module).get(key) for key, _ in numbers}))
            before[-1][1].update({"config": vars(module).get("config")})
            for key, value in numbers:
                set_attribute(module, key, value)
        yield
        for module, held in before:
            vars(module).update({key: value for key, value in held.items() if key in vars(module)})

    def _tried(self, part: nn.Module, chain: Chain, scope: str) -> Chain | None:
        """The chain, with all parameters that each rank has whole and uses on its part, if the
        first rank's part of the module runs, and features meet in it as in the whole."""
        call = self.followed.calls[scope]

        def inside(name: str) -> str:
            return _inside(name, scope)

        held = {name: torch.from_numpy(_kept(chain.cuts[name], self.size)) for name in self.features}
        names = {inside(n): n for n in self.features}
        trace = FeatureTrace()

        def labels(name: str, count: int) -> Tensor | None:
            column = names[name]
            if column == self.row:
                return None
            return trace.classes.of_column(name, len(self.features[column]))[held[column]]

        mode = FeatureMode(trace, part, [], lambda made, now: True)
        try:
            own = {name: part.get_submodule(name) for name in names}
            with _without_elements(self.mode), mode.around(own, labels):
                mode.enter(call.active)
                output = part(*call.args, **call.kwargs)
                outputs = tree_leaves(output, Tensor)
        except FAILS:
            return None
        finally:
            self.operators += trace.operators
        row = trace.rows.get(inside(self.row))
        # others may be weights of attention, which nobody reads
        if row is None or [t.shape for t in outputs[:1]] != call.shapes[:1]:
            return None
        here = [trace.classes.classes(row[0])]
        there = [self.features[self.row][held[self.row]]]
        for column in self.columns:
            every = trace.classes.of_column(inside(column), 0)
            here.append(trace.classes.classes(every[held[column]]))
            there.append(self.features[column][held[column]])
        pairs = set(zip(torch.cat(here).tolist(), np.concatenate(there).tolist(), strict=True))
        local, whole = ({pair[i] for pair in pairs} for i in (0, 1))
        if 0 in local or not len(pairs) == len(local) == len(whole):
            return None
        if chain.entry is None:
            return chain
        if trace.before & trace.after or any(mode.has_entered(t) for t in outputs):
            return None  # gradients of a part of the sum, and of the sum, would be added
        ways = {f"{name}.{key}" for name in self.features for key in ("weight", "bias")}
        whole_there = [f"{scope}.{name}" for name in sorted(trace.before)]
        more = [n for n in whole_there if n not in chain.parameters and n not in ways]
        return replace(chain, inner=tuple(dict.fromkeys((*chain.inner, *more))))


def along(classes: np.ndarray) -> tuple[int, np.ndarray]:
    """(the dim along which the class of a parameter's elements changes, the classes along it). Dim
    -1: more than one does. -1 is no class."""
    for dim in range(classes.ndim):
        rows = np.moveaxis(classes, dim, 0).reshape(classes.shape[dim], -1)
        most = rows.max(axis=1)
        if ((rows == most[:, None]) | (rows == -1)).all() and (most >= 0).all():
            return dim, most
    return -1, classes


def _inside(name: str, scope: str) -> str:
    """The name of a module of the scope in it."""
    return "" if name == scope else name.removeprefix(f"{scope}." if scope else "")


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


_NOT_FORWARD = ("__init__", "__repr__", "extra_repr", "reset_parameters")


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
            if isinstance(method, FunctionType) and name not in _NOT_FORWARD:
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
        entry=name(f"{chain.entry}.")[:-1] if chain.entry is not None else None,
        inner=tuple(map(name, chain.inner)),
        parameters={name(each): cut for each, cut in chain.parameters.items()},
        attributes={name(f"{module}.")[:-1]: numbers for module, numbers in chain.attributes.items()},
    )
