"""The language of what a person reads: English, or that of a catalogue in `locale`.

Texts are made in English, with their values in place. A message of a catalogue is a template,
`{name}` where a value stands: `translate` finds the one that a text is an instance of, and puts the
values into its translation. It is called where a text is printed. JSON, files and whatever code
reads stay English.

The language is that of the locale, as gettext reads it: the first of LANGUAGE, LC_ALL, LC_MESSAGES
and LANG that is set. Processes that weft starts inherit it.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator, Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from string import Formatter

from .errors import ConfigError

LOCALE = Path(__file__).parent / "locale"
ENGLISH = "en"
VARIABLES = ("LANGUAGE", "LC_ALL", "LC_MESSAGES", "LANG")  # as Python's gettext looks them up
LEAST_LETTERS = 8  # of one with less values are words or figures: many a text looks like it

Found = tuple[str, int]  # a translation, and how many characters of the text the message has


def languages() -> list[str]:
    """Those there are."""
    return [ENGLISH, *sorted(path.stem for path in LOCALE.glob("*.po"))]


def choose_language(code: str) -> None:
    """For this process and those that it starts. Raises ConfigError for an unknown one."""
    if code not in languages():
        fix = f"choose one of {', '.join(languages())}"
        raise ConfigError("--lang", code, "is not a language of weft", fix)
    os.environ[VARIABLES[0]] = code


def language() -> str:
    """The language of the locale, English if weft does not speak it."""
    wanted = next(filter(None, map(os.environ.get, VARIABLES)), "")
    code = re.split(r"[_.@:-]", wanted, maxsplit=1)[0].lower()
    return code if code in languages() else ENGLISH


def translate(text: str) -> str:
    """A text that is about to be printed, in the language of the locale. Of what is no message, its
    lines are translated, and of those the columns, which two spaces part."""
    code = language()
    return text if code == ENGLISH else _catalogue(code).translate(text)


@lru_cache
def _catalogue(code: str) -> Catalogue:
    return Catalogue(read_messages((LOCALE / f"{code}.po").read_text(encoding="utf-8")))


def read_messages(text: str) -> dict[str, str]:
    """Message -> translation, of a .po file's text; without those that have none or are fuzzy."""
    found = {}
    for entry in text.split("\n\n"):
        said, keyword = {"msgid": "", "msgstr": ""}, ""
        for line in entry.splitlines():
            word, quote, quoted = line.partition('"')
            if quote and not line.startswith("#"):
                keyword = word.strip() or keyword
                said[keyword] += ast.literal_eval(quote + quoted)
        fuzzy = re.search(r"^#,.*fuzzy", entry, re.MULTILINE)
        if said["msgid"] and said["msgstr"] and not fuzzy:
            found[said["msgid"]] = said["msgstr"]
    return found


class Template:
    """A message, with places for values."""

    def __init__(self, message: str, translation: str):
        self.literals, self.names = [""], list[str]()
        for literal, name, _, _ in Formatter().parse(message):
            self.literals[-1] += literal
            if name is not None:
                self.names.append(name)
                self.literals.append("")
        self.translation = translation
        self.size = sum(map(len, self.literals))
        letters = sum(map(str.isalpha, "".join(self.literals)))
        self.vague = letters < LEAST_LETTERS and not self.literals[0].endswith(": ")

    @cached_property
    def _patterns(self) -> list[re.Pattern[str]]:
        """With values as short as can be, and as long."""
        words = [*map(re.escape, self.literals)]
        return [re.compile(value.join(words), re.DOTALL) for value in ("(.*?)", "(.*)")]

    def values(self, text: str) -> Iterator[Mapping[str, str]]:
        """Name -> value, of each way in which the text may be an instance."""
        if not text.startswith(self.literals[0]) or not text.endswith(self.literals[-1]):
            return
        at = 0
        for literal in self.literals:  # before a pattern, which takes long where nothing fits
            at = text.find(literal, at)
            if at < 0:
                return
            at += len(literal)
        for pattern in self._patterns:
            match = pattern.fullmatch(text)
            if match is not None and not self._crosses(match):
                yield dict(zip(self.names, match.groups(), strict=True))

    def _crosses(self, match: re.Match[str]) -> bool:
        """Whether a value begins in one cell of a table, and ends in another. After a colon it is
        a text of its own."""
        if any(value.startswith(" ") for value in match.groups()):
            return True
        return not self.literals[0] and any(
            re.search(r" {2}|\n", value) and not re.search(r":\s*$", before)
            for before, value in zip(self.literals, match.groups(), strict=False)
        )


def _is_text(value: str) -> bool:
    """Whether it has words: it is no name, and no figure with its unit."""
    return " " in value and not re.fullmatch(r"[\d.,e+-]+ \S{1,4}", value)


def fill(translation: str, values: Mapping[str, str]) -> str:
    """Values into a translation; a space parts a Chinese character and a Latin one."""
    made = ""
    for literal, name, _, _ in Formatter().parse(translation):
        made = _beside(made, literal)
        if name is not None:
            made = _beside(made, values[name])
    return made


