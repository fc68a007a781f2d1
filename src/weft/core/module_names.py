"""Names of modules: which lies inside of which."""

from __future__ import annotations


def is_inside(module: str, outer: str) -> bool:
    """Whether a module is the other, or in it; all are in the root, which has no name."""
    return not outer or module == outer or module.startswith(outer + ".")
