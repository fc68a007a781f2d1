"""Keeps the catalogues of src/weft/core/locale: each has the messages that a person reads.

    python docs/catalogue.py      # adds new messages, drops old ones, names those not translated

tests/docs/test_catalogue.py holds that nothing is left to do. Messages are found in the source, in
the help of the commands, and below: those of typer and pydantic that weft prints.

A message is a text that reaches a *sink*: `problem` and `fix` of a Refusal, what a command or a run
prints, and the parameters of functions that hand texts on to such a place. An f-string becomes a
template, `{name}` for each value; a choice between texts becomes a template for each.
"""

from __future__ import annotations

import ast
import io
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import typer
from babel.messages import Catalog
from babel.messages.pofile import read_po, write_po
from pydantic import BaseModel

from weft.cli.app import app
from weft.core import RunConfig
from weft.planner.cost.breakdown import MemoryPart, TimePart, waits_for
from weft.planner.search.baselines import COMPUTING, SAID

SOURCE = Path(__file__).parents[1] / "src" / "weft"
LOCALE = SOURCE / "core" / "locale"

# Of typer: headings of a help page, and wrong options; of pydantic: wrong values.
OF_TYPER = [
    "Usage: {usage}",
    "Arguments",
    "Options",
    "Commands",
    "[default: {value}]",
    "[env var: {name}]",
    "[required]",
    "Show this message and exit.",
    "Missing argument {hint}.",
    "Missing option {hint}.",
    "Missing command.",
    "No such command {name}.",
    "No such option: {name}",
    "No such option: {name} (Possible options: {options})",
    "Got unexpected extra argument(s) ({words})",
    "Option {name} requires an argument.",
    "Option {name} does not take a value.",
    "Invalid value for {hint}: {problem}",
    "Input should be greater than or equal to {least}",
    "Input should be a valid integer, unable to parse string as an integer",
    "Input should be a valid number, unable to parse string as a number",
    "must be greater than {least}",
    "must be greater than or equal to {least}",
    "must be less than {most}",
    "must be less than or equal to {most}",
    "must be a finite number",
    "change it",
]
# Of a model, in reasons of a search to leave a layout out.
COUNTED = ["head", "key head", "expert", "data rank", "part"]
MOST = 12  # templates that one expression may become; of more, each choice is a message of its own

# Callable -> place and name of the parameters that a person reads.
SINKS = {
    "WeftError": {0: "message"},
    "LimitedProcessError": {0: "message"},
    "echo": {0: "message"},
    "log_line": {0: "message"},
    "say": {0: "text"},
    "Finding": {2: "found", 3: "advice"},
    "table_error": {0: "problem", 1: "fix"},
    "Constraint": {2: "reason"},  # why a search leaves a layout out
    "translate": {0: "text"},
}
# Constants of texts; whether one word is one.
TEXTS = {"_KINDS": False, "NAMES": True, "FIX_OR_LINES": False, "FIX_OR_LINES_IF_MIXED": False}
TEXTS |= {"LINES_AROUND": False}
FORMATTED = re.compile(r"\{(\{(?:others|fix|lines)\})\}")  # by str.format
# Functions all of whose texts are lines of a table; two spaces part its columns.
TABLES = {
    "verification/report.py": ["result_table", "_told"],
    "verification/coverage.py": ["coverage", "_training_with_codec"],
    "verification/training_check.py": ["rate_text", "text"],
    "launch/doctor/report.py": ["verdict", "_ranks", "_precision", "_checkpoints"],
    "train/run_summary.py": ["run_header", "run_summary"],
    "train/progress.py": ["describe"],
    "planner/search/report.py": ["text", "_head", "_losers"],
    "planner/search/explain.py": ["explain_row", "describe_row", "excess_text"],
    "planner/search/comparison.py": ["comparison_table"],
    "planner/search/certainty.py": ["text"],
    "planner/search/baselines.py": ["baseline_patterns", "_no_baseline_reason", "why_slower"],
    "planner/search/single_layout.py": ["other_ways"],
    "planner/plan_run.py": ["plan_notes"],
    "planner/measured_constants.py": ["measured_constants", "_kept"],
    "planner/calibrate/report.py": ["measurement_rows"],
    "planner/cluster_sim/failures.py": ["failure_cost"],
    "planner/cluster_sim/report.py": ["_step", "_often"],
    "planner/cluster_sim/scenario.py": ["on_stages"],
    "planner/cluster_sim/slow_links.py": ["slow_link_cost"],
    "planner/cluster_sim/stragglers.py": ["straggler_table", "_describe_slow"],
    "planner/simulate_run.py": ["_ways"],
    "planner/calibrate/fit_runs.py": ["error_rows"],
    "checkpoint/listing.py": ["listing_text"],
    "collectives/describe.py": ["headline", "time_lines", "traffic_line"],
    "parallel/draw_plan/describe.py": ["panel_name", "legend"],
    "parallel/draw_plan/rows.py": ["head", "_lies"],
    "train/overlap/describe.py": ["headline", "comm_line"],
    "pipeline/draw/style.py": ["figures_line"],
    "pipeline/draw/terminal.py": ["_scale"],
    "launch/watchdog.py": ["missing_ranks", "frame_location", "hang_report"],
}
# Of these functions what nobody reads, or only within another text.
NAMES = {"async_tp", "bf16", "clip", "cores", "dropped_share", "fast", "fp16", "fp32", "fp64"}
NAMES |= {
    "{filename}:{lineno} in {name}: `{line}`",
    "offload_activations",
    "_per_s",
    "rollback",
    "skip",
    "usable",
}
REFUSAL = {2: "problem", 3: "fix"}
KEYWORD_ONLY = 99

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Value:
    """A place in a template that a value takes."""

    name: str


