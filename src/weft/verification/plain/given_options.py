"""Whether what weft made of a table of the run file has the options that stand there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def option_faults(table: str, made: Any, asked: Mapping[str, Any]) -> list[str]:
    """The options that an object does not have as they are asked for.

    Args:
        table: of the run file.
        made: has each option as an attribute.
        asked: name -> value, as the run file has it.
    """
    return [
        f"{table} {key}: {getattr(made, key)}, where {value} is asked for"
        for key, value in asked.items()
        if _flat(getattr(made, key)) != _flat(value)
    ]


def _flat(value: Any) -> Any:
    """With lists, however deep, as tuples."""
    if isinstance(value, Mapping):
        return {key: _flat(one) for key, one in value.items()}
    return tuple(map(_flat, value)) if isinstance(value, list | tuple) else value
