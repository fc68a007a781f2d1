"""The mutants of weft's source: all that pairs reach, and a draw of them."""

from __future__ import annotations

import importlib
import random
import re
from collections import defaultdict
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from rules import Change, changes, with_change
from traces import Line

from tests.mutants import code_of, exchanged

ROOT = Path(__file__).resolve().parents[2]
# what computes; `core` holds data, and errors, texts and checks change no number
PACKAGES = ("engine", "parallel", "pipeline", "sync", "nn", "checkpoint", "train")
LEFT_OUT = re.compile(
    r"_text|draw|_watch|_checks|metrics|trial|mixed_samples|audit|progress|_summary|_lock|listing"
)


@dataclass(frozen=True)
class Mutant:
    """A change: the `place`-th of those of its function."""

    module: str
    function: str
    place: int
    line: int
    rule: str
    old: str
    new: str

    @property
    def key(self) -> str:
        return f"{self.module}:{self.function}:{self.place}"

    @property
    def file(self) -> Path:
        return ROOT / "src" / Path(*self.module.split(".")).with_suffix(".py")

    @property
    def stands(self) -> bool:
        """Whether the source still has what is changed, where it was."""
        return self._change() is not None

    def text(self) -> str:
        """The module's text with the change."""
        change = self._change()
        assert change is not None, f"{self.key}: the source is another one now"
        return with_change(self.file.read_text(), change)

    def _change(self) -> Change | None:
        wanted = self.function, self.place, self.old, self.new
        each = changes(self.file.read_text()) if self.file.exists() else ()
        return next((c for c in each if (c.function, c.place, c.old, c.new) == wanted), None)


def in_place(mutant: Mutant | None) -> AbstractContextManager[None]:
    """In this context the process runs the mutant."""
    if mutant is None:
        return nullcontext()
    code = code_of(compile(mutant.text(), str(mutant.file), "exec"), mutant.function)
    assert code is not None, mutant
    return exchanged(importlib.import_module(mutant.module), mutant.function, code)


def all_mutants(reached: Collection[Line]) -> list[Mutant]:
    """Those of lines that are reached."""
    found = []
    for module in sorted({module for module, _ in reached}):
        path = ROOT / "src" / Path(*module.split(".")).with_suffix(".py")
        if module.split(".")[1] not in PACKAGES or LEFT_OUT.search(module) or not path.exists():
            continue
        for c in changes(path.read_text()):
            if (module, c.line) in reached:
                found.append(Mutant(module, c.function, c.place, c.line, c.rule, c.old, c.new))
    return found


def drawn(mutants: list[Mutant], count: int, seed: int) -> list[Mutant]:
    """So many of them: every wait, and of the rest the same number of each module as far as it
    goes."""
    shuffle = random.Random(seed)
    chosen = [mutant for mutant in mutants if mutant.rule == "skip a wait"]
    by_module: dict[str, list[Mutant]] = defaultdict(list)
    for mutant in mutants:
        if mutant.rule != "skip a wait":
            by_module[mutant.module].append(mutant)
    for each in by_module.values():
        shuffle.shuffle(each)
    while len(chosen) < count and any(by_module.values()):
        for each in by_module.values():
            if each and len(chosen) < count:
                chosen.append(each.pop())
    shuffle.shuffle(chosen)
    return chosen