Template = tuple[str | Value, ...]


@dataclass(frozen=True)
class Scope:
    """Where an expression stands: its module, and the definitions around it, outermost first."""

    module: str
    within: tuple[ast.AST, ...] = ()

    def inside(self, node: ast.AST) -> Scope:
        return Scope(self.module, (*self.within, node))

    def functions(self) -> Iterator[Function]:
        """Innermost first."""
        return (node for node in reversed(self.within) if isinstance(node, Function))


class MessageFinder:
    """Follows texts to sinks, in all modules below a folder."""

    def __init__(self, source: Path = SOURCE):
        self.found: dict[str, set[str]] = defaultdict(set)
        self._sinks = {name: dict(places) for name, places in SINKS.items()}
        self._functions: dict[str, list[tuple[Scope, Function]]] = defaultdict(list)
        self._constants: dict[str, list[ast.expr]] = defaultdict(list)
        self._calls: list[tuple[Scope, ast.Call]] = []
        self._bases: dict[str, set[str]] = {}
        self._followed: set[ast.AST] = set()
        self._resolving: list[tuple[ast.AST, str]] = []
        for path in sorted(source.rglob("*.py")):
            module = path.relative_to(source)
            if module.parts[0] != "examples":
                tree = ast.parse(path.read_text(encoding="utf-8"))
                self._index(tree, Scope(module.as_posix()))

    def find(self) -> dict[str, set[str]]:
        """Message -> the modules that say it."""
        refusals = {"Refusal"}
        while more := {c for c, bases in self._bases.items() if bases & refusals} - refusals:
            refusals |= more
        self._sinks |= {name: dict(REFUSAL) for name in refusals}
        for name, word in TEXTS.items():
            for constant in self._constants.get(name, []):
                strings = [node for node in ast.walk(constant) if isinstance(node, ast.Constant)]
                self._note_each(Scope("constants"), strings, word)
        for module, names in TABLES.items():
            for name in names:
                for scope, function in self._functions[name]:
                    if scope.module == module:
                        self._note_cells(scope.inside(function), function)
        known = 0
        while known != (known := sum(map(len, self._sinks.values()))):
            for scope, call in self._calls:
                self._follow(scope, call)
        return self.found

    def _index(self, node: ast.AST, scope: Scope) -> None:
        for child in ast.iter_child_nodes(node):
            inner = scope
            if isinstance(child, Function):
                self._functions[child.name].append((scope, child))
                inner = scope.inside(child)
            elif isinstance(child, ast.ClassDef):
                self._bases[child.name] = {n.id for n in child.bases if isinstance(n, ast.Name)}
                inner = scope.inside(child)
            elif isinstance(child, ast.Call):
                self._calls.append((scope, child))
            elif isinstance(child, ast.Assign) and isinstance(node, ast.Module):
                for target in child.targets:
                    if isinstance(target, ast.Name):
                        self._constants[target.id].append(child.value)
            self._index(child, inner)

    def _follow(self, scope: Scope, call: ast.Call) -> None:
        title = called(call)
        if title == "cls":
            title = next((each.name for each in scope.within if isinstance(each, ast.ClassDef)), "")
        word = title == "translate"
        for place, keyword in list(self._sinks.get(title, {}).items()):
            given = [each.value for each in call.keywords if each.arg == keyword]
            if not any(isinstance(each, ast.Starred) for each in call.args[: place + 1]):
                given += call.args[place : place + 1]
            for expression in given:
                self._note(scope, self._texts(scope, expression), word)

    def _note(self, scope: Scope, templates: Iterable[Template], word: bool = False) -> None:
        """`word`: a single one is a text, too, and not a name."""
        for template in templates:
            words = words_of(template).removeprefix("weft: ")
            named = [each for each in words.split() if re.search(r"[A-Za-z]{2}", each)]
            if len(named) > (not word and all(isinstance(part, str) for part in template)):
                text = FORMATTED.sub(r"\1", spelled(template))
                self.found[text].add(scope.module)

    def _note_cells(self, scope: Scope, function: Function) -> None:
        body = function.body[ast.get_docstring(function) is not None :]
        for expression in texts_within(body):
            for template in self._texts(scope, expression):
                for cell in cells(template):
                    text = spelled(cell)
                    # else it goes on with another, or is a name: `fsdp{size}`
                    begun = re.match(r"[A-Za-z0-9{[<-](?!\S*[{*]\S*$)", text)
                    if begun and text not in NAMES and re.search("[a-z]{2}", words_of(cell)):
                        self.found[text].add(scope.module)

    # ---- what an expression may be ---------------------------------------------------------------

    def _texts(self, scope: Scope, expression: ast.expr) -> list[Template]:
        match expression:
            case ast.Constant(value=str(text)):
                return [(text,)]
            case ast.JoinedStr(values=parts):
                return self._joined(scope, list(padded(parts)))
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                texts = self._joined(scope, [left, right])
                if any(isinstance(part, str) for text in texts for part in text):
                    return texts
            case ast.IfExp(body=body, orelse=orelse):
                return self._texts(scope, body) + self._texts(scope, orelse)
            case ast.BoolOp(values=values) | ast.Subscript(value=ast.Dict(values=values)):
                return [text for value in values for text in self._texts(scope, value)]
            case ast.NamedExpr(value=value) | ast.Lambda(body=value):
                return self._texts(scope, value)
            case ast.Name(id=name):
                return self._named(scope, name, expression.lineno)
            case ast.Subscript(value=ast.Name(id=name)):
                for constant in self._constants.get(name, []):
                    if isinstance(constant, ast.Dict):
                        self._note_each(scope, constant.values)
            case ast.Call(
                func=ast.Attribute(value=ast.Constant(), attr="join"),
                args=[ast.GeneratorExp(elt=each) | ast.ListComp(elt=each)],
            ):
                self._note_each(scope, [each])
                return [(Value(value_name(each)),)]
            case ast.Call():
                self._note_returned(expression)
        return [(Value(value_name(expression)),)]

    def _note_each(self, scope: Scope, expressions: Iterable[ast.expr], word: bool = False) -> None:
        for expression in expressions:
            self._note(scope, self._texts(scope, expression), word)

    def _joined(self, scope: Scope, parts: list[ast.expr]) -> list[Template]:
        choices = [self._texts(scope, part) for part in parts]
        for place, part in enumerate(parts):
            if len(choices[place]) > 1 and math.prod(map(len, choices)) > MOST:
                self._note(scope, choices[place])
                choices[place] = [(Value(value_name(part)),)]
        return [tuple(itertools.chain(*chosen)) for chosen in itertools.product(*choices)]

    def _named(self, scope: Scope, name: str, line: int) -> list[Template]:
        for function in scope.functions():
            if (function, name) in self._resolving:
                return [(Value(name),)]
            self._resolving.append((function, name))
            found = self._assigned(scope, function, name, line)
            self._resolving.pop()
            if found:
                texts = [each for each in found if any(isinstance(part, str) for part in each)]
                other = [(Value(name),)] if len(texts) < len(found) else []
                return list(dict.fromkeys([*texts, *other]))
            arguments = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
            if name in arguments or name in [each.arg for each in function.args.kwonlyargs]:
                self._hand_on(scope, function, name, arguments)
                return [(Value(name),)]
        constants = self._constants.get(name, [])
        if len(constants) == 1 and isinstance(constants[0], ast.Constant | ast.JoinedStr):
            return self._texts(Scope(scope.module), constants[0])
        return [(Value(name),)]

    def _assigned(self, scope: Scope, function: Function, name: str, line: int) -> list[Template]:
        """What a local name may be at a line: the assignments above it, and what is added to
        them."""
        found: list[list[Template]] = []
        for block, node in statements(function.body):
            if node.lineno > line:
                continue
            for expression in assigned_here(node, name):
                texts = self._texts(scope, expression)
                if not isinstance(node, ast.AugAssign):
                    found.append(texts)
                    last_block = block
                elif found and block is last_block:
                    found[-1] = [(*a, *b) for a in found[-1] for b in texts]
                else:  # of any of them, perhaps
                    found += [[(*a, *b) for a in each for b in texts] for each in found]
        return [text for texts in found for text in texts]

    def _hand_on(self, scope: Scope, function: Function, name: str, arguments: list[str]) -> None:
        """The function's callers give the text."""
        place = arguments.index(name) if name in arguments else KEYWORD_ONLY
        owner = scope.within[scope.within.index(function) - 1 : scope.within.index(function)]
        title = function.name
        if owner and isinstance(owner[0], ast.ClassDef):
            place -= 1  # self
            title = owner[0].name if title == "__init__" else title
        self._sinks.setdefault(title, {})[place] = name

    def _note_returned(self, call: ast.Call) -> None:
        """What a function of weft that makes a text returns."""
        match self._functions.get(called(call), []):
            case [(scope, function)] if function not in self._followed:
                self._followed.add(function)
                if isinstance(function.returns, ast.Name) and function.returns.id == "str":
                    returned = (n.value for n in ast.walk(function) if isinstance(n, ast.Return))
                    self._note_each(scope.inside(function), filter(None, returned))


