"""Hints of errors."""

from __future__ import annotations

import pytest

from weft.core.errors import ConfigError, check_renamed, nearest


def test_a_hint_names_the_nearest_word() -> None:
    assert nearest("stesp", ["steps", "batch"]) == 'did you mean "steps"?'
    assert nearest("colour", ["steps", "batch"]) == "known: batch, steps"


def test_an_old_name_gets_the_new_one() -> None:
    assert nearest("--wide", ["--exhaustive", "--wider"]) == 'it is now called "--exhaustive"'
    assert "exhaustive" not in nearest("--wide", ["--layout"])


def test_an_old_option_is_refused() -> None:
    check_renamed("--exhaustive")
    with pytest.raises(ConfigError, match="is now called --exhaustive"):
        check_renamed("--wide")
