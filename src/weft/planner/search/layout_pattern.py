"""Layout patterns such as `pp*.tp2`: what is fixed, and what the search chooses.

As in `tp8.*`: tp8, with or without its options, and any other axes; `fsdp8+zero2.*`: this option,
too; `pp*.dp*.tp8`: these three axes alone; `dp8.tp8`: this layout, and nothing to find.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from weft.core import STAGE_AXIS, Layout, LayoutError, nearest
from weft.parallel import allowed_options, axis_table
from weft.pipeline import schedules

from ..cost.layout_batch import AXES

_PART = re.compile(r"([a-z]+)([0-9]+|\*)((?:\+[a-z0-9][a-z0-9-]*)*)")


def searched_options(axis: str) -> tuple[str, ...]:
    """The options of an axis that a search knows: schedules that need nothing of their own, and no
    second way to write another axis."""
    other_axes = axis_table().traits[axis].written_as
    known = tuple(option for option in allowed_options(axis) if option not in other_axes)
    if axis == STAGE_AXIS:
        return tuple(schedules.builtin_schedules())
    return known


@dataclass(frozen=True)
class LayoutPattern:
    """`sizes` of axes, None where any; `options` that are asked for; `more`: axes that are not
    named may be there."""

    text: str = "*"
    sizes: tuple[tuple[str, int | None], ...] = ()
    options: tuple[tuple[str, str], ...] = ()
    more: bool = True

    @classmethod
    def parse(cls, text: str, field: str = "--layout") -> Self:
        """`field`: where it stands. Raises LayoutError."""
        sizes: dict[str, int | None] = {}
        options: list[tuple[str, str]] = []
        parts = text.strip().split(".")
        for part in parts:
            if part == "*":
                continue
            match = _PART.fullmatch(part)
            if match is None:
                fix = 'write axes as in "tp8.*" or "pp*.dp*.tp8+sequence"'
                raise LayoutError(field, text, f"{part!r} is not an axis with a size", fix)
            axis, size, flags = match.groups()
            if axis not in AXES:
                raise LayoutError(field, text, f"there is no axis {axis!r}", nearest(axis, AXES))
            if axis in sizes:
                raise LayoutError(field, text, f"axis {axis} is named twice", "name each axis once")
            if size == "0":
                raise LayoutError(field, text, f"axis {axis} has size 0", "sizes start at 1")
            sizes[axis] = None if size == "*" else int(size)
            for option in flags.split("+")[1:]:
                known = searched_options(axis)
                if "*" in text and option not in known:
                    fix = nearest(option, known) if known else f"write {axis} without an option"
                    if same := axis_table().traits[axis].written_as.get(option):
                        fix = f"write {same}{size}, which is the same"
                    problem = f"the search knows no option {option!r} of {axis}"
                    raise LayoutError(field, text, problem, fix)
                options.append((axis, option))
        return cls(text.strip(), tuple(sizes.items()), tuple(options), "*" in parts)

    @property
    def exact(self) -> bool:
        """Whether it is a layout, and leaves nothing to find."""
        return "*" not in self.text

    @property
    def layout(self) -> Layout:
        """The layout that an exact pattern names. Raises LayoutError."""
        return Layout.parse(self.text)

    def fixes(self, axis: str) -> bool:
        """Whether the size of an axis is given."""
        return dict(self.sizes).get(axis) is not None

    def given(self, axis: str) -> tuple[str, ...]:
        """The options asked for of an axis."""
        return tuple(option for of, option in self.options if of == axis)

    def of(self, axis: str, divisors: list[int], exhaustive: bool = False) -> list[int]:
        """The sizes that an axis may have, of these; `exhaustive`: also of an axis that a search
        tries only where it is named."""
        sizes = dict(self.sizes)
        if (size := sizes.get(axis)) is not None:
            return [size]
        tried = axis in sizes or (self.more and (exhaustive or axis_table().traits[axis].searched))
        found = divisors if tried else [1]
        return [size for size in found if size > 1] if axis in sizes and self.given(axis) else found


ANY = LayoutPattern()