def statements(body: list[ast.stmt]) -> Iterator[tuple[list[ast.stmt], ast.stmt]]:
    """Each statement of a function with the block that it stands in, in the order of the source;
    without those of functions inside."""
    for node in body:
        yield body, node
        if not isinstance(node, Function | ast.ClassDef):
            for field in ("body", "orelse", "finalbody"):
                yield from statements(getattr(node, field, []))
            for handler in getattr(node, "handlers", getattr(node, "cases", [])):
                yield from statements(handler.body)


def padded(parts: Iterable[ast.expr]) -> Iterator[ast.expr]:
    """The parts of an f-string, with two spaces where a width pads a value."""
    for part in parts:
        if isinstance(part, ast.FormattedValue):
            width = ast.unparse(part.format_spec) if part.format_spec is not None else ""
            if ">" in width:
                yield ast.Constant("  ")
            yield part.value
            if "<" in width:
                yield ast.Constant("  ")
        else:
            yield part


def texts_within(nodes: Iterable[ast.AST]) -> Iterator[ast.expr]:
    """Each text that is not inside of another."""
    for node in nodes:
        if isinstance(node, ast.JoinedStr) or (
            isinstance(node, ast.Constant) and isinstance(node.value, str)
        ):
            yield node
        elif not isinstance(node, ast.Subscript | ast.Compare) or is_stored(node):
            yield from texts_within(ast.iter_child_nodes(node))


