"""The file: whole, small, safe, in two languages; the command that writes it."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from tests.report.folders import HOSTILE, make_run
from weft.cli.app import app
from weft.report import CATALOGUE, read_run, run_page
from weft.report.write_html import page_html

SOURCE = CATALOGUE.parent
ECHARTS = "b66b25aeb4df84e33199dc21694014d336d222cbd9deb0e5a7c14bd6aa0d0fd0"  # 6.1.0 on npm


def weft_(*args: str | Path, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, ["report", *map(str, args)], input=stdin)


def data_of(html: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


# ---- words ---------------------------------------------------------------------------------------


def test_every_text_is_in_both_languages() -> None:
    for key, words in json.loads(CATALOGUE.read_text(encoding="utf-8")).items():
        english, chinese = words
        assert english and chinese, key
        places = [set(re.findall(r"\{(\w+)\}", each)) for each in words]
        assert places[0] == places[1], key
        # "rank" stays as it is in Chinese (docs/glossary.md).
        letters = re.sub(r"\{\w+\}|\brank\b|[^A-Za-z]", "", english)
        same_word = key in ("of", "plan.mfu", "verify.total")
        assert same_word or not letters or re.search(r"[\u4e00-\u9fff]", chinese), key


def test_the_catalogue_has_what_the_code_names_and_no_more() -> None:
    known = set(json.loads(CATALOGUE.read_text(encoding="utf-8")))
    code = "\n".join(p.read_text(encoding="utf-8") for p in SOURCE.rglob("*.py"))
    script = (SOURCE / "page.js").read_text(encoding="utf-8")
    named = {*re.findall(r'text\(\s*"([\w.-]+)"', code)}
    named |= {*re.findall(r'\bt: "([\w.]+)"', script)}
    assert named <= known, named - known
    prefixes = {*re.findall(r'text\(\s*f"(\w+\.)', code)}
    prefixes |= {*re.findall(r"t: `(\w+\.)", script)}
    plain = {key for key in known if f'"{key}"' in code or f'"{key}"' in script}
    unused = {k for k in known - plain if not k.startswith(tuple(prefixes))}
    assert not unused


# ---- the file ------------------------------------------------------------------------------------


def test_the_charts_are_those_of_npm_with_their_licence() -> None:
    content = (SOURCE / "echarts.min.js").read_bytes()
    assert hashlib.sha256(content).hexdigest() == ECHARTS
    assert "Apache License" in (SOURCE / "echarts.LICENSE").read_text()
    assert (SOURCE / "echarts.NOTICE").is_file()


def test_one_small_file_that_loads_nothing(tmp_path: Path) -> None:
    html = page_html(run_page([read_run(make_run(tmp_path))]))
    assert len(html.encode()) < 5_000_000
    head = html[: html.index("<style>")]
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', head)
    assert policy is not None and "default-src 'none'" in policy[1]
    assert "unsafe-eval" not in policy[1] and "script-src 'sha256-" in policy[1]
    assert not re.search(r"""(?:src|href)=["']?(?:https?:)?//""", head)


def test_names_that_look_like_html_stay_data(tmp_path: Path) -> None:
    name = "a</script><b>"
    folder = make_run(tmp_path / "x", plan=f"<img src=x>{HOSTILE}", run=f'output = "{HOSTILE}"\n')
    html = page_html(run_page([read_run(folder)]) | {"title": name})
    assert HOSTILE not in html and "<b>" not in html.split("<script", 1)[0]
    assert html.count("</script") == 3, "a name ended a script"
    found = data_of(html)
    assert found["title"] == name
    assert HOSTILE in json.dumps(found, ensure_ascii=False)
    half = make_run(tmp_path, events='{"event": "warning", "text": "\\ud800"}')
    page_html(run_page([read_run(half)])).encode("utf-8", errors="replace")


# ---- the command ---------------------------------------------------------------------------------


def test_a_run_and_two_runs(tmp_path: Path) -> None:
    one, two = make_run(tmp_path, "one"), make_run(tmp_path, "two", trace=None)
    result = weft_(one)
    assert result.exit_code == 0 and "report.html: 1." in result.output, result.output
    assert data_of((one / "report.html").read_text(encoding="utf-8"))["title"] == "one"
    out = tmp_path / "both.html"
    assert weft_(one, two, "--out", out).exit_code == 0
    page = data_of(out.read_text(encoding="utf-8"))
    assert page["runs"] == ["one", "two"]
    sections = {section["id"]: section for section in page["sections"]}
    assert len(sections["loss"]["blocks"][0]["series"]) == 4
    assert sections["settings"]["blocks"][0]["text"] == {"t": "settings.same"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "names no run folder"),
        (["gone"], "is not there"),
        (["one", "one", "one"], "more than two"),
        (["one", "--plan", "p.json"], "cannot stand beside --plan"),
        (["--plan", "gone.json"], "cannot be read"),
        (["--plan", "one/run.toml"], "cannot be read"),
        (["--plan", "one/ranks.json"], "is neither a plan nor a simulation"),
        (["one", "--out", "x.pdf"], "is not an HTML file"),
        (["one", "--out", "gone/x.html"], "cannot be written"),
    ],
)
def test_what_cannot_be_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    make_run(tmp_path, "one")
    monkeypatch.chdir(tmp_path)
    result = weft_(*arguments)
    assert result.exit_code == 2 and said in result.stderr and "Traceback" not in result.output


def test_a_report_never_follows_a_link(tmp_path: Path) -> None:
    folder, other = make_run(tmp_path), tmp_path / "other"
    other.write_text("mine")
    (folder / "report.html").symlink_to(other)
    assert weft_(folder).exit_code == 0
    assert other.read_text() == "mine" and not (folder / "report.html").is_symlink()
