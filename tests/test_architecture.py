"""The direction of imports that docs/architecture.md draws, held over src/weft with plain `ast`.

Every import statement counts, wherever it stands: one inside a function or under TYPE_CHECKING is
knowledge too. Only the law on torch asks what really runs on import, and so leaves those two out.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "weft"

# A file or folder directly under the package -> its level. Keep in step with the table in
# docs/architecture.md.
LEVELS = (
    (
        "nouns",
        (
            "errors layout order plans roles losses masks routing randomness models schedules"
            " delays correct costs clock timeline partition places staging codecs syncs tables"
        ),
    ),
    ("strategies", "parallel schedule codec sync"),
    (
        "interpreters",
        (
            "mesh collectives batchnorm dispatch parallelize comms shards checkpoint engine "
            "watch chart ghosts cutting simulate draw cost timing"
        ),
    ),
    (
        "deciders",
        (
            "planner stages config build data text huggingface verification train launch doctor"
            " choose simulation calibrate"
        ),
    ),
    ("door", "cli __init__ __main__"),
)
LEVEL_OF = {part: level for level, (_, parts) in enumerate(LEVELS) for part in parts.split()}
WITHOUT_TORCH = (
    *(
        "weft.core.errors",
        "weft.core.layout",
        "weft.core.data_order",
        "weft.core.schedule",
        "weft.pipeline.weight_versions",
        "weft.pipeline.validate",
        "weft.pipeline.action_costs",
    ),
    *(
        "weft.pipeline.timeline",
        "weft.pipeline.balance",
        "weft.pipeline.simulator",
        "weft.pipeline.draw",
        "weft.pipeline.schedules",
    ),
    *("weft.core.toml", "weft.planner.cost.hardware", "weft.planner.cost.model_work"),
)


@dataclass(frozen=True)
class Import:
    """One imported module, `torch.nn` or `weft.core.layout`; `at_once` if importing the importer
    imports it too."""

    target: str
    line: int
    at_once: bool


def part(module: str) -> str:
    """The file or folder directly under the package that holds this module: weft.engine.step ->
    engine."""
    return [*module.split("."), "__init__"][1]


def modules(root: Path) -> dict[str, Path]:
    """Dotted name -> file, for every module of the package in this folder; the package's name is
    the folder's."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        names = path.relative_to(root.parent).with_suffix("").parts
        found[".".join(names[:-1] if names[-1] == "__init__" else names)] = path
    return found


def imports(module: str, files: dict[str, Path]) -> Iterator[Import]:
    """What this module imports; `from .x import y` is x.y where that is a module, else x."""
    path = files[module]
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]

    def visit(node: ast.AST, at_once: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, at_once)
        elif isinstance(node, ast.ImportFrom):
            origin = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join(origin + ([node.module] if node.module else []))
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield Import(full if full in files else base, node.lineno, at_once)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for statement in node.body:
                yield from visit(statement, False)
            for statement in node.orelse:
                yield from visit(statement, at_once)
        else:
            deferred = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for child in ast.iter_child_nodes(node):
                yield from visit(child, at_once and not deferred)

    return visit(ast.parse(path.read_text(encoding="utf-8"), str(path)), True)


def cycle(edges: dict[str, list[str]]) -> list[str] | None:
    """A path that ends where it starts, or None."""
    done: set[str] = set()

    def follow(module: str, path: list[str]) -> list[str] | None:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return None
        for target in edges[module]:
            if found := follow(target, [*path, module]):
                return found
        done.add(module)
        return None

    return next((found for module in edges if (found := follow(module, []))), None)


def violations(root: Path) -> list[str]:
    """Every breach of the architecture by the package in this folder, one line each; empty if there
    is none."""
    files = modules(root)
    found = {module: list(imports(module, files)) for module in files}
    inside = {module: [i for i in found[module] if i.target in files] for module in files}
    said = []

    for module in files:
        if part(module) not in LEVEL_OF:
            said.append(
                f"{module} is in no level: add {part(module)!r} to LEVELS in"
                " tests/test_architecture.py and to the table in docs/architecture.md"
            )
        for i in inside[module]:
            problem = forbidden(module, i.target)
            if problem:
                said.append(f"{module}, line {i.line}, imports {i.target}: {problem}")

    edges = {module: [i.target for i in inside[module]] for module in files}
    if path := cycle(edges):
        said.append("cycle: " + " -> ".join(path))

    for start in WITHOUT_TORCH:
        said += [f"importing {start} imports torch: {way}" for way in ways_to_torch(start, found)]
    return said


