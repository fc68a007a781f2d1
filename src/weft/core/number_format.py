"""Formats numbers for people."""

from __future__ import annotations


def short_number(number: float) -> str:
    """Write a number with three digits and a unit: 8.12k, 1.3M."""
    units = ["", "k", "M", "G"]
    while number >= 999.5 and len(units) > 1:
        number /= 1000
        del units[0]
    return f"{number:.3g}{units[0]}"
