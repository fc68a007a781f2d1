"""Parts: which axes of a layout divide the weights of a submodule. Pure data; no torch.

    [layout]
    axes = "fsdp2.tp2"
    [layout.parts]
    "vision" = "fsdp"              # whole under tp, and sharded by fsdp
    "head" = "tp"                  # divided by tp, and replicated over the ranks of fsdp
    "norm" = "whole"               # every rank holds it
    "text.embedding" = "fsdp+tp"   # rows over the ranks of fsdp and tp together

Every weight in a module that a pattern matches belongs to that part; of several patterns the first
one holds. A weight in no part is divided by every axis that can.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from .errors import ConfigError
from .layout import Layout

WHOLE = "whole"  # no axis divides it


@dataclass(frozen=True)
class PartAxes:
    """The value of a line. `str` and `parse` are inverse.

    Args:
        axes: divide the part, each in its own way.
        beside: axes over whose ranks the first of `axes` shards rows too.

    Example:
        >>> PartAxes.parse("head", "fsdp+tp")
        PartAxes(axes=('fsdp',), beside=('tp',))
    """

    axes: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()

    @classmethod
    def parse(cls, pattern: str, text: object) -> PartAxes:
        """What the value of the line `pattern` says. Raises ConfigError."""
        if text == WHOLE:
            return cls()
        names = text.split(".") if isinstance(text, str) else [""]
        (first, *beside), *rest = (name.split("+") for name in names)
        every = [first, *beside, *(name for names in rest for name in names)]
        if any(len(names) > 1 for names in rest) or not all(
            name.isalpha() and name != WHOLE for name in every
        ):
            raise ConfigError(
                field_of_part(pattern),
                text,
                "does not name axes that can divide the part",
                'write axes without sizes, as in "fsdp.tp" or "fsdp+tp", or "whole"',
            )
        if len(set(every)) < len(every):
            raise ConfigError(field_of_part(pattern), text, "names an axis twice", "name each once")
        return cls((first, *(names[0] for names in rest)), tuple(beside))

    def __str__(self) -> str:
        if not self.axes:
            return WHOLE
        return ".".join(("+".join((self.axes[0], *self.beside)), *self.axes[1:]))

    def within(self, layout: Layout) -> PartAxes:
        """What is left of it on a layout where some of its axes have one rank."""
        live = layout.active_axes()
        beside = self.beside if self.axes[:1] and self.axes[0] in live else ()
        return PartAxes(
            tuple(axis for axis in self.axes if axis in live),
            tuple(axis for axis in beside if axis in live),
        )


@dataclass(frozen=True)
class Part:
    """The modules and weights of one line on a model.

    Args:
        pattern: a glob over names of modules; `*` also matches dots.
        placed: which axes divide the weights.
        modules: those that belong to it with all that is in them, outermost ones alone.
        weights: first names of its parameters.
    """

    pattern: str
    placed: PartAxes
    modules: tuple[str, ...]
    weights: frozenset[str]


def field_of_part(pattern: str) -> str:
    """What an error calls the line of a part."""
    return f'layout.parts."{pattern}"'


def parts_within(parts: Mapping[str, str], layout: Layout) -> dict[str, str]:
    """The lines, less the axes that have no two ranks in this layout. Raises ConfigError."""
    return {p: str(PartAxes.parse(p, value).within(layout)) for p, value in parts.items()}


def line_of(module: str, patterns: Iterable[str]) -> str | None:
    """The first pattern that matches a module, or one around it; None if none does."""
    names = [module]
    while names[-1]:
        names.append(names[-1].rpartition(".")[0])
    return next((p for p in patterns if any(fnmatchcase(name, p) for name in names)), None)