def forbidden(module: str, target: str) -> str | None:
    """Why this module may not import that one, or None if it may."""
    if part(module) not in LEVEL_OF or part(target) not in LEVEL_OF:
        return None  # reported as a module in no level
    level, below = LEVEL_OF[part(module)], LEVEL_OF[part(target)]
    if part(module) == "models" and part(target) not in ("models", "masks", "routing"):
        return "a model imports nothing of weft but masks and routing"
    if below > level:
        return f"upward, from {LEVELS[level][0]} to {LEVELS[below][0]}"
    if part(module) == part(target) == "parallel":
        return "strategies do not import one another"
    if part(target) == "parallel" and LEVELS[level][0] == "interpreters":
        return "an interpreter knows no strategy"
    return None


def ways_to_torch(start: str, found: dict[str, list[Import]]) -> Iterator[str]:
    """The chains of imports by which importing `start` imports torch."""
    paths, seen = [[start]] if start in found else [], {start}
    while paths:
        path = paths.pop()
        for i in found[path[-1]]:
            if i.at_once and i.target.split(".")[0] == "torch":
                yield " -> ".join([*path, i.target])
            elif i.at_once and i.target in found and i.target not in seen:
                seen.add(i.target)
                paths.append([*path, i.target])


def test_source_obeys_the_architecture() -> None:
    assert len(modules(SOURCE)) > 5, f"no package in {SOURCE}"
    assert violations(SOURCE) == []


SOUND = {
    "__init__.py": "from .planner import plan",
    "layout.py": (
        "from typing import TYPE_CHECKING\nfrom .errors import Refusal\nif TYPE_CHECKING:\n   "
        " import torch"
    ),
    "errors.py": "def late():\n    import torch",
    "plans.py": "import torch\nfrom . import layout",
    "models/__init__.py": "from .decoder import decoder",
    "models/decoder.py": "from torch import nn",
    "parallel/__init__.py": "",
    "parallel/data.py": "from ..plans import Step",
    "parallel/tensor.py": "from weft.core.plan import Step",
    "engine/__init__.py": "from .step import Engine",
    "engine/step.py": "from ..mesh import Mesh",
    "mesh.py": "from .layout import Layout",
    "planner.py": "import weft.parallel.strategies.data\nfrom .parallel import tensor",
}


def broken(tmp_path: Path, **changed: str) -> list[str]:
    """What is said of the sound package with these files changed; `__` in a name stands for `/`."""
    for name, text in {
        **SOUND,
        **{key.replace("__", "/") + ".py": text for key, text in changed.items()},
    }.items():
        path = tmp_path / "weft" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return violations(tmp_path / "weft")


def test_a_sound_package_passes(tmp_path: Path) -> None:
    assert broken(tmp_path) == []


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (
            {"planet": ""},
            "weft.planet is in no level: add 'planet' to LEVELS in tests/test_architecture.py",
        ),
        (
            {"errors": "from . import mesh"},
            "weft.core.errors, line 1, imports weft.parallel.mesh: upward, from nouns",
        ),
        (
            {"engine__step": "import weft"},
            "weft.engine.step, line 1, imports weft: upward, from interpreters to door",
        ),
        (
            {"plans": "def f():\n  from .planner import plan"},
            "weft.core.plan, line 2, imports weft.parallel.make_plan: upward",
        ),
        (
            {"parallel__data": "from .tensor import steps"},
            "weft.parallel.strategies.tensor: strategies do not import one another",
        ),
        (
            {"parallel__data": "from ..engine.step import Engine"},
            "upward, from strategies to interpreters",
        ),
        (
            {"mesh": "from .parallel import data"},
            "weft.parallel.strategies.data: an interpreter knows no strategy",
        ),
        (
            {"engine__step": "from .. import parallel"},
            "weft.parallel.strategies: an interpreter knows no strategy",
        ),
        (
            {"models__decoder": "from ..layout import Layout"},
            "weft.core.layout: a model imports nothing of weft but masks and routing",
        ),
        (
            {"mesh": "from .engine.step import Engine"},
            "cycle: weft.engine.step -> weft.parallel.mesh -> weft.engine.step",
        ),
        (
            {"layout": "import torch.nn"},
            "importing weft.core.layout imports torch: weft.core.layout -> torch.nn",
        ),
        (
            {"order": "from .plans import Plan"},
            (
                "importing weft.core.data_order imports torch: weft.core.data_order ->"
                " weft.core.plan -> torch"
            ),
        ),
    ],
)
def test_a_breach_is_named(tmp_path: Path, changed: dict[str, str], expected: str) -> None:
    assert [line for line in broken(tmp_path, **changed) if expected in line]
