"""Which lines of weft a pair runs, and in which module's forward each ran."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

from observed import observed
from subjects import Pair
from torch import nn

import weft
from weft.launch import run_replicas, run_workers
from weft.verification import compare, trained_run, training_check

Line = tuple[str, int]  # module, number
Place = tuple[str, str]  # (the first module in whose forward a line ran, the last)
INSIDE = str(Path(weft.__file__).parent)
CALL = nn.Module._call_impl.__code__


class Trace:
    """A context: the lines of weft that this thread runs; and, while a model is watched, in which
    of its modules' forwards each runs first and last."""

    def __init__(self) -> None:
        self.ran: set[Line] = set()
        self._first: dict[Line, str] = {}
        self._last: dict[Line, str] = {}
        self._before: set[Line] = set()
        self._names: dict[int, str] = {}  # of the modules that are watched, by id
        self._inside: list[str] = []

    def __enter__(self) -> Trace:
        sys.settrace(self._call)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        self._names = {id(module): name for name, module in model.named_modules()}
        yield
        self._names = {}

    def lines(self) -> set[Line]:
        return set(_with_modules(dict.fromkeys(self.ran)))

    def places(self) -> dict[Line, Place]:
        """Of lines that ran inside forwards, and not before them."""
        found = {at: (self._first[at], self._last[at]) for at in self._first.keys() - self._before}
        return _with_modules(found)

    def _call(self, frame: FrameType, event: str, argument: object) -> Any:
        code = frame.f_code
        if code is CALL and id(frame.f_locals["self"]) in self._names:
            self._inside.append(self._names[id(frame.f_locals["self"])])
            frame.f_trace_lines = False
            return self._leave
        return self._line if code.co_filename.startswith(INSIDE) else None

    def _leave(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "return":
            self._inside.pop()
        return self._leave

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        here = frame.f_code.co_filename, frame.f_lineno
        self.ran.add(here)
        if self._inside:
            self._first.setdefault(here, self._inside[-1])
            self._last[here] = self._inside[-1]
        elif self._names and not self._first:
            self._before.add(here)
        return self._line


def _with_modules(lines: dict[Line, Any]) -> dict[Line, Any]:
    """By module in place of by file."""
    modules = {m.__file__: n for n, m in list(sys.modules.items()) if n.startswith("weft.")}
    return {(modules[file], at): x for (file, at), x in lines.items() if file in modules}


def traced(pair: Pair) -> tuple[set[Line], dict[Line, Place]]:
    """The lines that a pair runs in this process and those that it starts, and their places in the
    model of the layout in the first step."""
    record_activations = compare.record_activations

    @contextmanager
    def watched(model: nn.Module, *args: Any) -> Iterator[Any]:
        with record_activations(model, *args) as trace, noted.watching(model):
            yield trace

    with tempfile.TemporaryDirectory() as folder:
        with (
            mock.patch.object(training_check, "run_workers", _Workers(folder, run_workers)),
            mock.patch.object(trained_run, "run_workers", _Workers(folder, run_workers)),
            mock.patch.object(trained_run, "run_replicas", _Workers(folder, run_replicas)),
            mock.patch.object(compare, "record_activations", watched),
            Trace() as noted,
        ):
            observed(pair)
        found = noted.lines()
        for file in Path(folder).iterdir():
            found |= {(module, line) for module, line in json.loads(file.read_text())}
    return found, noted.places()


class _Workers:
    """`start`, which is `run_workers` or `run_replicas`, whose ranks write the lines that they run
    to a folder."""

    def __init__(self, folder: str, start: Callable[..., list[Any]]):
        self.folder, self.start = folder, start

    def __call__(
        self, function: Callable[..., Any], world: Any, *args: Any, **options: Any
    ) -> list[Any]:
        return self.start(self.run, world, function, *args, **options)

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        with Trace() as noted:
            try:
                return function(*args)
            finally:
                handle, _ = tempfile.mkstemp(dir=self.folder)
                with os.fdopen(handle, "w") as file:
                    json.dump(sorted(noted.lines()), file)
