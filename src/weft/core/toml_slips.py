"""What is wrong with a line that is not TOML, and what to write. No torch."""

from __future__ import annotations

import re

_PLACE = re.compile(r" \(at (?:line (\d+), column \d+|end of document)\)$")
_SHOWN = 60  # characters of a line


def toml_problem(text: str, error: ValueError | RecursionError) -> str:
    """What is wrong with this text, where tomllib raised this error.

    Example:
        >>> import tomllib
        >>> try:
        ...     tomllib.loads("steps = None")
        ... except ValueError as error:
        ...     print(toml_problem("steps = None", error))
        ...     print(toml_fix("steps = None", error))
        line 1 is not TOML (Invalid value): steps = None
        leave the key out: TOML has no None
    """
    line, number, said = _slip(text, error)
    if not number:
        return f"is not TOML: {said}"
    shown = line if len(line) <= _SHOWN else f"{line[:_SHOWN]}..."
    return f"line {number} is not TOML ({said}): {shown}"


def toml_fix(text: str, error: ValueError | RecursionError) -> str:
    """What to write in place of that line."""
    line, _, said = _slip(text, error)
    key, equals, value = (part.strip() for part in line.partition("="))
    word = value.split("#")[0].strip()
    if said.startswith("Cannot declare"):
        return "write each table once, with all of its keys"
    if said.startswith("Cannot overwrite"):
        return "write each key once"
    if any(quote in line for quote in "\u201c\u201d\u2018\u2019"):
        return "use straight quotes"
    if word in ("True", "False"):
        return f"write {key} = {word.lower()}"
    if word in ("None", "null", "nil"):
        return f"leave the key out: TOML has no {word}"
    if not equals and re.match(r"[\w.-]+\s*:", line):
        return "write a table as [model], and a key as dim = 64"
    if re.fullmatch(r"[A-Za-z_./~][\w./:*~-]*", word):
        return f'put text in quotes: {key} = "{word}"'
    return "correct that line"


def _slip(text: str, error: ValueError | RecursionError) -> tuple[str, int, str]:
    """(the line, its number, what tomllib says); of no line "" and 0."""
    place = _PLACE.search(str(error))
    if place is None or place[1] is None:
        return "", 0, str(error)
    return text.split("\n")[int(place[1]) - 1].strip(), int(place[1]), str(error)[: place.start()]
