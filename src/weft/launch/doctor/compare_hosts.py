"""Whether hosts are alike enough for one run."""

from __future__ import annotations

from collections.abc import Sequence

from .findings import Finding, Host, State

MUST = ("torch", "weft", "cuda", "nccl", "transformers")


def versions(hosts: Sequence[Host]) -> Finding:
    """That of torch and weft must be one; that of Python should, but for its last number."""
    state: State = "ok"
    unlike = []
    for name in ("python", *MUST):
        found: dict[str, list[str]] = {}
        for host in hosts:
            version = str(host.facts("versions").get(name) or "none")
            found.setdefault(
                version.rpartition(".")[0] if name == "python" else version, []
            ).append(host.name)
        if len(found) > 1:
            state = "wrong" if name in ("torch", "weft") or state == "wrong" else "note"
            unlike.append(
                f"{name} "
                + ", ".join(f"{version} on {_some(names)}" for version, names in found.items())
            )
    if not unlike:
        return Finding("same versions", "ok", f"all {len(hosts)} hosts have the same")
    advice = "install the same on all hosts: ranks must compute the same and send the same messages"
    return Finding("same versions", state, "; ".join(unlike), advice)


def gpus(hosts: Sequence[Host]) -> Finding | None:
    """The same number and kind on each; None where no host has any."""
    found: dict[str, list[str]] = {}
    for host in hosts:
        names = [each["name"] for each in host.facts("gpus").get("gpus", ())]
        text = ", ".join(f"{names.count(name)} x {name}" for name in sorted(set(names))) or "none"
        found.setdefault(text, []).append(host.name)
    if set(found) == {"none"}:
        return None
    if len(found) == 1:
        return Finding("same GPUs", "ok", f"{next(iter(found))} on each host")
    shown = "; ".join(f"{text} on {_some(names)}" for text, names in found.items())
    return Finding(
        "same GPUs",
        "note",
        shown,
        "a run has as many ranks on each host, so the slowest host sets the pace",
    )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
