"""Writes what `--out` names."""

from __future__ import annotations

from pathlib import Path

from weft.core import ConfigError


def write_file(path: Path, content: str) -> None:
    """Raises ConfigError for a file that cannot be written."""
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            "--out", str(path), f"cannot be written ({error})", "name another file"
        ) from None


def require_svg(path: Path) -> None:
    """Raises ConfigError for a file that is no .svg."""
    if path.suffix != ".svg":
        raise ConfigError("--out", str(path), "not a file to draw in", "name a .svg")
