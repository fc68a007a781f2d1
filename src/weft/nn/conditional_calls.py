"""Modules that a forward calls, and parameters that it reads, only where its data say so, as
experts whom no token chose are left out: ranks with other samples then use others. Read off the
forward's source."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from functools import lru_cache

from torch import nn

# what a condition calls that asks a tensor for its values or its size
_OF_VALUES = frozenset(
    ("any", "all", "sum", "item", "numel", "nonzero", "max", "min", "size", "tolist", "unique")
)
_OF_SIZES = frozenset(("len", "bool", "int", "float"))
# what makes of a list another of as many
_OF_WHOLE_LISTS = frozenset(
    ("enumerate", "zip", "reversed", "list", "range", "len", "values", "items")
)


def chosen_modules(model: nn.Module) -> tuple[str, ...]:
    """The modules with parameters that are called, or read their own parameters, only where data
    say so; without those inside of them."""
    found: list[str] = []
    for name, module in model.named_modules():
        if next(module.parameters(), None) is None:
            continue
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if name and not inside and (called_by_data(model, name) or _reads_by_data(module)):
            found.append(name)
    return tuple(found)


def called_by_data(model: nn.Module, name: str) -> bool:
    """Whether a module is called only where data say so, as far as its list's name and the source
    of its owner's class tell."""
    around, _, leaf = name.rpartition(".")
    owner = model.get_submodule(around)
    if isinstance(owner, (nn.ModuleList, nn.ModuleDict)):
        around, _, leaf = around.rpartition(".")
        owner = model.get_submodule(around)
        if "expert" in leaf.lower():
            return not _all_called(type(owner), leaf)  # type: ignore[arg-type]
    return _chosen_in(type(owner), leaf)  # type: ignore[arg-type]


@lru_cache(maxsize=4096)
def _chosen_in(kind: type[nn.Module], leaf: str) -> bool:
    return any(_is_conditional(call) for call in _calls(class_tree(kind), leaf))  # type: ignore[arg-type]


@lru_cache(maxsize=4096)
def _all_called(kind: type[nn.Module], leaf: str) -> bool:
    """Whether a class calls every module of a list, as the experts of a soft mixture are: in loops
    over the list, or over numbers that data do not change, with no condition that data may be
    in."""
    tree = class_tree(kind)  # type: ignore[arg-type]
    calls = [*_calls(tree, leaf)]

    def counted(node: ast.AST) -> bool:
        if isinstance(node, (ast.For, ast.comprehension)) and _mentions(node.iter, leaf):
            return _takes_all(node.iter, leaf)
        if not _is_item(node, leaf):
            return True
        number = node.slice  # type: ignore[attr-defined]
        return isinstance(number, ast.Name) and number.id in _fixed_numbers(_function(node))

    def happens(call: ast.Call) -> bool:
        given = isinstance(call.func, ast.Name) and call.func.id in _given(_function(call))
        return not (given or _is_conditional(call) or _may_be_left_out(call))

    return bool(calls) and all(map(counted, ast.walk(tree))) and all(map(happens, calls))


def _fixed_numbers(function: ast.AST) -> set[str]:
    """The names that only loops over fixed ranges set."""
    fixed = [
        n
        for node in ast.walk(function)
        if isinstance(node, (ast.For, ast.comprehension)) and _is_fixed_range(node.iter)
        for n in ast.walk(node.target)
        if isinstance(n, ast.Name)
    ]
    other = {
        n.id
        for n in ast.walk(function)
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store) and n not in fixed
    }
    return {n.id for n in fixed} - other - _given(function)


def _given(function: ast.AST) -> set[str]:
    """The names of its arguments."""
    return {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}


def _function(node: ast.AST) -> ast.AST:
    """The function that a node is in."""
    for around, _ in _ancestors(node):
        node = around
    return getattr(node, "parent", node)


def _is_fixed_range(node: ast.AST) -> bool:
    """`range` of constants, and of the module's own attributes."""
    named = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    if not named or node.func.id != "range":  # type: ignore[attr-defined]
        return False
    return all(map(_is_fixed, node.args))  # type: ignore[attr-defined]


def _takes_all(node: ast.AST, leaf: str) -> bool:
    """Whether a loop over what mentions a list takes all that it holds."""
    calls = (n for n in ast.walk(node) if isinstance(n, ast.Call) and _mentions(n, leaf))
    names = {getattr(c.func, "id", None) or getattr(c.func, "attr", None) for c in calls}
    return names <= _OF_WHOLE_LISTS


def _may_be_left_out(call: ast.AST) -> bool:
    """Whether a condition decides if a call happens, and is not of the module's own attributes:
    `if rows.shape[0] == 0`, `if n` for a number of rows."""
    for around, way in _ancestors(call):
        branch = isinstance(around, (ast.If, ast.IfExp, ast.While)) and way is not around.test
        if branch and not _is_fixed(around.test):  # type: ignore[attr-defined]
            return True
        chosen = (test for g in getattr(around, "generators", ()) for test in g.ifs)
        if not all(map(_is_fixed, chosen)):
            return True
    return any(
        isinstance(node, ast.If)
        and not _is_fixed(node.test)
        and any(isinstance(n, (ast.Continue, ast.Break, ast.Return)) for n in ast.walk(node))
        for node in ast.walk(_function(call))
    )