def _beside(left: str, right: str) -> str:
    ends = left[-1:], right[:1]
    parted = any(each.isascii() and each.isalnum() for each in ends) and any(
        "\u4e00" <= each <= "\u9fff" for each in ends
    )
    return f"{left} {right}" if parted else left + right


class Catalogue:
    """The translations of one language. `messages`: template -> its translation."""

    def __init__(self, messages: Mapping[str, str]):
        templates = [Template(*pair) for pair in messages.items()]
        self._plain = {each.literals[0]: each for each in templates if not each.names}
        self._templates = sorted(
            (each for each in templates if each.names), key=lambda each: -each.size
        )

    def translate(self, text: str) -> str:
        """See `weft.core.translate`."""
        found = self.message(text)
        if found is not None:
            return found[0]
        return "\n".join(map(self._line, text.split("\n")))

    def _line(self, line: str) -> str:
        found = self.message(line)
        return self._columns(line) if found is None else found[0]

    def _columns(self, line: str) -> str:
        """Columns begin where they began, where there is room: a Chinese character is as wide as
        two others."""
        from rich.cells import cell_len

        made, owed = "", 0
        for piece in re.split(r"( {2,})", line):
            if piece.isspace():
                wide = max(2 if made else 0, len(piece) - owed)
                owed -= len(piece) - wide
                made += " " * wide
            else:
                found = self.message(piece)
                made += piece if found is None else found[0]
                owed += 0 if found is None else cell_len(found[0]) - cell_len(piece)
        return made

    def message(self, text: str, part: bool = False) -> Found | None:
        """The translation of one whole message. `part`: of a longer one, whose other parts are
        messages too, so that it is no other text that looks like one."""
        plain = self._plain.get(text)
        if plain is not None:
            return plain.translation, plain.size
        refusal = self._refusal(text)
        if refusal is not None:
            return refusal
        ways = (self._instance(text, vague=False), self._with_remark(text), self._with_name(text))
        found = max(filter(None, ways), key=lambda one: one[1], default=None)
        return self._instance(text, vague=True) if found is None and part else found

    def _instance(self, text: str, vague: bool) -> Found | None:
        """Best one whose values are no texts, or messages."""
        first: tuple[Template, Mapping[str, str]] | None = None
        for template in self._templates:
            for values in template.values(text):
                if all(map(self._known, values.values())):
                    return self._filled(template, values)
                if first is None and (vague or not template.vague):
                    first = template, values
        return None if first is None else self._filled(*first)

    def _filled(self, template: Template, values: Mapping[str, str]) -> Found:
        said = {name: self._value(value) for name, value in values.items()}
        size = template.size + sum(of for _, of in said.values())
        return fill(template.translation, {name: text for name, (text, _) in said.items()}), size

    def _known(self, value: str) -> bool:
        """Whether it is no text, or a message."""
        return not _is_text(value) or self.message(value) is not None

    def _value(self, text: str) -> Found:
        found = self.message(text) if " " in text else None
        if found is not None:
            return found
        return (self._columns(text) if "  " in text else text), 0

    def _with_name(self, text: str) -> Found | None:
        """`name: message`."""
        name, colon, rest = text.partition(": ")
        found = self.message(rest) if colon and " " in rest and not re.search(r"\s", name) else None
        return None if found is None else (f"{name}：{found[0]}", found[1] + len(colon))

    def _with_remark(self, text: str) -> Found | None:
        """`message (remark)`."""
        for said, remark in _splits(text.removesuffix(")"), " (") if text.endswith(")") else ():
            found = self.message(said)
            if found is not None:
                inner, size = self._value(remark)
                return f"{found[0]}（{inner}）", found[1] + size
        return None

    def _refusal(self, text: str) -> Found | None:
        """`FIELD = VALUE: problem. Fix.` as a Refusal says it, if problem and fix are messages."""
        field, equals, rest = text.partition(" = ")
        if not equals or re.search("\n|: ", field) or not rest.endswith((".", "?")):
            return None
        best: Found | None = None
        for value, said in _splits(rest.removesuffix("."), ": "):
            if any(value.count(a) != value.count(b) for a, b in ("[]", "{}", "()")):
                continue  # within the value
            for problem, fix in _splits(said, ". "):
                why = self.message(problem, part=True)
                if why is None:
                    continue
                lower = fix[:1].lower() + fix[1:]
                how = self.message(lower, part=True) or self.message(fix, part=True)
                if how is not None and (best is None or why[1] + how[1] > best[1]):
                    close = "" if how[0].endswith("？") else "。"
                    best = f"{field} = {value}：{why[0]}。{how[0]}{close}", why[1] + how[1]
        return best


def _splits(text: str, mark: str) -> Iterator[tuple[str, str]]:
    """The text in two, at each of the places where the mark stands."""
    at = text.find(mark)
    while at >= 0:
        yield text[:at], text[at + len(mark) :]
        at = text.find(mark, at + 1)
