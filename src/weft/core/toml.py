"""TOML tables as pydantic models: an unknown key or wrong value is a ConfigError that names it;
what is written reads back the same. No torch."""

from __future__ import annotations

import datetime
import json
import re
from typing import Annotated, Any, ClassVar, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from .errors import ConfigError, either, nearest

FEW = 3  # tables that may have a key of this name, so that they are named

# lists of TOML are tuples here
AS_TUPLE = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
Strings = Annotated[tuple[str, ...], AS_TUPLE]


class TomlTable(BaseModel):
    """A table whose keys are all known."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class CallableTable(BaseModel):
    """A table that names a callable; its other keys are arguments of that callable."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)
    usual: ClassVar[tuple[str, ...]] = ()  # arguments that most of these callables take

    @property
    def arguments(self) -> dict[str, Any]:
        """The keys that are arguments of the callable."""
        return dict(self.model_extra or {})


# ---- writing -------------------------------------------------------------------------------------


def dump_toml(table: BaseModel) -> str:
    """TOML text of every key, defaults included, that reads back to the same."""
    tables = table.model_dump(exclude_none=True)
    plain = {name: one for name, one in tables.items() if not isinstance(one, dict)}
    parts = ["".join(f"{_key(k)} = {_value(v)}\n" for k, v in plain.items())]
    for name, inner in tables.items():
        if isinstance(inner, dict):
            parts.append(
                f"[{_key(name)}]\n"
                + "".join(f"{_key(k)} = {_value(v)}\n" for k, v in inner.items())
            )
    return "\n".join(parts)


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _value(key)


def _value(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str():  # JSON escapes as TOML's basic strings do, but for DEL
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case int() | float():
            return repr(value)
        case datetime.date() | datetime.time():
            return value.isoformat()
        case list() | tuple():
            return f"[{', '.join(map(_value, value))}]"
        case dict():
            return f"{{{', '.join(f'{_key(k)} = {_value(v)}' for k, v in value.items())}}}"
    raise TypeError(f"{type(value).__name__} is no TOML value")


# ---- refusals ------------------------------------------------------------------------------------


def table_error(problem: str, fix: str, **key: object) -> PydanticCustomError:
    """`key`: the key of the table and its value, where a table and not one key is being checked."""
    return PydanticCustomError("refused", "{problem}", {"problem": problem, "fix": fix, "key": key})


def exactly_one(**keys: object) -> None:
    given = [name for name, value in keys.items() if value is not None]
    if len(given) != 1:
        names = ", ".join(keys)
        raise table_error(
            f"names {' and '.join(given) or 'nothing'}", f"give exactly one of {names}"
        )


_KINDS = {
    "int_type": ("is not a whole number", "write a whole number"),
    "float_type": ("is not a number", "write a number"),
    "string_type": ("is not a text", "write a text in quotes"),
    "bool_type": ("is neither true nor false", "write true or false"),
    "tuple_type": ("is not a list", 'write a list, as in ["a", "b"]'),
    "dict_type": ("is not a table", "write a table"),
    "model_type": ("is not a table", "write a table"),
    "string_too_short": ("is empty", "write a name"),
}


def toml_refusal(error: ValidationError, model: type[BaseModel], file: str) -> ConfigError:
    """The ConfigError that says what pydantic found first in a `file` of this model ("run
    file")."""
    # A misspelt key first: the key that it stands for is missing because of it.
    return _refusal(
        sorted(error.errors(), key=lambda e: e["type"] != "extra_forbidden")[0], model, file
    )


def _owner(
    model: type[BaseModel], found: tuple[int | str, ...]
) -> tuple[type[BaseModel], list[str]]:
    """The innermost table that holds what is at this place, and its dotted path: an item of a list
    of values, or one of several types, is not gone into."""
    path: list[str] = []
    inside: Any = model
    for part in found:
        if not (isinstance(inside, type) and issubclass(inside, BaseModel)):
            tables = _tables_in(inside)
            if not tables and get_origin(inside) is not dict:
                break
            inside = tables[0] if tables else get_args(inside)[1]
            model = tables[0] if tables else model
        else:
            model, info = inside, inside.model_fields.get(str(part))
            inside = info.annotation if info is not None else None
        path.append(str(part))
    return model, path


def _tables_in(annotation: Any) -> list[type[BaseModel]]:
    """The tables that a value of several types, or the items of a list, may be."""
    found = []
    for part in get_args(annotation):
        if isinstance(part, type) and issubclass(part, BaseModel):
            found.append(part)
        elif get_origin(part) is not dict:
            found += _tables_in(part)
    return found


def _keys_of_tables(model: type[BaseModel], key: str) -> list[str]:
    """The table, or the keys of tables, that a key of a file may stand for: [precision],
    optimizer.lr for `lr`, checkpoint.every for `checkpoint_every`. None where many have its
    name."""
    found = []
    for name, info in model.model_fields.items():
        inside = info.annotation
        tables = [inside] if isinstance(inside, type) else _tables_in(inside)
        for table in tables:
            if not issubclass(table, BaseModel):
                continue
            keys = (*table.model_fields, *(table.usual if issubclass(table, CallableTable) else ()))
            found += [f"[{name}]"] if key == name else []
            found += [f"{name}.{each}" for each in keys if key in (each, f"{name}_{each}")]
    return found if len(found) <= FEW else []


def _refusal(error: ErrorDetails, model: type[BaseModel], file: str) -> ConfigError:
    owner, path = _owner(model, error["loc"])
    fields = owner.model_fields
    field, value, kind, context = (
        ".".join(path),
        error["input"],
        error["type"],
        error.get("ctx", {}),
    )
    about = fields[path[-1]].description if path and path[-1] in fields else None
    if kind == "extra_forbidden":
        place = f"[{'.'.join(path[:-1])}]" if len(path) > 1 else f"a {file}"
        others = _keys_of_tables(model, path[-1])
        hint = f"did you mean {either(others)}?" if others else nearest(path[-1], fields)
        return ConfigError(field, value, f"is not a key of {place}", hint)
    if kind == "missing":
        what = f"{path[-1]} in [{path[0]}]: {about}" if len(path) > 1 else f"the table [{path[0]}]"
        return ConfigError(field, None, "is missing", f"write {what}")
    if kind == "refused":
        for key, of_key in context["key"].items():
            field, value = ".".join([*path, key]), of_key
        return ConfigError(field, value, context["problem"], context["fix"])
    problem, fix = _KINDS.get(
        kind, (error["msg"].replace("Input should be", "must be"), "change it")
    )
    if kind == "literal_error":
        known = re.findall(r"'([^']*)'", context["expected"])
        problem, fix = "is not known", f"write one of {', '.join(known)}"
        if len(known) == 1:
            fix = f'write "{known[0]}"'
        elif isinstance(value, str) and "did you" in nearest(value, known):
            fix += f"; {nearest(value, known)}"
    return ConfigError(field, value, problem, f"{fix} ({about})" if about else fix)
