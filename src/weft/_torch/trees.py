"""Trees: nested tuples, lists and dicts, as operators take them.

`torch.utils._pytree` has no public name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch.utils import _pytree

T = TypeVar("T")


def tree_map(change: Callable[[Any], Any], tree: Any) -> Any:
    """The same structure with each leaf changed."""
    return _pytree.tree_map(change, tree)


def tree_leaves(tree: Any, kind: type[T]) -> list[T]:
    """The leaves of this class, in order."""
    return [leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, kind)]


def tree_flatten(tree: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """The leaves in order, and what makes the same structure of other leaves."""
    leaves, spec = _pytree.tree_flatten(tree)
    return leaves, lambda others: _pytree.tree_unflatten(others, spec)