def is_stored(node: ast.AST) -> bool:
    """Whether something is assigned to it: `rows["time"] = ...` makes a line of a table."""
    return isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)


def cells(template: Template) -> Iterator[Template]:
    """The columns of each line."""
    cell: list[str | Value] = []
    for part in template:
        if isinstance(part, Value):
            cell.append(part)
            continue
        first, *others = re.split(r" {2,}|\n", part)
        cell.append(first)
        for other in others:
            yield tuple(filter(None, cell))
            cell = [other]
    yield tuple(filter(None, cell))


def assigned_here(node: ast.stmt, name: str) -> Iterator[ast.expr]:
    """What a statement assigns to a name, or adds to it."""
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        if node.target.id == name:
            yield node.value
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Name) and target.id == name:
                yield node.value
            elif isinstance(target, ast.Tuple):
                for place, each in enumerate(target.elts):
                    if isinstance(each, ast.Name) and each.id == name:
                        yield from items(node.value, place, len(target.elts))
    tests = [getattr(node, "test", None), getattr(node, "value", None)]
    for test in filter(None, tests):
        for each in ast.walk(test):
            if isinstance(each, ast.NamedExpr) and each.target.id == name:
                yield each.value


def items(value: ast.expr, place: int, count: int) -> Iterator[ast.expr]:
    """The element at a place of what is unpacked into so many names."""
    if isinstance(value, ast.Tuple) and len(value.elts) == count:
        yield value.elts[place]
    elif isinstance(value, ast.IfExp):
        yield from items(value.body, place, count)
        yield from items(value.orelse, place, count)
    else:
        yield value


