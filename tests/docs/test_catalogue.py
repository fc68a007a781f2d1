"""Each catalogue has every message of the source, with its values, and finds it again."""

from __future__ import annotations

import re
from pathlib import Path
from string import Formatter

import pytest
from babel.messages import Catalog

from tests.docs.scripts import ROOT, load_script
from tests.docs.test_translations import other_words
from weft.core import languages, translation

script = load_script("catalogue")
MESSAGES = script.messages()
CATALOGUES = sorted(script.LOCALE.glob("*.po"))
WORD = re.compile(r"[\u4e00-\u9fff]")


@pytest.fixture(scope="module", params=CATALOGUES, ids=lambda path: path.stem)
def catalogue(request: pytest.FixtureRequest) -> Catalog:
    return script.updated(request.param)


def fields(text: str) -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(text) if name is not None}


def faults(catalogue: Catalog) -> list[str]:
    """What a catalogue lacks."""
    found = []
    for message in catalogue:
        if not message.id:
            continue
        if not message.string:
            found.append(f"not translated: {message.id}")
        elif message.fuzzy:
            found.append(f"fuzzy: {message.id}")
        elif fields(message.id) != fields(message.string):
            found.append(f"other values: {message.id}")
    return found


def test_every_message_is_translated(catalogue: Catalog) -> None:
    assert not faults(catalogue)
    assert len(catalogue) > 1500


@pytest.mark.parametrize("path", CATALOGUES, ids=lambda path: path.stem)
def test_a_catalogue_is_as_the_script_writes_it(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == script.written(script.updated(path))


def test_what_a_catalogue_lacks_is_named(catalogue: Catalog) -> None:
    message = next(each for each in catalogue if each.id and "{" in each.id)
    kept = message.string
    try:
        for string, flags, fault in [
            ("", set(), "not translated"),
            (kept, {"fuzzy"}, "fuzzy"),
            (re.sub(r"\{\w+\}", "", kept), set(), "other values"),
        ]:
            message.string, message.flags = string, flags
            assert faults(catalogue) == [f"{fault}: {message.id}"]
    finally:
        message.string, message.flags = kept, set()


def test_new_messages_are_found(tmp_path: Path) -> None:
    """Through names, choices, additions, and functions that hand a text on."""
    (tmp_path / "one.py").write_text(
        "class Odd(Refusal): ...\n"
        "def refuse(name, fix):\n"
        "    problem = f'is no {name} here' if name else 'is missing here'\n"
        "    problem += ', and nowhere else'\n"
        "    raise Odd('a', 1, problem, fix)\n"
        "def begin(count):\n"
        "    refuse('b', f'write {count!r} or {count + 1}')\n"
        "    log_line('it has begun')\n"
        "    unknown('not said to anybody')\n"
    )
    assert set(script.MessageFinder(tmp_path).find()) == {
        "is no {name} here, and nowhere else",
        "is missing here, and nowhere else",
        "write {count} or {count2}",
        "it has begun",
    }


def test_an_instance_of_each_message_is_translated(catalogue: Catalog) -> None:
    """As it is printed, with values in it: by its own translation, or by one that has as many of
    its characters."""
    messages = {each.id: each.string for each in catalogue if each.id}
    found, lost = translation.Catalogue(messages), []
    for message in messages:
        values = {name: f"<{name}>" for name in fields(message)}
        least = len(message.format_map(dict.fromkeys(values, "")))
        said = found.message(message.format_map(values), part=True)
        if said is None or said[1] < least:
            lost.append(message)
    assert str(catalogue.locale) in languages() and not lost


def test_translations_are_chinese() -> None:
    """With the terms of the glossary, and punctuation of full width between Chinese words."""
    path = ROOT / "src" / "weft" / "core" / "locale" / "zh.po"
    messages = translation.read_messages(path.read_text(encoding="utf-8"))
    for message, text in messages.items():
        assert not other_words(text), text
        said = re.sub(r"\[[^]]*\]", "", text)  # but in lists, which are as weft prints them
        assert not re.search(r"[\u4e00-\u9fff][,;:?!][ \u4e00-\u9fff]|[\u4e00-\u9fff]\.$", said), (
            text
        )
        told = re.sub(r"`[^`]*`|\"[^\"]*\"|\{\w*\}", "", message)
        if len(re.findall(r"[a-z]{2,}", told)) > 3:
            assert WORD.search(text), message
