"""What a `package.module:callable` of a run file names, and its call with a table's arguments; what
a path of it names."""

from __future__ import annotations

import glob
import importlib
import inspect
import os
import pkgutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from weft.core import (
    NO_CODE,
    ConfigError,
    Refusal,
    RunConfig,
    fault_of,
    nearest,
    require_known,
    table_keys,
    told_fault,
)

# Names of these may stand in a run file of which no code is to run.
_OWN = ("weft.models", "weft.losses", "weft.data", "weft.optimizers", "weft.callbacks")


def resolve_callable(
    name: str, folder: str | Path = ".", field: str = "build"
) -> Callable[..., Any]:
    """What `package.module:callable` names. `folder` and the current directory are importable.
    Raises ConfigError."""
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        fix = _with_colon(name) if not colon else 'write as in "weft.models:decoder"'
        raise ConfigError(field, name, "is not of the form package.module:callable", fix)
    if "/" in module_name or module_name.endswith(".py"):
        module = module_name.removesuffix(".py").removeprefix("./").replace("/", ".").strip(".")
        problem = "names a file, and not a module"
        fix = f'write "{module}:{attribute}"; modules are found beside the run file'
        raise ConfigError(field, name, problem, fix)
    if os.environ.get(NO_CODE):
        _refuse_code(field, name, module_name, attribute)
    for place in () if os.environ.get(NO_CODE) else (Path.cwd(), Path(folder).resolve()):
        if str(place) not in sys.path:
            sys.path.insert(0, str(place))
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = str(error.name)
        problem = f"there is no module {missing}"
        if not f"{module_name}.".startswith(f"{missing}."):
            problem = f"imports {missing}, which is not installed"
        raise ConfigError(field, name, problem, _module_hint(missing)) from error
    except Refusal:
        raise
    except (Exception, SystemExit) as error:  # a user's module may fail in any way
        problem = f"importing {module_name} fails: {told_fault(error)}"
        raise ConfigError(field, name, problem, "correct that module") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            known = [word for word in dir(found) if not word.startswith("_")]
            raise ConfigError(field, name, f"{module_name} has no {part}", nearest(part, known))
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(
            field,
            name,
            f"is of type {type(found).__name__} and cannot be called",
            "name a function",
        )
    return found


def _with_colon(name: str) -> str:
    """What to write in the place of a name without a colon."""
    module, _, last = name.rpartition(".")
    for own in _OWN:
        if module in ("", own) and last in importlib.import_module(own).__all__:
            return f'did you mean "{own}:{last}"?'
    module = module or "file"
    return f'write "{module}:{last}" for {last} in {module.replace(".", "/")}.py'


def _module_hint(missing: str) -> str:
    """What to do about a module that is not there."""
    package, _, last = missing.rpartition(".")
    folders = getattr(sys.modules.get(package), "__path__", [])
    if inside := [module.name for module in pkgutil.iter_modules(folders)]:
        return nearest(last, inside)
    return f"install it, or put {missing}.py beside the run file or in the current directory"


def _refuse_code(field: str, name: str, module: str, attribute: str) -> None:
    """Raises ConfigError unless this is a public name of weft: modules that weft imports would
    lead to all the rest of Python."""
    if module in _OWN and attribute in importlib.import_module(module).__all__:
        return
    problem = f"is code from outside weft, which --no-code or {NO_CODE} forbids"
    fix = f"name what {', '.join(_OWN)} offer, or read that code and leave --no-code out"
    raise ConfigError(field, name, problem, fix)


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except ValueError:  # some builtins have none: they take what they take
        return inspect.signature(lambda *args, **arguments: None)


def call_named(
    function: Callable[..., Any],
    name: str,
    table: str,
    positional: tuple,
    arguments: Mapping[str, Any],
) -> Any:
    """`function(*positional, **arguments)`, with the arguments checked against its signature."""
    signature = signature_of(function)
    named = [
        p
        for p in signature.parameters.values()
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    named = named[len(positional) :]
    if all(p.kind is not p.VAR_KEYWORD for p in signature.parameters.values()):
        known = [p.name for p in named]
        require_known(table, arguments, known, f"argument of {name}", table_keys(table))
    for parameter in named:
        if parameter.default is parameter.empty and parameter.name not in arguments:
            field = f"{table}.{parameter.name}"
            raise ConfigError(
                field, None, f"{name} needs it", f"write {parameter.name} in [{table}]"
            )
    try:
        return function(*positional, **arguments)
    except ConfigError as error:  # a class names its argument, and not the key of the run file
        if error.field not in signature.parameters:
            raise
        raise ConfigError(f"{table}.{error.field}", error.value, error.problem, error.fix) from None
    except Refusal:
        raise
    except (Exception, SystemExit) as error:  # a user's code may fail in any way
        own = bool(fault_of(error)[1])  # else weft or torch refuses the arguments
        if not own and not isinstance(error, TypeError | ValueError | RuntimeError):
            raise
        problem = f"{name} fails: {told_fault(error) if own else error}"
        if own and not arguments:
            field = table if "." in table else f"{table}.build"
            raise ConfigError(field, name, problem, "correct that code") from error
        fix = "correct these arguments" + (", or that code" if own else "")
        raise ConfigError(table, dict(arguments), problem, fix) from error


def resolve_path(run: RunConfig, path: str) -> str:
    """A path or pattern of the run file: below the run's folder if something is there, else as it
    is written."""
    below = os.path.join(run.folder, path)
    return below if path and any(True for _ in glob.iglob(below, recursive=True)) else path
