"""Changes of source text by rule: what a slip of the hand would make of it.

A rule looks at one node of the syntax tree and gives nodes that could stand in its place.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

SWAPPED: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
AXES = ("TOKEN_AXES", "DATA_AXES", "FEATURE_AXES", "STAGE_AXIS", "EXPERTS")
WAITS = ("wait", "join")
DTYPES = {"float32": "bfloat16", "float64": "float32", "int64": "int32"}
SILENT = ("UnsupportedModel", "ConfigError", "LayoutError", "ValueError", "warn", "log")


@dataclass(frozen=True)
class Change:
    """`old`, which is at `span` of the text, becomes `new`: the `place`-th change of its
    function."""

    function: str
    place: int
    line: int
    rule: str
    old: str
    new: str
    span: tuple[int, int]  # in bytes of UTF-8


def changes(text: str) -> Iterator[Change]:
    """Every change of every function of a module, in the order of the text."""
    tree = ast.parse(text)
    lengths = [len(line) for line in text.encode().splitlines(keepends=True)]
    starts = [sum(lengths[:n]) for n in range(len(lengths))]
    for name, function in _functions(tree):
        for place, (rule, node, new) in enumerate(_sites(function)):
            begin = starts[node.lineno - 1] + node.col_offset
            end = starts[node.end_lineno - 1] + node.end_col_offset
            yield Change(name, place, node.lineno, rule, ast.unparse(node), new, (begin, end))


def with_change(text: str, change: Change) -> str:
    """The text of the module with the change. Other lines stay where they are, but for those that
    the change takes up."""
    begin, end = change.span
    before, old, after = text.encode()[:begin], text.encode()[begin:end], text.encode()[end:]
    lost = old.count(b"\n") - change.new.count("\n")
    return (before + change.new.encode() + b"\\\n" * lost + after).decode()


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef) and not inner.name.startswith("__r"):
                    yield f"{node.name}.{inner.name}", inner


def _sites(function: ast.FunctionDef) -> list[tuple[str, Any, str]]:
    """(rule, node, the text in its place) of all that can be changed below this function."""
    found: list[tuple[str, Any, str]] = []
    for node in _below(function):
        for rule, new in _variants(node):
            text = ast.unparse(new)
            found.append((rule, node, text if isinstance(new, ast.stmt) else f"({text})"))
    return found


def _below(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Nodes that compute: no annotation, no error and what it says, no text."""
    waiting: list[ast.AST] = list(reversed(function.body))
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom):
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if isinstance(node, ast.Call) and _name_of(node.func) in SILENT:
            continue
        yield node
        skipped = {"annotation", "returns", "type_params", "decorator_list"}
        below = [
            child
            for field, value in ast.iter_fields(node)
            if field not in skipped
            for child in (value if isinstance(value, list) else [value])
            if isinstance(child, ast.AST)
        ]
        waiting += reversed(below)


def _variants(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        if _name_of(node.value.func) not in (*SILENT, *WAITS):
            yield "drop a call", ast.Pass()
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr in WAITS and not node.args:
            yield "skip a wait", node.func.value
        yield from _swapped_arguments(node)
    elif isinstance(node, ast.Call):
        yield from _swapped_arguments(node)
    elif isinstance(node, ast.BinOp) and type(node.op) in SWAPPED:
        yield "swap an operator", _with(node, op=SWAPPED[type(node.op)]())
        if isinstance(node.op, ast.Div | ast.FloorDiv):
            yield "drop a divisor", node.left
        if isinstance(node.op, ast.Sub | ast.Div | ast.FloorDiv | ast.MatMult):
            yield "swap operands", _with(node, left=node.right, right=node.left)
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPPED:
        yield "swap a comparison", _with(node, ops=[SWAPPED[type(node.ops[0])](), *node.ops[1:]])
    elif isinstance(node, ast.BoolOp):
        yield "swap a condition", _with(node, op=SWAPPED[type(node.op)]())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield "drop a sign", node.operand
    elif isinstance(node, ast.AugAssign) and type(node.op) in SWAPPED:
        yield "swap an operator", _with(node, op=SWAPPED[type(node.op)]())
        yield "assign in place of adding", ast.Assign([node.target], node.value, lineno=node.lineno)
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield "off by one", ast.Constant(node.value + 1)
    elif isinstance(node, ast.Constant) and type(node.value) is bool:
        yield "swap a truth", ast.Constant(not node.value)
    elif isinstance(node, ast.Name) and node.id in AXES and isinstance(node.ctx, ast.Load):
        other = AXES[(AXES.index(node.id) + 1) % 3] if node.id in AXES[:3] else None
        if other is not None:
            yield "another axis", ast.Name(other, ast.Load())
    elif isinstance(node, ast.Attribute) and node.attr in DTYPES and _name_of(node) == node.attr:
        if isinstance(node.value, ast.Name) and node.value.id == "torch":
            yield "another dtype", _with(node, attr=DTYPES[node.attr])
    elif isinstance(node, ast.IfExp):
        yield "swap branches", _with(node, body=node.orelse, orelse=node.body)


def _swapped_arguments(node: ast.Call) -> Iterator[tuple[str, ast.AST]]:
    """Two arguments, each a name: the function may not notice."""
    names = len(node.args) == 2 and all(isinstance(each, ast.Name) for each in node.args)
    if names and _name_of(node.func) not in ("isinstance", "partial"):
        yield "swap arguments", _with(node, args=node.args[::-1])


def _with(node: ast.AST, **fields: object) -> ast.AST:
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new


def _name_of(node: ast.AST) -> str:
    return getattr(node, "attr", getattr(node, "id", ""))
