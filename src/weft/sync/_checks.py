"""What an option of a synchroniser may be."""

from __future__ import annotations

from ..errors import ConfigError


def hold(option: str, value: object, kind: type, fits: bool, wanted: str) -> None:
    """Raises ConfigError unless the value is of this kind and fits. A whole number passes for a float."""
    numeric = kind is float and type(value) is int
    if not (type(value) is kind or numeric) or not fits:
        raise ConfigError(f"sync.{option}", value, "cannot be", f"write {wanted}")


def bucket(megabytes: float) -> int:
    """Bytes of a bucket."""
    hold("bucket_mb", megabytes, float, megabytes > 0, "a size above 0, in 2^20 bytes")
    return max(1, int(megabytes * 2**20))