def called(call: ast.Call) -> str:
    match call.func:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
    return ""


def value_name(expression: ast.expr) -> str:
    """A name that an expression mentions."""
    names = [
        node.id if isinstance(node, ast.Name) else node.attr
        for node in ast.walk(expression)
        if isinstance(node, ast.Name | ast.Attribute)
    ]
    plain = (name for name in names if name not in ("str", "len", "repr", "join", "sorted"))
    return next(plain, "value").strip("_")


def words_of(template: Template) -> str:
    return "".join(part for part in template if isinstance(part, str))


def spelled(template: Template) -> str:
    """As Python's str.format takes it; a second value of one name gets a number."""
    text, seen = "", defaultdict[str, int](int)
    for part in template:
        if isinstance(part, str):
            text += part.replace("{", "{{").replace("}", "}}")
        else:
            seen[part.name] += 1
            text += f"{{{part.name}{seen[part.name] if seen[part.name] > 1 else ''}}}"
    return text


# ---- the catalogues ------------------------------------------------------------------------------


def messages() -> dict[str, set[str]]:
    """Message -> where it is from."""
    found = MessageFinder().find()
    for text in help_texts(typer.main.get_command(app)):
        found[escaped(text)].add("help")
    for text in OF_TYPER:
        found[text].add("typer")
    for what in COUNTED:
        found[f"{{count}} {what}"].add("planner/search/constraints.py")
        found[f"{{count}} {what}s"].add("planner/search/constraints.py")
    for part in parts_of_estimates():
        found[part].add("planner/cost/breakdown.py")
        found[f"{part} {{share}}"].add("planner/cost/breakdown.py")
    for text in descriptions(RunConfig):
        found[escaped(text)].add("run file")
    return found


def parts_of_estimates() -> set[str]:
    """Their names, in tables."""
    waits = {part for part in TimePart if waits_for(part)}
    named = {*TimePart, *MemoryPart, *SAID.values(), COMPUTING, "compute", "launch", "driver"}
    return set(map(str, named - waits))


def help_texts(command: typer.core.TyperCommand | typer.core.TyperGroup) -> Iterator[str]:
    """Of a command, its options and the commands below it."""
    texts = [command.help, *(getattr(each, "help", None) for each in command.params)]
    yield from (" ".join(text.split()) for text in texts if text)
    for below in getattr(command, "commands", {}).values():
        yield from help_texts(below)


def descriptions(table: type[BaseModel]) -> Iterator[str]:
    """What the keys of a table, and of the tables in it, are for: errors say it."""
    for info in table.model_fields.values():
        if info.description:
            yield info.description
        for inner in tables_of(info.annotation):
            yield from descriptions(inner)


def tables_of(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from tables_of(part)


def escaped(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def updated(path: Path) -> Catalog:
    """A catalogue with the messages that there are, and its translations of them."""
    old = Catalog(locale=path.stem)
    if path.is_file():
        with path.open("rb") as file:
            old = read_po(file, locale=path.stem)
    new = Catalog(locale=path.stem, header_comment="# Written by docs/catalogue.py.", fuzzy=False)
    for text, places in messages().items():
        had = old.get(text)
        new.add(
            text,
            had.string if had else "",
            locations=[(place, None) for place in sorted(places)],
            flags=had.flags if had else (),
        )
    return new


def written(catalogue: Catalog) -> str:
    """As a .po file, without dates, which would differ each time."""
    file = io.BytesIO()
    write_po(file, catalogue, width=100, sort_output=True, omit_header=True, include_lineno=False)
    return file.getvalue().decode()


def main() -> None:
    for path in sorted(LOCALE.glob("*.po")):
        catalogue = updated(path)
        path.write_text(written(catalogue), encoding="utf-8")
        for message in catalogue:
            if message.id and (not message.string or message.fuzzy):
                print(f"{path.name}: {message.id!r} ({message.locations[0][0]})")


if __name__ == "__main__":
    main()
