"""Changes of source text by rule: what a slip of the hand would make of it.

A rule looks at one node of the syntax tree and gives nodes that could stand in its place.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType

from tests.mutants import code_of

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
DTYPES = {"float32": "bfloat16", "float64": "float32", "int64": "int32"}
SILENT = ("UnsupportedModel", "ConfigError", "LayoutError", "ValueError", "warn", "log")


@dataclass(frozen=True)
class Change:
    """`old` in line `line` of a function becomes `new`; `code` is that of the function then, where
    it was asked for."""

    function: str
    line: int
    rule: str
    old: str
    new: str
    code: CodeType | None


def changes(
    text: str, path: str, only: tuple[str, int] | None = None, compiled: bool = True
) -> Iterator[Change]:
    """Every change of every function of a module, in the order of the text. `only`: (function,
    number of its change)."""
    tree = ast.parse(text)
    for name, function in _functions(tree):
        if only is not None and name != only[0]:
            continue
        for place, (rule, node, new) in enumerate(_sites(function)):
            if only is not None and place != only[1]:
                continue
            code = None
            if compiled:
                code = code_of(compile(_replaced(tree, name, place), path, "exec"), name)
            yield Change(name, getattr(node, "lineno", 0), rule, ast.unparse(node), new, code)


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef) and not inner.name.startswith("__r"):
                    yield f"{node.name}.{inner.name}", inner


def _sites(function: ast.FunctionDef) -> list[tuple[str, ast.AST, str]]:
    """(rule, node, the text in its place) of all that can be changed below this function."""
    found: list[tuple[str, ast.AST, str]] = []
    for node in _below(function):
        found += [(rule, node, ast.unparse(new)) for rule, new in _variants(node)]
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
        name = _name_of(node.value.func)
        if name not in SILENT:
            yield "skip a wait" if name == "wait" else "drop a call", ast.Pass()
    elif isinstance(node, ast.BinOp) and type(node.op) in SWAPPED:
        yield "swap an operator", _with(node, op=SWAPPED[type(node.op)]())
        if isinstance(node.op, ast.Div | ast.FloorDiv):
            yield "drop a divisor", node.left
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


def _with(node: ast.AST, **fields: object) -> ast.AST:
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new


def _name_of(node: ast.AST) -> str:
    return getattr(node, "attr", getattr(node, "id", ""))


def _replaced(tree: ast.Module, name: str, place: int) -> ast.Module:
    """A copy of the tree with the change of this place in the function."""
    edited = copy.deepcopy(tree)
    function = dict(_functions(edited))[name]
    seen = 0
    for node in list(_below(function)):
        for _, new in _variants(node):
            if seen == place:
                _Replace(node, new).visit(function)
                return ast.fix_missing_locations(edited)
            seen += 1
    raise AssertionError(place)


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST):
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        if node is self.old:
            return ast.copy_location(self.new, node)
        return self.generic_visit(node)
