"""How a command reads its words, and shows its help, in the language of the locale."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from weft.core import ENGLISH, check_renamed, choose_language, language, translate

from .options import exit_codes

UsageError: Any = typer.BadParameter.__base__  # for which typer has no name
PANELS = {"argument": "Arguments", "option": "Options"}


class _Translated:
    """What typer says of wrong words, and its headings, translated."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with _usage_errors(ctx):
            return super().parse_args(ctx, args)  # type: ignore[misc]

    def get_usage(self, ctx: Any) -> str:
        return translate(super().get_usage(ctx))  # type: ignore[misc]

    def get_help_option(self, ctx: Any) -> Any:
        option = super().get_help_option(ctx)  # type: ignore[misc]
        if option is not None:
            option.help = translate(option.help)
            option.rich_help_panel = translate(PANELS["option"])
        return option


class Command(_Translated, TyperCommand):
    """A command that refuses the old name of an option, and names the new one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with exit_codes():
            for word in args:
                check_renamed(word.partition("=")[0])
        return super().parse_args(ctx, args)


class CommandGroup(_Translated, TyperGroup):
    """Commands below one name."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        with _usage_errors(ctx):
            return super().resolve_command(ctx, args)


@contextmanager
def _usage_errors(ctx: Any) -> Iterator[None]:
    """What typer says of wrong words, in one line as other errors are said."""
    try:
        yield
    except UsageError as error:
        if type(error).show is not UsageError.show:  # there are no words: help is shown
            raise
        said = " ".join(translate(error.format_message()).split())
        hint = translate(f"(help: {ctx.command_path} --help)")
        typer.echo(f"weft: {said.rstrip('.。')} {hint}", err=True)
        raise typer.Exit(error.exit_code) from None


def asked_language(words: Sequence[str]) -> str | None:
    """The value of --lang, which stands before the command: it is read before help is made."""
    following = iter(words)
    for word in following:
        option, equals, value = word.partition("=")
        if option == "--lang":
            return value if equals else next(following, None)
        if not word.startswith("-"):
            break
    return None


def localized(app: typer.Typer, words: Sequence[str]) -> Any:
    """The command of an app, its help in the language that `words` ask for, or that of the
    locale. Raises ConfigError for a language that weft does not speak."""
    asked = asked_language(words)
    if asked is not None:
        choose_language(asked)
    command = typer.main.get_command(app)
    if language() != ENGLISH:
        _translate_headings()
        _translate_help(command)
    return command


def _translate_help(command: Any) -> None:
    command.help = translate(" ".join((command.help or "").split()))
    command.rich_help_panel = translate("Commands")
    for each in command.params:
        each.help = translate(each.help or "")
        each.rich_help_panel = translate(PANELS[each.param_type_name])
    for below in getattr(command, "commands", {}).values():
        _translate_help(below)


def _translate_headings() -> None:
    """Those that typer keeps as constants, and formats itself."""
    from typer import rich_utils

    for name, text in vars(rich_utils).items():
        if name.isupper() and isinstance(text, str):
            setattr(rich_utils, name, translate(text))
