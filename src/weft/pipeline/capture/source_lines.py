"""The line of the user's model that runs now, for error messages."""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch

_TORCH = os.path.dirname(torch.__file__) + os.sep
_WEFT = str(Path(__file__).parents[2]) + os.sep
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


def source_line() -> str:
    """`file:line` of the line of the model's code that runs now."""
    frame = next(filter(_is_model, user_frames()), None)
    return (
        "?" if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
    )


def source_text() -> str:
    """The text of that line."""
    frame = next(filter(_is_model, user_frames()), None)
    return (
        "" if frame is None else linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    )
