"""Writes what the code can say about itself: docs/reference/*.md, docs/images/*.svg, and the list
of packages in docs/architecture.md and its translation.

    python docs/generate.py            # writes the files that are out of date
    python docs/generate.py --check    # names them, and ends with exit code 1 if there are any

tests/docs/test_reference.py runs the check.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import io
import re
import sys
import tempfile
import textwrap
import types
from collections.abc import Iterator
from contextlib import chdir, redirect_stdout
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from weft.cli.app import app
from weft.core import RunConfig

DOCS = Path(__file__).parent
NOTICE = "<!-- Written by docs/generate.py from the code. Change the code, then run it again. -->"

# Each picture and the command that draws it.
IMAGES = {
    "images/schedules.svg": "draw 1f1b zb-h1 zb-v --ranks 4 --microbatches 8",
    "images/pipeline.svg": "draw naive gpipe 1f1b --ranks 4 --microbatches 4",
    "images/pipedream.svg": "draw 1f1b pipedream --ranks 4 --microbatches 6 --update 1",
    "images/interleaved.svg": "draw 1f1b interleaved --ranks 4 --microbatches 8",
    "images/collective-ring.svg": "draw --collective ring",
    "images/collective-halves.svg": "draw --collective reduce_scatter --collective all_gather",
    "images/collective-tree.svg": "draw --collective tree --ranks 8",
    "images/collective-broadcast.svg": "draw --collective broadcast --ranks 8",
    "images/collective-all-to-all.svg": "draw --collective all_to_all",
    "images/collective-central.svg": "draw --collective central",
    "images/collective-servers.svg": "draw --collective parameter_server --set servers=2",
    "images/collective-hierarchical.svg": (
        "draw --collective ring --collective hierarchical --local 2 --bandwidth 300e9,25e9"
    ),
    "images/tensor-parallel.svg": (
        "draw --plan examples/quickstart.toml --layout tp2 --set model.layers=2"
    ),
    "images/sequence-parallel.svg": (
        "draw --plan examples/quickstart.toml --layout tp2+sequence --set model.layers=2"
    ),
    # of a run, whose commands are on docs/systems/ddp.md
    "images/ddp-overlap.svg": "draw --profile docs/profiles/dp2.json",
    "images/memory.svg": (
        "plan examples/quickstart.toml --cluster h100x8 --max-memory 4 --set model.dim=1024"
        " --set model.layers=16 --set model.heads=16 --set model.kv_heads=8 --set train.batch=64"
        " --set train.accumulate=8 --layout dp8 --layout fsdp8+zero1 --layout fsdp8+zero2"
        " --layout fsdp8 --layout tp8 --layout pp8"
    ),
}

ARCHITECTURE = ("architecture.md", "architecture.zh.md")  # pages with a list of packages

# The faces that scripts use. None: every name of the face; else these names alone, because the
# rest of the face is for other packages of weft.
FACES: dict[str, tuple[str, ...] | None] = {
    "weft": None,
    "weft.losses": None,
    "weft.models": None,
    "weft.data": None,
    "weft.optimizers": None,
    "weft.callbacks": None,
    "weft.checkpoint": ("save", "load"),
    "weft.sync": ("make_sync", "registry"),
    "weft.nn": (
        "causal_mask",
        "balance_loss",
        "z_loss",
        "with_loss",
        "within_capacity",
        "GateBias",
    ),
    "weft.pipeline": ("Timeline", "simulate", "text", "svg", "perfetto"),
    "weft.pipeline.schedules": ("registry", "register", "make_schedule"),
    "weft.collectives": (
        "CollectiveAlgorithm",
        "Message",
        "Phase",
        "Links",
        "Traffic",
        "run_steps",
        "find_algorithm_faults",
        "traffic_of",
        "collective_text",
        "collective_svg",
    ),
    "weft.collectives.algorithms": ("registry", "make_algorithm"),
    "weft.core": ("Action", "ActionCosts", "Schedule", "RunConfig", "load_run", "Refusal"),
}


def pages() -> dict[str, str]:
    """Path below docs/ -> the text that the file must have."""
    found = {
        "reference/run_file.md": run_file_page(),
        "reference/commands.md": commands_page(),
        "reference/api.md": api_page(),
        "reference/modules.md": modules_page(),
    }
    found |= {path: draw(command) for path, command in IMAGES.items()}
    return found | {name: with_packages(name) for name in ARCHITECTURE}


def outdated() -> dict[str, str]:
    """The pages whose file is missing or has another text."""
    return {
        path: content
        for path, content in pages().items()
        if not (DOCS / path).is_file() or (DOCS / path).read_text(encoding="utf-8") != content
    }


def draw(command: str) -> str:
    """The picture that `weft COMMAND --out FILE.svg` writes from the repository's root."""
    here = chdir(DOCS.parent)
    with tempfile.TemporaryDirectory() as folder, here, redirect_stdout(io.StringIO()):
        file = Path(folder, "picture.svg")
        app([*command.split(), "--out", str(file)], standalone_mode=False)
        return file.read_text(encoding="utf-8")


