"""What an option of a codec may be."""

from __future__ import annotations

from ..errors import ConfigError


def hold(option: str, value: object, kind: type, fits: bool, wanted: str) -> None:
    """Raises ConfigError unless the value is of this kind and fits. A whole number passes for a float."""
    numeric = kind is float and type(value) is int
    if not (type(value) is kind or numeric) or not fits:
        raise ConfigError(f"sync.codec.{option}", value, "cannot be", f"write {wanted}")
