"""A formula with the values of its symbols in it."""

from __future__ import annotations

import re
from collections.abc import Mapping


def fill_formula(formula: str, values: Mapping[str, float]) -> str:
    """Write the values, of four digits, in place of their names; other words stay."""
    return re.sub(
        r"\w+", lambda word: f"{values[word[0]]:.4g}" if word[0] in values else word[0], formula
    )
