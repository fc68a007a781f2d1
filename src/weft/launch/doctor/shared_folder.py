"""Whether the hosts see each other's files in the run's folder, and how soon, as checkpoints
need."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from .findings import Finding
from .folder import nearest_folder
from .host_rendezvous import HostGroup

PATIENCE_S = 15.0  # NFS believes what it has seen for some seconds
POLL_S = 0.05
SOON_S = 2.0


def shared_folder(circle: HostGroup, path: Path) -> Finding:
    """Each host writes a file, and looks for those of all others; host 0 then gives one its name,
    as a checkpoint gets it."""
    # by one name on all hosts, which none has seen before
    [token] = [circle.ask("token", 0)] if circle.number else [f".weft-doctor-{time.time_ns()}"]
    if circle.number == 0:
        circle.tell("token", token)
    place = nearest_folder(path) / token
    try:
        place.mkdir(parents=True, exist_ok=True)
        unseen = _files(circle, place)
        renamed_s = _time_rename(circle, place)
        told = circle.share(
            "seen", [[circle.name(number) for number in unseen], renamed_s], 3 * PATIENCE_S
        )
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return shared_folder_finding(
        str(nearest_folder(path)),
        {circle.name(n): (unseen, late) for n, (unseen, late) in told.items()},
    )


def _files(circle: HostGroup, place: Path) -> list[int]:
    """The hosts whose file this one does not see, or not whole."""
    (place / str(circle.number)).write_text(circle.name(circle.number), encoding="utf-8")
    told = circle.share("written", True, PATIENCE_S)
    deadline, missing = time.monotonic() + PATIENCE_S, list(told)
    while missing and time.monotonic() < deadline:
        missing = [
            number for number in missing if _text(place / str(number)) != circle.name(number)
        ]
        time.sleep(POLL_S if missing else 0.0)
    return missing


def _time_rename(circle: HostGroup, place: Path) -> float | None:
    """Seconds until this host sees a file that host 0 has renamed; None if it does not."""
    new = place / "new"
    _text(new)  # it is not there, which NFS will remember
    circle.share("looked", True, 2 * PATIENCE_S)
    if circle.number == 0:
        (place / "0").rename(new)
        circle.tell("renamed", True)
    circle.ask("renamed", 0)
    began = time.monotonic()
    while _text(new) is None:
        if time.monotonic() > began + PATIENCE_S:
            return None
        time.sleep(POLL_S)
    return time.monotonic() - began


def _text(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return None


def shared_folder_finding(
    place: str, seen: Mapping[str, tuple[list[str], float | None]]
) -> Finding:
    """Of each host: those whose files it does not see, and seconds until it sees a rename."""
    blind = {name: others for name, (others, _) in seen.items() if others}
    late = {name: seconds for name, (_, seconds) in seen.items()}
    facts = {"folder": place, "unseen": blind, "rename_s": late}
    if blind:
        name, others = next(iter(blind.items()))
        found = f"{name} does not see in {place} what {', '.join(others)} wrote"
        advice = (
            "checkpoints need one folder that all hosts see (NFS, Lustre): name it in output, or"
            " mount it"
        )
        return Finding("shared folder", "wrong", found, advice, facts)
    unrenamed = [name for name, seconds in late.items() if seconds is None]
    if unrenamed:
        found = (
            f"a file that host 0 renames in {place} is not seen on {', '.join(unrenamed)} within"
            f" {PATIENCE_S:g} s"
        )
        return Finding(
            "shared folder", "wrong", found, "mount it with a shorter cache: NFS's actimeo=1", facts
        )
    slowest = max(seconds for seconds in late.values() if seconds is not None)
    found = (
        f"all {len(seen)} hosts see each other's files in {place}, a rename within"
        f" {max(slowest, POLL_S):.2g} s"
    )
    if slowest > SOON_S:
        advice = (
            "hosts see a new checkpoint that much later; mount NFS with actimeo=1 to shorten it"
        )
        return Finding("shared folder", "note", found, advice, facts)
    return Finding("shared folder", "ok", found, "", facts)
