"""The texts of a report in English and Chinese: one catalogue, `texts.json`.

A page holds keys of it, and the browser puts the words there: so one file is in both languages.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

CATALOGUE = Path(__file__).with_name("texts.json")  # key -> [English, Chinese]

Value = Any  # a str as it is, None, or what `text` and `number` return


@cache
def load_texts() -> dict[str, list[str]]:
    """Key -> [English, Chinese]."""
    found: dict[str, list[str]] = json.loads(CATALOGUE.read_text(encoding="utf-8"))
    return found


def text(key: str, **values: Value) -> dict[str, Any]:
    """A text of the catalogue, with `values` in the places of its {names}. Raises KeyError for a
    key that the catalogue lacks."""
    load_texts()[key]
    return {"t": key, "p": values} if values else {"t": key}


def number(value: float | None, unit: str = "") -> dict[str, Any] | None:
    """A number that the browser writes as its language does. None stays None.

    Args:
        value: the number, in the base unit.
        unit: bytes, s (seconds), share (1 is 100 %), per_s, or nothing.
    """
    return None if value is None else {"n": short(value), "u": unit}


def short(value: float) -> float:
    """Seven digits: a page has many numbers."""
    return value if isinstance(value, int) else float(f"{value:.7g}")
