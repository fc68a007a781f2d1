"""What a check found."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

State = Literal["ok", "note", "wrong"]


@dataclass(frozen=True)
class Finding:
    """`found` in words, with figures; `advice`: what follows from it, and what to do. `facts`: the
    same for a program, in units that the keys name."""

    name: str
    state: State
    found: str
    advice: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Host:
    """What was found on one host."""

    name: str
    address: str
    findings: tuple[Finding, ...]

    def facts(self, name: str) -> dict[str, Any]:
        """Those of the finding of this name; empty if there are none."""
        return next((each.facts for each in self.findings if each.name == name), {})

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Host:
        """From what `plain` made."""
        return cls(
            plain["name"], plain["address"], tuple(Finding(**each) for each in plain["findings"])
        )


def worst(findings: Iterable[Finding]) -> State:
    """The state of all of them together."""
    states = {each.state for each in findings}
    return "wrong" if "wrong" in states else "note" if "note" in states else "ok"
