"""The CPU and memory limits that Linux control groups (versions 1 and 2) set for this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def cores(root: Path = Path("/")) -> float | None:
    """How many cores' time it may use; None: no limit."""
    limits = []
    for group in _groups(root, "cpu"):
        for said in (
            _words(group / "cpu.max"),
            _words(group / "cpu.cfs_quota_us") + _words(group / "cpu.cfs_period_us"),
        ):
            if len(said) == 2 and all(
                map(str.isdigit, said)
            ):  # for none version 2 says max, version 1 says -1
                limits.append(int(said[0]) / int(said[1]))
    return min(limits, default=None)


def memory_bytes(root: Path = Path("/")) -> int | None:
    """How much memory it may use; None: no limit."""
    words = [
        word
        for group in _groups(root, "memory")
        for name in ("memory.max", "memory.limit_in_bytes")
        for word in _words(group / name)
    ]
    limits = [int(word) for word in words if word.isdigit()]
    return min(
        (limit for limit in limits if limit < 1 << 60), default=None
    )  # version 1 says almost 2^63 for none


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of the process's group and of those above it, whose limits hold too."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        for mount in (
            "sys/fs/cgroup",
            f"sys/fs/cgroup/{controllers or 'unified'}",
            f"sys/fs/cgroup/{controller}",
        ):
            place = Path(path.lstrip("/"))
            for part in (
                place,
                *place.parents,
            ):  # in a container the path may be the host's: then only the root is there
                yield root / mount / part


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def _words(file: Path) -> list[str]:
    return " ".join(_lines(file)).split()
