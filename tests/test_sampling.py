"""The sample that ./test.sh takes of tests with many cases."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.sampling import cover, sample, words


def test_a_case_is_made_of_words() -> None:
    assert words("gpt2-pp2+zb-v.tp2") == {"gpt2", "pp2", "zb", "v", "tp2"}


def test_every_word_occurs_in_the_sample() -> None:
    cases = [f"{model}-{layout}" for model in "abc" for layout in ("dp2", "tp2", "pp2.dp2", "cp2")]
    taken = [cases[i] for i in cover(cases)]
    assert len(taken) < len(cases)
    assert set().union(*map(words, taken)) == set().union(*map(words, cases))
    assert "a-dp2" not in taken and "a-pp2.dp2" in taken  # what has more words comes first
    assert cover([]) == []


def test_fewer_are_those_with_the_most_words() -> None:
    cases = ["a-dp2", "a-pp2.dp2", "b-tp2.cp2", "b-dp2"]
    assert cover(cases, 1) == [1]
    assert cover(cases, 2) == [1, 2]
    assert cover(cases, 9) == cover(cases)


@dataclass
class Item:
    """What `sample` looks at of a pytest item."""

    nodeid: str
    mark: pytest.MarkDecorator | None = None

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self.mark.mark if self.mark is not None and self.mark.name == name else None


def test_ci_leaves_out_what_is_too_long_for_it() -> None:
    short, slow = Item("short"), Item("slow", pytest.mark.slow)
    long = Item("long", pytest.mark.slow(ci=False))
    assert sample([short, slow, long], slow=False) == ([short], [slow, long])
    assert sample([short, slow, long], slow=True) == ([short, slow], [long])
