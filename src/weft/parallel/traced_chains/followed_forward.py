"""A forward of a whole model on tensors without elements, with labels on what its linears make."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from weft._torch.tensors import FakeTensorMode
from weft._torch.trees import tree_leaves
from weft.nn import module_calls

from ..cut_copy import FAILS
from ..divided_arguments import named_arguments, positional_names
from ..without_elements import without_elements
from .feature_marks import FeatureTrace
from .feature_mode import FeatureMode


@dataclass(frozen=True)
class Call:
    """A call of a module.

    active: the tensors given that have a gradient.
    outputs: the tensors that it gave.
    read: the places in `outputs` of the first, and of those that are read outside of the module.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    active: list[Tensor]
    outputs: list[Tensor]
    read: list[int]


@dataclass
class Followed:
    """A forward that was followed, and the first call of each module. `ended`: no error ended it
    before."""

    trace: FeatureTrace
    ended: bool = False
    calls: dict[str, Call] = field(default_factory=dict)


def follow(
    whole: nn.Module,
    arguments: Mapping[str, Any],
    mode: FakeTensorMode,
    linears: Iterable[str],
    left: set[str],
    lists: tuple[tuple[str, ...], ...],
    norms: Iterable[str],
) -> Followed:
    """One forward, with labels on what these linears make, but for those that are left whole. An
    error ends it: what it has shown by then counts."""
    followed = Followed(FeatureTrace())
    classes = followed.trace.classes
    modules = {name: whole.get_submodule(name) for name in linears}
    normed = {name: whole.get_submodule(name) for name in norms}
    holders = [n for n in dict(whole.named_modules()) if any(within(each, n) for each in modules)]
    blocks = {block for blocks in lists for block in blocks}

    def labels(name: str, count: int) -> Tensor | None:
        return None if name in left else classes.of_column(name, count)

    def tolerated(made: str, now: str) -> bool:
        """Both in one module, which is inside of a block: its input may be where ranks part."""
        both = _common(made, now)
        return any(both.startswith(f"{block}.") for block in blocks)

    last = set[int]()  # ids of what the model gives
    with module_calls(whole) as inside:
        features = FeatureMode(followed.trace, whole, inside, tolerated)

        def took(name: str, args: Any, kwargs: Any, output: Any) -> None:
            given = tree_leaves((args, kwargs), Tensor)
            active = [t for t in given if features.marks.has_gradient(t)]
            made = tree_leaves(output, Tensor)
            followed.calls.setdefault(name, Call(args, kwargs, active, made, []))
            features.marks.take_back(name)

        handles = [
            whole.get_submodule(name).register_forward_hook(
                lambda _, args, kwargs, output, n=name: took(n, args, kwargs, output),
                with_kwargs=True,
            )
            for name in holders
        ]
        for name in (name for name in holders if name not in modules):
            names = positional_names(whole.get_submodule(name))
            handles.append(
                whole.get_submodule(name).register_forward_pre_hook(
                    lambda _, args, kwargs, n=name, names=names: features.marks.give(
                        n, named_arguments(names, args, kwargs)
                    ),
                    with_kwargs=True,
                )
            )
        around = features.around(modules, normed, labels)
        with suppress(*FAILS), without_elements(mode), around:
            last = {id(t) for t in tree_leaves(whole(**arguments), Tensor)}
            followed.ended = True
    for handle in handles:
        handle.remove()
    for name, call in followed.calls.items():
        for place, t in enumerate(call.outputs):
            outside = any(not within(reader, name) for reader in features.readers(t))
            if place == 0 or outside or id(t) in last:
                call.read.append(place)
    return followed


def within(name: str, module: str) -> bool:
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
