"""Globs of names of parameters."""

from __future__ import annotations

import fnmatch
import re


def matches(pattern: str, name: str) -> bool:
    """Whether a glob matches the whole of a name."""
    return re.match(fnmatch.translate(pattern), name) is not None