def _is_fixed(test: ast.AST) -> bool:
    """Whether an expression is of constants and the module's own attributes, or compares with
    None."""
    if isinstance(test, ast.Compare) and all(isinstance(o, (ast.Is, ast.IsNot)) for o in test.ops):
        return True
    names = {n.id for n in ast.walk(test) if isinstance(n, ast.Name)}
    return names <= {"self", "len", "int"} and not _of_data(test)


def _reads_by_data(module: nn.Module) -> bool:
    """Whether a forward leaves a parameter of the module itself out where data say so."""
    leaves = tuple(name for name, p in module.named_parameters(recurse=False))
    return any(_read_in(type(module), leaf) for leaf in leaves)  # type: ignore[arg-type]


@lru_cache(maxsize=4096)
def _read_in(kind: type[nn.Module], leaf: str) -> bool:
    functions = [n for n in ast.walk(class_tree(kind)) if isinstance(n, ast.FunctionDef)]  # type: ignore[arg-type]
    reads = [
        node
        for function in functions
        if not re.search("init|reset", function.name)  # they fill it
        for node in ast.walk(function)
        if _is_attribute(node, leaf) and _is_read(node)
    ]
    return bool(reads) and all(map(_is_conditional, reads))


def _is_read(node: ast.AST) -> bool:
    """Whether an attribute's elements are read, rather than that it is set, or compared with
    None."""
    return isinstance(node.ctx, ast.Load) and not isinstance(node.parent, ast.Compare)  # type: ignore[attr-defined]


@lru_cache(maxsize=512)
def class_tree(kind: type[nn.Module]) -> ast.AST:
    """A class's source, whose nodes have a `parent`; nothing of torch's own, and where there is
    none."""
    if kind.__module__.startswith("torch."):
        return ast.Module([], [])
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError, SyntaxError):  # made by exec, or in an interpreter
        return ast.Module([], [])
    return _with_parents(tree)


def _with_parents(tree: ast.AST) -> ast.AST:
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            child.parent = node  # type: ignore[attr-defined]
    return tree


def _ancestors(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """(ancestor, its child on the way), innermost first, within the function."""
    while (parent := getattr(node, "parent", None)) is not None:
        if isinstance(parent, ast.FunctionDef):
            return
        yield parent, node
        node = parent


def _mentions(node: ast.AST, leaf: str) -> bool:
    return any(isinstance(n, ast.Attribute) and n.attr == leaf for n in ast.walk(node))


def _calls(tree: ast.AST, leaf: str) -> Iterator[ast.Call]:
    """The calls of `self.leaf`, or of what that list holds."""
    names = set[str]()
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, (ast.For, ast.comprehension)) and _mentions(node.iter, leaf):
            targets = [node.target]
        elif isinstance(node, ast.Assign) and _is_item(node.value, leaf):
            targets = node.targets
        names |= {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = node.func
            named = isinstance(called, ast.Name) and called.id in names
            if named or _is_item(called, leaf) or _is_attribute(called, leaf):
                yield node


def _is_item(node: ast.AST, leaf: str) -> bool:
    return isinstance(node, ast.Subscript) and _mentions(node.value, leaf)


def _is_attribute(node: ast.AST, leaf: str) -> bool:
    own = isinstance(node, ast.Attribute) and node.attr == leaf
    return own and isinstance(node.value, ast.Name) and node.value.id == "self"  # type: ignore[attr-defined]


def _is_conditional(use: ast.AST) -> bool:
    """Whether data decide if a call, or a read, happens."""
    called = use.func if isinstance(use, ast.Call) else None
    if isinstance(called, ast.Subscript) and _of_data(called.slice):
        return True
    for around, way in _ancestors(use):
        branch = isinstance(around, (ast.If, ast.IfExp, ast.While)) and way is not around.test
        if branch and _of_data(around.test):  # type: ignore[attr-defined]
            return True
        if isinstance(around, ast.For) and _of_data(around.iter):
            return True
        if any(map(_chooses, getattr(around, "generators", ()))):
            return True
        if isinstance(around, (ast.For, ast.While)) and any(map(_leaves, around.body)):
            return True
    return False


def _chooses(comprehension: ast.comprehension) -> bool:
    return any(map(_of_data, (comprehension.iter, *comprehension.ifs)))


def _leaves(statement: ast.AST) -> bool:
    """Whether it goes on with the next of a loop, or ends it, where data say so."""
    return any(
        isinstance(node, ast.If)
        and _of_data(node.test)
        and any(isinstance(n, (ast.Continue, ast.Break)) for n in ast.walk(node))
        for node in ast.walk(statement)
    )


def _of_data(test: ast.AST) -> bool:
    """Whether an expression asks a tensor for its values or its size."""
    for node in ast.walk(test):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        if isinstance(called, ast.Attribute) and called.attr in _OF_VALUES:
            return True
        sized = isinstance(called, ast.Name) and called.id in _OF_SIZES
        if sized and not any(_is_of_self(argument) for argument in node.args):
            return True
    return False


def _is_of_self(node: ast.AST) -> bool:
    """Whether an expression is of the module's own attributes, as `len(self.layers)`."""
    return any(isinstance(n, ast.Name) and n.id == "self" for n in ast.walk(node))
