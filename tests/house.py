"""The laws of the house, held over src/weft with plain `ast`: which way imports run, what each file
may know, how large anything may be. `breaches(root)` gives one line for each breach;
tests/test_architecture.py asks for none, and plants one breach of every law to see that it is
named.

Every import statement counts, wherever it stands: one inside a function or under TYPE_CHECKING is
knowledge too. Only the law on torch asks what really runs on import, and so leaves those two out.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

# The packages of src/weft, the lowest first, each with what it is for. A package imports from those
# above it in this list only. docs/architecture.md shows this list; tests/test_architecture.py
# compares the two.
ORDER = {
    "_torch": "every private torch API, one function each",
    "core": "the nouns: Layout, Plan, Schedule, Sync, Codec, run files, shards, errors",
    "nn": "what runs inside a model: losses, masks, dropout, expert routing, weft's own models",
    "sync": "how replicas stay together, as data: one file per synchroniser, one per codec",
    "pipeline": "schedules, their simulation and drawing; how a model is split into stages",
    "collectives": "which rank sends which chunk to which, as data: one file per algorithm",
    "parallel": "one file per axis; model and layout become a Plan, then a sharded model",
    "checkpoint": "sharded safetensors that any layout reads",
    "engine": "one optimizer step under a Plan",
    "launch": "the processes of a run, job files, `weft doctor`",
    "train": "the run file's objects, the training loop, the run folder",
    "report": "a run, a plan or a simulation as one HTML file",
    "planner": "cost model, search, cluster simulation, calibration",
    "verification": "the one-device reference and the comparison with it",
    "cli": "one file per command",
}
SIBLINGS = ({"planner", "verification"},)  # packages that do not import each other
DOOR = (
    "__init__",
    "__main__",
    "callbacks",
    "data",
    "losses",
    "models",
    "optimizers",
)  # what users import; it may import every face

# Folders whose files are strategies: a file imports nouns, and no other strategy. The folder is the
# registry.
REGISTRIES = {
    # every schedule is an option of pp, so that strategy asks the registry of schedules
    "parallel.strategies": ("core", "nn", "_torch", "pipeline"),
    "pipeline.schedules": ("core",),
    "collectives.algorithms": ("core", "collectives"),
    "sync": ("core",),
    "sync.codecs": ("core",),
}

# What `weft --help`, `weft draw` and `weft plan` import before they need a model.
WITHOUT_TORCH = (
    "weft.core.errors",
    "weft.core.layout",
    "weft.core.data_order",
    "weft.core.schedule",
    "weft.core.toml",
    "weft.core.run_config",
    "weft.pipeline.weight_versions",
    "weft.pipeline.validate",
    "weft.core.action_costs",
    "weft.pipeline.timeline",
    "weft.pipeline.balance",
    "weft.pipeline.simulator",
    "weft.pipeline.draw",
    "weft.pipeline.schedules",
    "weft.collectives.algorithms",
    "weft.planner.cost.hardware",
    "weft.planner.cost.model_work",
    "weft.report.run_page",
    "weft.report.plan_page",
    "weft.report.write_html",
    "weft.cli.app",
)

AXES = ("dp", "fsdp", "tp", "cp", "ep", "pp", "ulysses", "vp")

FILE_LINES = 500
CLASS_LINES = 300
ARGUMENTS = 12
ARGUMENTS_ARE_OPTIONS = ("cli.", "nn.models.")  # commands and model builders


@dataclass(frozen=True)
class Import:
    """One imported module, `torch.nn` or `weft.core.layout`, and the name taken from it; `at_once`
    if importing the importer imports it too."""

    module: str
    name: str
    line: int
    at_once: bool


@dataclass(frozen=True)
class Module:
    """One file of the package: `name` is dotted, `weft.core.layout`; a folder's is that of its
    `__init__`."""

    name: str
    path: Path
    is_package: bool

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, str(self.path))

    @property
    def package(self) -> str:
        """The folder directly under the root that holds it, `core`; of the door, the file
        itself."""
        return [*self.name.split("."), "__init__"][1]

    @property
    def inside(self) -> str:
        """The name without the root: `core.layout`."""
        return self.name.partition(".")[2]

    @cached_property
    def imports(self) -> list[Import]:
        here = self.name.split(".") if self.is_package else self.name.split(".")[:-1]

        def visit(node: ast.AST, at_once: bool) -> Iterator[Import]:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield Import(alias.name, "", node.lineno, at_once)
            elif isinstance(node, ast.ImportFrom):
                origin = here[: len(here) + 1 - node.level] if node.level else []
                base = ".".join(origin + ([node.module] if node.module else []))
                for alias in node.names:
                    yield Import(base, alias.name, node.lineno, at_once)
            elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                for statement in node.body:
                    yield from visit(statement, False)
                for statement in node.orelse:
                    yield from visit(statement, at_once)
            else:
                deferred = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                for child in ast.iter_child_nodes(node):
                    yield from visit(child, at_once and not deferred)

        return list(visit(self.tree, True))


class House:
    """The files of one package, by dotted name, and the faces of its packages."""

    def __init__(self, root: Path):
        self.root = root
        self.modules: dict[str, Module] = {}
        for path in sorted(root.rglob("*.py")):
            names = path.relative_to(root.parent).with_suffix("").parts
            is_package = names[-1] == "__init__"
            name = ".".join(names[:-1] if is_package else names)
            self.modules[name] = Module(name, path, is_package)
        self.faces = {package: self._face(package) for package in ORDER}

    def _face(self, package: str) -> dict[str, str]:
        """Name that the package exports -> the module that defines it, from `__init__.pyi`."""
        stub = self.root / package / "__init__.pyi"
        found = {}
        if stub.exists():
            for node in ast.walk(ast.parse(stub.read_text(encoding="utf-8"), str(stub))):
                if isinstance(node, ast.ImportFrom):
                    base = f"{self.root.name}.{package}"
                    for alias in node.names:
                        inner = node.module or alias.name
                        found[alias.asname or alias.name] = f"{base}.{inner}"
        return found

    def target(self, i: Import) -> str | None:
        """The file that an import reaches: through a face, the one that defines the name. None:
        not of this house."""
        if i.name and f"{i.module}.{i.name}" in self.modules:
            return f"{i.module}.{i.name}"
        package = i.module.partition(".")[2]
        if i.name in self.faces.get(package, {}):
            return self.faces[package][i.name]
        return i.module if i.module in self.modules else None


Law = Callable[[House], Iterator[str]]


def known_packages(house: House) -> Iterator[str]:
    for module in house.modules.values():
        if module.package not in ORDER and module.package not in DOOR:
            yield (
                f"{module.name} is in no package of ORDER: put it into one of them, or add"
                f" {module.package!r} to ORDER in tests/house.py and to docs/architecture.md"
            )


def imports_go_down(house: House) -> Iterator[str]:
    level = {package: number for number, package in enumerate(ORDER)}
    for module in house.modules.values():
        for i in module.imports:
            target = house.target(i)
            if target is None or module.package not in level:
                continue
            own, other = module.package, house.modules[target].package
            where = f"{module.name}, line {i.line}, imports {target}"
            if own != other and any({own, other} <= pair for pair in SIBLINGS):
                yield f"{where}: {own} and {other} do not know each other"
            elif other not in level:
                yield f"{where}: upward, from {own} to the door"
            elif level[other] > level[own]:
                yield f"{where}: upward, from {own} to {other}"


def no_cycle(house: House) -> Iterator[str]:
    edges = {
        name: [t for i in module.imports if (t := house.target(i)) and t != name]
        for name, module in house.modules.items()
        if not (module.is_package and name.count(".") <= 1)  # a face reaches what it exports
    }
    done: set[str] = set()

    def follow(name: str, path: list[str]) -> list[str] | None:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done or name not in edges:
            return None
        for target in edges[name]:
            if found := follow(target, [*path, name]):
                return found
        done.add(name)
        return None

    for name in edges:
        if found := follow(name, []):
            yield "cycle: " + " -> ".join(found)
            return


def packages_meet_at_faces(house: House) -> Iterator[str]:
    for module in house.modules.values():
        for i in module.imports:
            parts = i.module.split(".")
            if (
                parts[0] != house.root.name
                or len(parts) < 2
                or parts[1] in (module.package, "_torch")
            ):
                continue
            where = f"{module.name}, line {i.line}"
            if len(parts) > 2 and i.module not in {f"{house.root.name}.{n}" for n in REGISTRIES}:
                yield f"{where}, reaches past the face of {parts[1]}: import {i.module}"
            elif len(parts) == 2 and i.name and i.name not in house.faces.get(parts[1], {}):
                yield f"{where}, takes {i.name}, which is not in {parts[1]}/__init__.pyi"


def faces_are_faces(house: House) -> Iterator[str]:
    for package in ORDER:
        name = f"{house.root.name}.{package}"
        if package == "_torch" or name not in house.modules:
            continue
        face = house.modules[name]
        if not ast.get_docstring(face.tree):
            yield f"{name} has no docstring: what it is for, and which file to open first"
        if any(isinstance(n, ast.FunctionDef | ast.ClassDef) for n in ast.walk(face.tree)):
            yield f"{name} defines something: a face hands names on, and no more"
        for exported, home in house.faces[package].items():
            if home not in house.modules:
                yield f"{package}/__init__.pyi exports {exported} of {home}, which does not exist"
            elif f"{name}.{exported}" in house.modules and home != f"{name}.{exported}":
                yield f"{package}/__init__.pyi exports {exported}, the name of a file of {package}"


def strategies_know_nouns_only(house: House) -> Iterator[str]:
    root = house.root.name
    for folder, nouns in REGISTRIES.items():
        own = f"{root}.{folder}"
        for name, module in house.modules.items():
            parent, _, last = name.rpartition(".")
            if parent != own or last.startswith("_") or module.is_package:
                continue
            for i in module.imports:
                target = house.target(i)
                if target is None:
                    continue
                where = f"{name}, line {i.line},"
                other = target.rpartition(".")
                if other[0] == own and not other[2].startswith("_"):
                    yield f"{where} imports {target}: strategies do not import one another"
                elif not target.startswith(own) and house.modules[target].package not in nouns:
                    yield f"{where} imports {target}: a strategy knows {', '.join(nouns)} alone"
        for name, module in house.modules.items():
            if name.startswith(own):
                continue
            for i in module.imports:
                target = house.target(i) or ""
                parent, _, last = target.rpartition(".")
                where = f"{name}, line {i.line},"
                if (
                    parent == own
                    and not last.startswith("_")
                    and not house.modules[target].is_package
                ):
                    yield f"{where} names {target}: only its registry knows a strategy"


def no_torch_where_it_is_slow(house: House) -> Iterator[str]:
    for start in WITHOUT_TORCH:
        paths, seen = [[start]] if start in house.modules else [], {start}
        while paths:
            path = paths.pop()
            for i in house.modules[path[-1]].imports:
                if not i.at_once:
                    continue
                target = house.target(i)
                if i.module.split(".")[0] == "torch":
                    yield f"importing {start} imports torch: {' -> '.join([*path, i.module])}"
                elif target and target not in seen:
                    seen.add(target)
                    paths.append([*path, target])


def private_torch_in_one_place(house: House) -> Iterator[str]:
    for module in house.modules.values():
        if module.package == "_torch":
            continue
        for line, what in private_torch(module):
            yield f"{module.name}, line {line}, uses {what}: private torch belongs into _torch/"


# Underscored names that torch's documentation tells users to use, or whose classes users subclass.
PUBLIC_ALL_THE_SAME = (
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch.nn.modules.batchnorm._BatchNorm",
    "torch._foreach_",
    "torch._assert_async",
    "torch._grouped_mm",
    "torch.ops.aten._",
)


def private_torch(module: Module) -> Iterator[tuple[int, str]]:
    def private(name: str) -> bool:
        parts = name.split(".")
        hidden = any(part.startswith("_") and not part.startswith("__") for part in parts[1:])
        return parts[0] == "torch" and hidden and not name.startswith(PUBLIC_ALL_THE_SAME)

    aliases = {"dist": "torch.distributed", "F": "torch.nn.functional", "nn": "torch.nn"}
    for i in module.imports:
        name = f"{i.module}.{i.name}" if i.name else i.module
        if private(name):
            yield i.line, name
    attributes = {
        id(node.value) for node in ast.walk(module.tree) if isinstance(node, ast.Attribute)
    }
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and id(node) not in attributes:
            root, _, rest = ast.unparse(node).partition(".")
            name = f"{aliases.get(root, root)}.{rest}"
            if re.fullmatch(r"[\w.]+", name) and private(name):
                yield node.lineno, name
        if isinstance(node, ast.Attribute) and node.attr in PRIVATE_ATTRIBUTES:
            yield node.lineno, node.attr


PRIVATE_ATTRIBUTES = (
    "_compiled_call_impl",
    "_is_param",
    "_make_wrapper_subclass",
    "_local_tensor",
    "_fsdp_param_groups",
    "_training_state",
    "_forward_pre_hooks",
    "_forward_hooks",
    "_input_metadata",
)


def nothing_is_too_large(house: House) -> Iterator[str]:
    for module in house.modules.values():
        lines = module.text.count("\n")
        if lines > FILE_LINES:
            yield f"{module.name} has {lines} lines: at most {FILE_LINES}"
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                if length > CLASS_LINES:
                    yield f"{module.name}.{node.name} has {length} lines: at most {CLASS_LINES}"
            elif isinstance(node, ast.FunctionDef):
                count = len([*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs])
                if count > ARGUMENTS and not module.inside.startswith(ARGUMENTS_ARE_OPTIONS):
                    yield f"{module.name}.{node.name} takes {count} arguments: at most {ARGUMENTS}"


def a_class_name_means_one_thing(house: House) -> Iterator[str]:
    homes: dict[str, list[str]] = {}
    for module in house.modules.values():
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(module.name)
    for name, places in homes.items():
        if len(places) > 1:
            yield f"class {name} is defined in {' and in '.join(places)}"


# What belongs to a process and not to an object, each with its reason.
PROCESS_STATE = (
    "_registered: ",  # schedules that users add: the registry
    "_to_run: ",  # engine/pipeline/split_backward.py: a hook of one leaf, which autograd calls
    "_SERVING: ",  # engine/rpc/remote_engine.py: RPC calls a function by name, not an object
    "_COMPANY: ",  # launch/rank_process.py: the world that this process is a rank of
)


def no_state_in_modules(house: House) -> Iterator[str]:
    """A `global` statement, or a module's own empty list or dict, which is there to be filled."""
    for module in house.modules.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Global):
                yield f"{module.name}, line {node.lineno}: global {', '.join(node.names)}"
        for node in module.tree.body:
            value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
            empty = isinstance(value, ast.Dict | ast.List | ast.Set) and not getattr(
                value, "keys", getattr(value, "elts", None)
            )
            empty |= isinstance(value, ast.Call) and ast.unparse(value.func) in (
                "dict",
                "list",
                "set",
            )
            annotation = ast.unparse(node.annotation) if isinstance(node, ast.AnnAssign) else ""
            empty &= not annotation.startswith(("Mapping", "Sequence", "Final"))
            if empty and not any(name in ast.unparse(node) for name in PROCESS_STATE):
                yield f"{module.name}, line {node.lineno}: state of a module: {ast.unparse(node)}"


