"""The version of weft that runs, with its commit if it is a checkout."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def source_version() -> str:
    try:
        return version("weft")
    except PackageNotFoundError:  # run from its sources
        return "not installed"