def packages() -> dict[str, str]:
    """The packages of tests/house.py with what they are for, the highest first."""
    spec = importlib.util.spec_from_file_location("house", DOCS.parent / "tests" / "house.py")
    assert spec is not None and spec.loader is not None
    house = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = house  # its dataclasses look themselves up there
    spec.loader.exec_module(house)
    return dict(reversed(house.ORDER.items()))


def with_packages(name: str) -> str:
    """A page of ARCHITECTURE with the packages."""
    page = (DOCS / name).read_text(encoding="utf-8")
    before, begin, rest = page.partition("<!-- packages:begin -->")
    _, end, after = rest.partition("<!-- packages:end -->")
    width = max(map(len, packages()))
    rows = [
        f"{package:{width}}  {purpose.replace('`', '')}" for package, purpose in packages().items()
    ]
    return "\n".join([before + begin, "```text", *rows, "```", end + after])


def modules_page() -> str:
    """Every file of src/weft with the first sentence of its docstring."""
    source = DOCS.parent / "src" / "weft"
    lines = [
        "# Index of modules",
        "",
        NOTICE,
        "",
        "One line for every file, the highest package first.",
    ]
    for package, purpose in packages().items():
        lines += ["", f"## `{package}`", "", f"{purpose[0].upper()}{purpose[1:]}.", ""]
        lines += ["| file | idea |", "|---|---|"]
        for path in sorted((source / package).rglob("*.py")):
            text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            first = " ".join(text.split("\n\n")[0].split()).replace("|", "\\|")
            idea = re.split(r"(?<=[\w)`\"][.])(?<!et al[.])\s", first)[0]
            if path.name != "__init__.py":
                name = path.relative_to(source).as_posix()
                lines.append(f"| [{name}](../../src/weft/{name}) | {idea} |")
    return "\n".join(lines) + "\n"


# ---- the run file --------------------------------------------------------------------------------


def run_file_page() -> str:
    """Every table and key of a run file."""
    lines = [
        "# Run file reference",
        "",
        NOTICE,
        "",
        "A run file is TOML. `weft train RUN.toml --set TABLE.KEY=VALUE` overrides a key.",
        'A table of one key fits on a line above the first table: `layout.axes = "dp2"`.',
        "An unknown key is an error, except in tables marked *open*: their other keys are",
        "arguments of what the table names. [examples/](../../examples) has complete files.",
    ]
    plain = []
    for name, field in RunConfig.model_fields.items():
        model = field.annotation
        if isinstance(model, type) and issubclass(model, BaseModel):
            is_open = model.model_config.get("extra") == "allow"
            lines += ["", f"## `[{name}]`" + (" (open)" if is_open else ""), ""]
            lines += key_table(model.model_fields)
        else:
            plain.append(name)
    lines += ["", "## Keys and tables without fixed keys", ""]
    lines += key_table({name: RunConfig.model_fields[name] for name in plain})
    return "\n".join(lines) + "\n"


def key_table(fields: dict[str, FieldInfo]) -> list[str]:
    """One row for each key."""
    rows = ["| key | type | default | description |", "|---|---|---|---|"]
    for key, field in fields.items():
        cells = [f"`{key}`", type_text(field), default_text(field), field.description or ""]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return rows


def type_text(field: FieldInfo) -> str:
    """The type of a key in TOML's words, with its limits."""
    words = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
    limits = [
        f"{word} {getattr(one, name)}"
        for one in field.metadata
        for name, word in words.items()
        if getattr(one, name, None) is not None
    ]
    return ", ".join([toml_type(field.annotation), *limits])


