"""Changes to weft's own source, made in a running process: the code of a function is exchanged for
that of its changed text, in every place that has imported it."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any


@dataclass(frozen=True)
class Mutant:
    """`old`, which is once in the text of `function` ("name" or "Class.name") of a module, is `new`
    there."""

    module: str
    function: str
    old: str
    new: str


@contextmanager
def mutated(*mutants: Mutant) -> Iterator[None]:
    """In this context the process runs the mutants."""
    with ExitStack() as stack:
        for mutant in mutants:
            module = importlib.import_module(mutant.module)
            stack.enter_context(exchanged(module, mutant.function, _changed(module, mutant)))
        yield


@contextmanager
def exchanged(module: Any, name: str, code: CodeType) -> Iterator[None]:
    """In this context the function of this name runs this code."""
    function = function_of(module, name)
    before, function.__code__ = function.__code__, code
    try:
        yield
    finally:
        function.__code__ = before


def function_of(module: Any, name: str) -> FunctionType:
    """The plain function below decorators, properties and caches."""
    found: Any = module
    for part in name.split("."):
        found = inspect.getattr_static(found, part)
    while not isinstance(found, FunctionType) or hasattr(found, "__wrapped__"):
        if isinstance(found, property):
            found = found.fget
        elif isinstance(found, functools.cached_property):
            found = found.func
        else:
            found = getattr(found, "__wrapped__", None) or found.__func__
    return found


def _changed(module: Any, mutant: Mutant) -> CodeType:
    text = inspect.getsource(module)
    node = definition(ast.parse(text), mutant.function)
    lines = text.splitlines(keepends=True)
    body = "".join(lines[node.lineno - 1 : node.end_lineno])
    assert body.count(mutant.old) == 1, f"{mutant} is there {body.count(mutant.old)} times"
    lines[node.lineno - 1 : node.end_lineno] = [body.replace(mutant.old, mutant.new)]
    code = code_of(compile("".join(lines), str(module.__file__), "exec"), mutant.function)
    assert code is not None, mutant
    return code


def definition(tree: ast.Module, name: str) -> ast.FunctionDef:
    found: Any = tree
    for part in name.split("."):
        (found,) = (each for each in found.body if getattr(each, "name", None) == part)
    assert isinstance(found, ast.FunctionDef)
    return found


def code_of(compiled: CodeType, name: str) -> CodeType | None:
    """The code of a function in that of its module; None if several have the name."""
    found = compiled
    for part in name.split("."):
        inside = [c for c in found.co_consts if isinstance(c, CodeType) and c.co_name == part]
        if len(inside) != 1:
            return None
        (found,) = inside
    return found
