"""Whether the first name that verify gives is that of the right module."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from traces import Place

OUTPUT = re.compile(r"output of (?P<name>\S+)(?: \(rank \d+\))?$")
BACKWARD = re.compile(r"gradient of the output of (?P<name>\S+), (?:after that of (?P<after>\S+))?")
WEIGHT = re.compile(r"gradient of \S+ \(module (?P<name>\S+)\)")
STATE = re.compile(r"(?P<name>\S+)\.\w+ after (?:step 0|the last step)")

NUMBERS = ("loss of", "every gradient", "norm of")


def names_a_difference(says: str) -> bool:
    """Whether verify says that numbers differ, of a module or without one."""
    patterns = (OUTPUT, BACKWARD, WEIGHT, STATE)
    return says.startswith(NUMBERS) or any(pattern.match(says) for pattern in patterns)


def is_right(first: str, place: Place) -> bool:
    """Whether `first`, what verify says differs first, names the module of a line.

    An output: the first module in whose forward the line ran. A gradient: the last, which backward
    comes to first; or the module after it in forward, whose gradient came out right. A weight's
    gradient, or a weight or buffer: either of them. Of a module whose own output cannot be
    compared, as it is a part of a sum, the one around it is right, and one inside it, where the
    line ran before that one.
    """
    begin, end = place
    if found := BACKWARD.match(first):
        return any(_near(found[group], end) for group in ("name", "after") if found[group])
    if found := WEIGHT.match(first) or STATE.match(first):
        return _near(found["name"], end) or _near(found["name"], begin)
    if found := OUTPUT.match(first):
        return _near(found["name"], begin)
    return False


def _near(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".") or name == module.rpartition(".")[0]
