"""What code of the user's raised, on one line: the exception, and the line of their file."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path

_WEFT = str(Path(__file__).resolve().parents[1]) + os.sep
_INSTALLED = tuple(
    path + os.sep
    for path in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    if path is not None
)
_STANDARD = (str(sysconfig.get_path("stdlib")) + os.sep, "<frozen ")
# As torch passes on what a process of a DataLoader raised: a message with the traceback.
_PASSED_ON = re.compile(r"^Caught \w+ in [^\n]*\nOriginal Traceback ")
_FRAME = re.compile(r'^  File "(.+)", line (\d+), in (.+)\n((?:    .*\n)*)', re.MULTILINE)

Frame = tuple[str, int, str]  # file, line, function


def fault_of(error: BaseException) -> tuple[str, str]:
    """(what was raised, on one line; where, as in "rows.py, line 12, in __getitem__"). Of no place
    where weft or torch alone ran.

    Example:
        >>> fault_of(KeyError("label"))
        ("KeyError: 'label'", '')
    """
    frames = [
        (each.filename, each.lineno or 0, each.name)
        for each in traceback.extract_tb(error.__traceback__)
    ]
    raised = f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError) and error.filename:
        frames = [(error.filename, error.lineno or 0, "<module>")]
        raised = f"{type(error).__name__}: {error.msg}"
    passed_on = str(error.args[0]) if error.args else ""
    if _PASSED_ON.match(passed_on) and (found := [*_FRAME.finditer(passed_on)]):
        frames = [(each[1], int(each[2]), each[3]) for each in found]
        raised = passed_on[found[-1].end() :]
    notes = "".join(f", {note}" for note in getattr(error, "__notes__", ()))
    return " ".join(raised.split()).removesuffix(":") + notes, _place(frames)


def told_fault(error: BaseException) -> str:
    """What was raised and where, on one line.

    Example:
        >>> told_fault(KeyError("label"))
        "KeyError: 'label'"
    """
    raised, place = fault_of(error)
    return f"{raised} ({place})" if place else raised


def _place(frames: Iterable[Frame]) -> str:
    """The innermost of the frames of the user's own files, else of an installed package's."""
    known = [frame for frame in frames if not frame[0].startswith((_WEFT, _torch(), *_STANDARD))]
    own = [frame for frame in known if not frame[0].startswith(_INSTALLED)]
    for file, line, name in reversed(own or known):
        where = "" if name == "<module>" else f", in {name}"
        return f"{_short(file)}, line {line}{where}"
    return ""


def _torch() -> str:
    module = sys.modules.get("torch")
    return "<torch>" if module is None else os.path.dirname(str(module.__file__)) + os.sep


def _short(file: str) -> str:
    """A path below the current directory, from there."""
    try:
        return str(Path(file).relative_to(Path.cwd()))
    except (OSError, ValueError):
        return file
