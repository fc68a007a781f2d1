"""Every layout of a number of ranks."""

from __future__ import annotations

from collections.abc import Iterator

from weft.core import Layout
from weft.parallel import allowed_options, registry


def every_layout(world: int) -> list[str]:
    """The layouts of `world` ranks, with at most one option per axis. Which of them a run can use
    is not asked here."""
    return [str(Layout.parse(text or "dp1")) for text in _over(list(registry()), world)]


def _over(axes: list[str], world: int) -> Iterator[str]:
    """Of so many ranks, over some of these axes."""
    if world == 1:
        yield ""
        return
    for i, axis in enumerate(axes):
        for size in (size for size in range(2, world + 1) if world % size == 0):
            for option in ("", *(f"+{option}" for option in allowed_options(axis))):
                for rest in _over(axes[i + 1 :], world // size):
                    yield ".".join(filter(None, (f"{axis}{size}{option}", rest)))
