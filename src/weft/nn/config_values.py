"""What a module's configuration says, whatever kind of configuration it is."""

from __future__ import annotations

from typing import Any


def config_value(config: object, key: str) -> Any:
    """An attribute of a configuration. None: it has none, or none that holds for every layer."""
    try:
        return getattr(config, key, None)
    except Exception:  # transformers: layers differ, and its error is no AttributeError
        return None
