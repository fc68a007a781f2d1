"""Every error that weft raises on purpose.

    WeftError
    ├── Refusal                  a request that cannot be met, before any process starts; exit 2
    │   ├── ConfigError          a key or value of RUN.toml or of the command line
    │   ├── LayoutError          a layout that does not parse, fit the world, or divide the batch
    │   ├── UnsupportedModel     a model that a strategy cannot divide
    │   │   ├── NeedsData        ... but might, if it were built with weights
    │   │   └── NothingToDivide  ... and others may
    │   ├── CheckpointError      a truncated, foreign or mismatched checkpoint
    │   └── DataError            a missing or unreadable dataset
    └── WorkerDied               a process of the run failed; carries that worker's error; exit 1

A Refusal names the field, the value and what would work.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from .files import printable
from .old_names import RENAMED

MANY = 100  # words that nobody reads
LINES = "\n\t"  # what a message may have beside what is printed
# sysexits.h's EX_TEMPFAIL: try again later, which a job's script may take as a reason to requeue
STOPPED = 75

# The variable under which a run file that names code of others than weft is refused.
NO_CODE = "WEFT_NO_CODE"


class WeftError(Exception):
    """Base of all errors raised by weft."""

    exit_code = 1


class Refusal(WeftError):
    """A request that cannot be met.

    Attributes:
        field: The key, option or argument at fault.
        value: Its value.
        problem: Why it cannot be used.
        fix: What the user can write instead.
    """

    exit_code = 2

    def __init__(self, field: str, value: object, problem: str, fix: str):
        self.field, self.value, self.problem, self.fix = field, value, problem, fix
        fix = fix[:1].upper() + fix[1:].rstrip(".")
        said = f"{field} = {value!r}: {problem}. {fix}" + ("" if fix.endswith("?") else ".")
        super().__init__(printable(said, LINES))  # names in it may be another's

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled by what it says: a value may be anything."""
        value = self.value if isinstance(self.value, str | int | float | None) else repr(self.value)
        return type(self), (self.field, value, self.problem, self.fix)


class ConfigError(Refusal):
    """A key or value of RUN.toml or of the command line."""


class LayoutError(Refusal):
    """A layout that does not parse, does not fit the world, or does not divide the batch."""


class UnsupportedModel(Refusal):
    """A strategy on a model that it cannot cut."""


class NeedsData(UnsupportedModel):
    """A model without weights, whose forward asks for elements of a tensor."""


class NothingToDivide(UnsupportedModel):
    """A model in which an axis finds nothing to divide.

    Attributes:
        others: Axes that may take it, if not those that divide samples alone. Where the fix says
            `{others}`, `naming` names those that do.
    """

    others: tuple[str, ...] = ()

    def naming(self, others: str) -> UnsupportedModel:
        """The refusal, whose fix says this of other layouts."""
        fix = self.fix.replace("{others}", others)
        return UnsupportedModel(self.field, self.value, self.problem, fix)


class CheckpointError(Refusal):
    """A truncated, foreign or mismatched checkpoint."""


class DamagedCheckpoint(CheckpointError):
    """A file of a checkpoint is not what was written: an older checkpoint may do."""


class DataError(Refusal):
    """A missing or unreadable dataset."""


class WorkerDied(WeftError):
    """A process of the run failed. `rank` says which; `report` is that worker's own error. `meant`:
    weft itself ended it; `stopped`: the run had been told to stop; `name`: what its user calls it;
    `fault`: the error on one line, if code of the user's raised it."""

    def __init__(
        self, rank: int, report: str, meant: bool = False, name: str = "", fault: str = ""
    ):
        self.rank, self.report, self.meant, self.stopped = rank, report, meant, False
        self.fault = fault
        self.who = f"rank {rank}, {name}," if name else f"rank {rank}"
        super().__init__(f"{self.who} died:\n{report.rstrip()}")


def either(names: Sequence[str]) -> str:
    """One of these, in words: `a, b or c`."""
    *most, last = names
    return " or ".join(filter(None, (", ".join(most), last)))


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint for an unknown word: `did you mean "steps"?`, or the known words; of very many those
    most like it."""
    words = sorted(known)
    if not words:
        return "there is none to name"
    if RENAMED.get(word) in words:
        return f'it is now called "{RENAMED[word]}"'
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.6)
    if close:
        return f'did you mean "{close[0]}"?'
    if len(words) > MANY:
        return f"the nearest of {len(words)}: " + ", ".join(
            difflib.get_close_matches(word, words, n=5, cutoff=0)
        )
    return "known: " + ", ".join(words)


def check_renamed(option: str) -> None:
    """Raises ConfigError for the old name of an option of the command line."""
    if option.startswith("--") and option in RENAMED:
        now = RENAMED[option]
        raise ConfigError("option", option, f"is now called {now}", f"write {now}")


def require(field: str, value: object, kind: type, fits: Callable[..., bool], wanted: str) -> None:
    """Refuse a value that is not of this type, not finite, or out of range.

    Args:
        field: What the error names.
        value: The value.
        kind: Its type; an int is accepted as a float.
        fits: Whether a value of this type is in range.
        wanted: What the error tells the user to write.

    Raises:
        ConfigError: The value cannot be used.
    """
    passes = type(value) is kind or (kind is float and type(value) is int)
    if not passes or (isinstance(value, float) and not math.isfinite(value)) or not fits(value):
        raise ConfigError(field, value, "is not allowed", f"write {wanted}")


def require_known(
    table: str,
    arguments: Mapping[str, Any],
    known: Collection[str],
    what: str,
    keys: Collection[str] = (),
) -> None:
    """Refuse arguments whose key is not known.

    Args:
        table: The table of the run file, which the error names with the key.
        arguments: The keys and values that are given.
        known: The keys that there are.
        what: What a key is called, as in "argument of adamw".
        keys: The table's own keys, one of which may be meant.

    Raises:
        ConfigError: A key is not known; it names the nearest one.
    """
    for key, value in arguments.items():
        if key not in known:
            meant = [*known, *difflib.get_close_matches(key, keys, n=1, cutoff=0.6)]
            raise ConfigError(
                f"{table}.{key}",
                value,
                f"is not a known {what}",
                nearest(key, meant) if meant else "leave it out",
            )
