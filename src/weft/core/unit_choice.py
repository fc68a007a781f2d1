"""How `[layout] fsdp_units` says which modules are gathered together."""

from __future__ import annotations

BLOCKS, WHOLE_MODEL = "blocks", "model"
# "blocks": each by itself; "model": all at once; so many blocks in a row; or globs of modules
UnitChoice = str | int | tuple[str, ...]
UNIT_CHOICES = (
    f'write "{BLOCKS}", "{WHOLE_MODEL}", a number of blocks, or a list of modules, as in'
    ' ["blocks.*", "head"]'
)


def parse_units(value: object) -> UnitChoice | None:
    """The choice that a value makes; None if it makes none."""
    if isinstance(value, list | tuple):
        return tuple(value) if value and all(isinstance(v, str) for v in value) else None
    known = value in (BLOCKS, WHOLE_MODEL) or (type(value) is int and value > 0)
    return value if known else None  # type: ignore[return-value]