def exported_functions_say_their_arguments(house: House) -> Iterator[str]:
    for package, face in house.faces.items():
        for name, home in face.items():
            if home not in house.modules:
                continue
            for node in house.modules[home].tree.body:
                if isinstance(node, ast.FunctionDef) and node.name == name:
                    taken = [a for a in [*node.args.args, *node.args.kwonlyargs] if a.arg != "self"]
                    said = ast.get_docstring(node) or ""
                    if not said:
                        yield f"{package} exports {name}, which has no docstring"
                    elif len(taken) > 3 and "Args:" not in said:
                        more = f"{len(taken)} arguments have no Args: section"
                        yield f"{package} exports {name}, whose {more}"


LAWS: tuple[Law, ...] = (
    known_packages,
    imports_go_down,
    no_cycle,
    packages_meet_at_faces,
    faces_are_faces,
    strategies_know_nouns_only,
    no_torch_where_it_is_slow,
    private_torch_in_one_place,
    nothing_is_too_large,
    a_class_name_means_one_thing,
    no_state_in_modules,
    exported_functions_say_their_arguments,
)


def breaches(root: Path) -> dict[str, list[str]]:
    """Law -> every breach of it by the package in this folder, one line each."""
    house = House(root)
    return {law.__name__: list(law(house)) for law in LAWS}


def literals(root: Path, words: tuple[str, ...], allowed: tuple[str, ...]) -> Counter[str]:
    """Module -> how many string constants are one of these words, outside the `allowed`
    packages and files."""
    found: Counter[str] = Counter()
    for module in House(root).modules.values():
        if module.inside.startswith(allowed):
            continue
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Constant) and node.value in words:
                found[module.name] += 1
    return found
