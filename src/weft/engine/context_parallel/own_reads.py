"""What a rank reads into Python of activations, of which it has its own positions, and whether that
decides which part of the forward runs: other ranks may take another path.

Ranks exchange tensors where attention runs. If one of them has left a loop by what it read, the
others would wait for it.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from types import CodeType

from weft.pipeline import model_frames, quoted_line

_LEAVES = (ast.Break, ast.Continue, ast.Return)


class OwnReads:
    """The lines of a forward at which it has read such numbers."""

    def __init__(self) -> None:
        self._lines: dict[CodeType, set[int]] = {}

    def note(self) -> None:
        """The line that runs now reads one."""
        if (frame := next(model_frames(), None)) is not None:
            self._lines.setdefault(frame.f_code, set()).add(frame.f_lineno)

    def deciding(self) -> str:
        """The line that decides whether what runs now runs at all; "" if none does."""
        for frame in model_frames() if self._lines else ():
            for line in sorted(self._lines.get(frame.f_code, ())):
                if _decides(frame.f_code, line, frame.f_lineno):
                    return quoted_line(frame.f_code, line)
        return ""


def _decides(code: CodeType, read: int, now: int) -> bool:
    """Whether a function comes to the line `now` depending on what it reads at the line `read`."""
    try:
        lines, first = inspect.getsourcelines(code)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):  # made by exec, or in an interpreter
        return False
    ast.increment_lineno(tree, max(first, 1) - 1)
    names = {
        name.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and _has(node, read)
        for target in node.targets
        for name in ast.walk(target)
        if isinstance(name, ast.Name)
    }

    def is_of_it(test: ast.expr) -> bool:
        mentions = {n.id for n in ast.walk(test) if isinstance(n, ast.Name)}
        return _has(test, read) or bool(names & mentions)

    for node in ast.walk(tree):
        inside = isinstance(node, ast.stmt) and _has(node, now)
        tests: list[ast.expr] = []
        if inside and isinstance(node, ast.If | ast.While) and not _has(node.test, now):
            tests.append(node.test)
        if inside and isinstance(node, ast.For):
            tests.append(node.iter)
        if inside and isinstance(node, ast.For | ast.While):
            tests += _tests_that_leave(node)
        if isinstance(node, ast.If) and (node.end_lineno or now) < now and _returns(node):
            tests.append(node.test)
        if any(map(is_of_it, tests)):
            return True
    return False


def _has(node: ast.stmt | ast.expr, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _returns(node: ast.If) -> bool:
    return any(isinstance(each, ast.Return) for each in ast.walk(node))


def _tests_that_leave(loop: ast.For | ast.While) -> Iterator[ast.expr]:
    """Conditions under which a loop goes on with its next round, or ends."""
    for node in ast.walk(loop):
        if isinstance(node, ast.If) and any(isinstance(n, _LEAVES) for n in ast.walk(node)):
            yield node.test
