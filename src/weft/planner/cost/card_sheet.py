"""The hardware sheet of a card, by the name that its driver gives."""

from __future__ import annotations

import re

from .hardware import sheet_names

KIN = {
    "laptop",
    "d",
    "nvl",
    "3e",
}  # in the name of a card that is unlike the one of the rest of its name


def sheet_of_card(title: str) -> str | None:
    """The sheet whose words are all among those of a card's name, as a driver gives it: the one of
    most of them. None for a card that is another one's kin, or two sheets' alike."""
    words = set(re.sub(r"(\d)gb?\b", r"\1", title.lower().replace("-", " ")).split())
    known = {name: len(name.split("-")) for name in sheet_names() if set(name.split("-")) <= words}
    best = [name for name, count in known.items() if count == max(known.values())]
    return best[0] if len(best) == 1 and not words & KIN else None
