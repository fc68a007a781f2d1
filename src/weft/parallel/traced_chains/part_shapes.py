"""Does a tensor of a rank's part of a module have the samples and positions of the whole one?"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache

# (shape, for each dim whether the class of features changes along it)
Shapes = Collection[tuple[tuple[int, ...], tuple[bool, ...]]]


def lies_as_in(whole: Shapes, shape: tuple[int, ...]) -> bool:
    """Whether a tensor of this shape differs from one in the whole at most in the sizes of dims
    along which classes change. Dims of size 1 are not counted: one head needs none of its own."""
    own = tuple(n for n in shape if n > 1)
    return any(_matches(own, each, apart) for each, apart in whole)


@lru_cache(maxsize=65536)
def _matches(own: tuple[int, ...], whole: tuple[int, ...], apart: tuple[bool, ...]) -> bool:
    if not whole:
        return not own
    if apart[0]:
        return _matches(own, whole[1:], apart[1:]) or (
            bool(own) and _matches(own[1:], whole[1:], apart[1:])
        )
    if whole[0] == 1:
        return _matches(own, whole[1:], apart[1:])
    return bool(own) and own[0] == whole[0] and _matches(own[1:], whole[1:], apart[1:])
