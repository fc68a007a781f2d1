"""The line of the user's model that runs now, for error messages."""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

_TORCH = os.path.dirname(torch.__file__) + os.sep
_WEFT = str(Path(__file__).parents[2]) + os.sep
_DISTRIBUTIONS = os.path.join(_TORCH, "distributions", "")
CHECKPOINT = os.path.join(_TORCH, "utils", "checkpoint.py")


def user_frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_model(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    if path.startswith(_WEFT):
        return path.startswith(os.path.join(_WEFT, "nn", "models", ""))
    return not path.startswith((_TORCH, "<"))


def _is_no_model(frame: FrameType) -> bool:
    return not _is_model(frame)


def model_frames() -> Iterator[FrameType]:
    """The frames of the model's code that run now, the innermost first."""
    return filter(_is_model, user_frames())


def source_line() -> str:
    """`file:line` of the line of the model's code that runs now."""
    frame = next(model_frames(), None)
    return (
        "?" if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
    )


def source_text() -> str:
    """The text of that line."""
    frame = next(model_frames(), None)
    return (
        "" if frame is None else linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    )


def checks_arguments() -> bool:
    """Whether a distribution of torch, which that line makes or asks, looks at its arguments."""
    paths = (frame.f_code.co_filename for frame in takewhile(_is_no_model, user_frames()))
    return any(path.startswith(_DISTRIBUTIONS) for path in paths)


def quoted_line(code: CodeType, line: int) -> str:
    """The text of a line of the model's code, and where it is."""
    path = code.co_filename
    return f"`{linecache.getline(path, line).strip()}` at {os.path.basename(path)}:{line}"


def raised_in_torch(error: BaseException) -> tuple[str, tuple[Any, ...]]:
    """The text and `file:line` of the model's line that called what has raised this, and the local
    values there; none, if the model itself has raised it."""
    line, at = "?", error.__traceback__
    frame: FrameType | None = None
    while at is not None:
        frame = at.tb_frame
        if _is_model(frame):
            line, frame = quoted_line(frame.f_code, at.tb_lineno), None
        at = at.tb_next
    return line, () if frame is None else tuple(frame.f_locals.values())