def toml_type(annotation: Any) -> str:
    """TOML's word for a Python type."""
    names = {str: "string", int: "integer", float: "number", bool: "boolean"}
    if annotation in names:
        return names[annotation]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return toml_type(arguments[0])
    if origin is Literal:
        return " or ".join(f'`"{value}"`' for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(toml_type(one) for one in arguments if one is not type(None))
    if origin is tuple or origin is list:
        return f"list of {toml_type(arguments[0])}s"
    if origin is dict:
        return "table"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "table"
    return "string" if isinstance(annotation, type) else "any"


def default_text(field: FieldInfo) -> str:
    """The default as a run file would write it."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    match value:
        case None:
            return ""
        case bool():
            return f"`{str(value).lower()}`"
        case int() | float():
            return f"`{value}`"
        case dict():
            return ""
    return f'`"{value}"`'


# ---- commands ------------------------------------------------------------------------------------


def commands_page() -> str:
    """Every command with its arguments and options."""
    lines = [
        "# Command reference",
        "",
        NOTICE,
        "",
        "Exit codes: 0 done; 1 a process died, or verification failed; 2 refused; 75 stopped by",
        "SIGTERM after saving; 130 interrupted.",
    ]
    for name, command in commands(typer.main.get_command(app), "weft"):
        lines += ["", f"## `{name}`", "", inspect.cleandoc(command.help or "")]
        rows = [row for param in command.params if (row := parameter_row(param))]
        if rows:
            lines += ["", "| argument | value | default | meaning |", "|---|---|---|---|", *rows]
    return "\n".join(lines) + "\n"


def commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """All commands that do something, with their full names."""
    if not hasattr(command, "commands"):
        yield name, command
        return
    for word, one in command.commands.items():
        if not one.hidden:
            yield from commands(one, f"{name} {word}")


def parameter_row(param: Any) -> str | None:
    """One argument or option as a row; None for --help and for what is hidden."""
    if param.name == "help" or getattr(param, "hidden", False):
        return None
    is_option = param.param_type_name == "option"
    name = ", ".join(param.opts) if is_option else (param.metavar or param.name)
    flag = getattr(param, "is_flag", False)
    value = "" if flag or not is_option else (param.metavar or value_word(param))
    default = param.default
    shown = "" if default in (None, False, (), []) or callable(default) else f"`{default}`"
    cells = [f"`{name}`", value, "required" if param.required else shown, param.help or ""]
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"


def value_word(param: Any) -> str:
    """The kind of value of an option, in typer's words."""
    if hasattr(param, "type"):  # typer on click; without it typer keeps the annotation
        return param.type.name.upper()
    annotation = param.type_descriptor.annotation
    kind = (get_args(annotation) or (annotation,))[0]
    return {str: "TEXT", int: "INTEGER", float: "FLOAT", Path: "PATH"}.get(kind, "VALUE")


# ---- Python --------------------------------------------------------------------------------------


def api_page() -> str:
    """Signatures and docstrings of what scripts use."""
    lines = [
        "# Python reference",
        "",
        NOTICE,
        "",
        "What scripts use. Each name is imported from the module of its heading.",
    ]
    for face in FACES:
        lines += ["", f"## `{face}`"]
        for name, value in public_names(face):
            lines += ["", f"### `{face}.{name}`", "", *describe(name, value)]
    return "\n".join(lines) + "\n"


def public_names(face: str) -> Iterator[tuple[str, Any]]:
    """The functions, classes and values of a face, submodules left out."""
    module = importlib.import_module(face)
    for name in FACES[face] or sorted(module.__all__):
        value = getattr(module, name)
        if not inspect.ismodule(value):
            yield name, value


def describe(name: str, value: Any) -> list[str]:
    """A function or class with its docstring, and a class's public methods."""
    if not callable(value):
        return [f"`{value!r}`" if isinstance(value, str | int | float) else "A value."]
    lines = [*code(signature_text(name, value)), "", *docstring(value)]
    if inspect.isclass(value):
        for method, function in vars(value).items():
            if method.startswith("_") or not inspect.getdoc(getattr(value, method)):
                continue
            if isinstance(function, property):
                text = " ".join(docstring(function))
                lines += ["", f"**`.{method}`** {text}".rstrip()]
            elif inspect.isfunction(function) or isinstance(function, classmethod | staticmethod):
                shown = signature_text(f"{name}.{method}", getattr(value, method))
                lines += ["", *code(shown), "", *docstring(getattr(value, method))]
    return lines


def code(text: str) -> list[str]:
    """A block of Python."""
    return ["```python", text, "```"]


LISTS = ("Args", "Raises")
SECTIONS = (*LISTS, "Returns", "Yields", "Example", "Examples")


def docstring(value: Any) -> list[str]:
    """The docstring as markdown: `Args:` becomes a list, an example a block of Python."""
    lines: list[str] = []
    block: list[str] = []
    section = ""
    for line in [*(inspect.getdoc(value) or "").splitlines(), "end"]:
        if line.startswith((" ", "\t")) or (block and not line):
            block.append(line)
            continue
        if block:
            text = textwrap.dedent("\n".join(block)).strip("\n").splitlines()
            lines += ["", *(bullets(text) if section in LISTS else fenced(text, section)), ""]
            block, section = [], ""
        if line.rstrip(":") in SECTIONS:
            section = line.rstrip(":")
            lines += ["", f"**{section}**"]
        else:
            lines.append(line)
    text = "\n".join(lines[:-1]).strip()
    return re.sub(r"\n{3,}", "\n\n", text).splitlines()


def bullets(block: list[str]) -> list[str]:
    """`name: what it is`, with further lines indented, as a list."""
    rows: list[str] = []
    for line in block:
        if line.startswith(" "):
            rows[-1] += " " + line.strip()
        else:
            name, _, text = line.partition(": ")
            rows.append(f"- `{name}`: {text}")
    return rows


def fenced(block: list[str], section: str) -> list[str]:
    """Indented text as a block that keeps its lines; sentences as they are."""
    if section in ("Returns", "Yields"):
        return block
    return ["```python" if section.startswith("Example") else "```text", *block, "```"]


def signature_text(name: str, value: Any) -> str:
    """`name(a, b=1) -> C`, one parameter on each line where it is long."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return name
    returns = signature.return_annotation
    end = "" if returns is signature.empty or inspect.isclass(value) else f" -> {plain(returns)}"
    parts: list[str] = []
    positional_only = keyword_only = False
    for param in signature.parameters.values():
        if positional_only and param.kind is not param.POSITIONAL_ONLY:
            parts.append("/")
        positional_only = param.kind is param.POSITIONAL_ONLY
        if param.kind is param.KEYWORD_ONLY and not keyword_only:
            parts.append("*")
        keyword_only |= param.kind in (param.KEYWORD_ONLY, param.VAR_POSITIONAL)
        parts.append(parameter_text(param))
    if positional_only:
        parts.append("/")
    line = f"{name}({', '.join(parts)}){end}"
    if len(line) <= 88:
        return line
    return "\n".join([f"{name}(", *(f"    {part}," for part in parts), f"){end}"])


def parameter_text(param: inspect.Parameter) -> str:
    """One parameter with its type and default."""
    stars = {param.VAR_POSITIONAL: "*", param.VAR_KEYWORD: "**"}.get(param.kind, "")
    text = stars + param.name
    if param.annotation is not param.empty:
        text += f": {plain(param.annotation)}"
    if param.default is not param.empty:
        default = param.default
        simple = default is None or isinstance(default, str | int | float | bool | tuple)
        text += f" = {default!r}" if simple else " = ..."
    return text


def plain(annotation: Any) -> str:
    """An annotation as the source has it."""
    if isinstance(annotation, str):
        return annotation
    return getattr(annotation, "__name__", None) or str(annotation)


def main() -> int:
    """Write, or with --check name, what is out of date."""
    check = sys.argv[1:] == ["--check"]
    if sys.argv[1:] and not check:
        print(__doc__)
        return 2
    late = outdated()
    for path, content in late.items():
        print(f"docs/{path} {'is out of date' if check else 'written'}")
        if not check:
            (DOCS / path).parent.mkdir(parents=True, exist_ok=True)
            (DOCS / path).write_text(content, encoding="utf-8")
    return 1 if check and late else 0


if __name__ == "__main__":
    raise SystemExit(main())
