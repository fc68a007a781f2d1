"""The report in a real Chromium: it opens, draws every chart, in both languages, on a phone, and
keyboard and contrast are as they should be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.report.folders import HOSTILE, browser, make_run
from weft.report import CATALOGUE, plan_page, read_run, run_page, write_html

PLAN = {
    "cluster": "h100x8",
    "model": {"params": 8e9},
    "batch": 64,
    "best": {"layout": "dp8", "step_s": 0.5, "tokens_per_s": 1e5, "held_bytes": 6e10},
    "rows": [
        {"layout": layout, "step_s": 0.5, "time": {"forward": 0.3, "dp exposed": 0.2},
         "memory": {"weights": 2e10, "activations": 4e10}, "traffic": {"dp": 1e9}}
        for layout in ("dp8", "dp4.tp2")
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    one, two = (read_run(make_run(folder, name)) for name in ("one", "two"))
    made = {"one": run_page([one]), "two": run_page([one, two]), "plan": plan_page(PLAN)}
    for name, page in made.items():
        write_html(folder / f"{name}.html", page)
    return {name: folder / f"{name}.html" for name in made}


def opened(driver: Any, path: Path) -> Any:
    driver.get(path.as_uri())
    assert driver.execute_script("return document.documentElement.dataset.ready") == "yes"
    said = [line["message"] for line in driver.get_log("browser")]
    assert not said, said
    return driver


# Each chart's title, and how many shapes it has in a colour that only data has.
SHAPES = """
const style = getComputedStyle(document.documentElement);
const names = [1, 2, 3, 4, 5, 6].map((n) => style.getPropertyValue(`--series-${n}`).trim());
return [...document.querySelectorAll("figure")].map((figure) => [
  figure.querySelector("figcaption").textContent,
  [...figure.querySelectorAll("svg path, svg rect, svg polyline")].filter((shape) => {
    const box = shape.getBBox(), fill = shape.getAttribute("fill");
    const colour = fill && fill !== "none" ? fill : shape.getAttribute("stroke");
    const ofData = names.includes(colour) || (figure.dataset.chart === "heat" && /^rgb/.test(fill));
    return ofData && box.width + box.height > 1;
  }).length,
]);
"""


@pytest.mark.parametrize("name", ["one", "two", "plan"])
@pytest.mark.parametrize("language", ["en-US", "zh-CN"])
def test_it_opens_and_draws_every_chart(
    pages: dict[str, Path], tmp_path: Path, name: str, language: str
) -> None:
    with browser(tmp_path, language) as driver:
        opened(driver, pages[name])
        shapes = driver.execute_script(SHAPES)
        assert len(shapes) >= 3 and all(count for _, count in shapes), shapes
        body = driver.find_element("tag name", "body").text
        words = json.loads(CATALOGUE.read_text(encoding="utf-8"))["summary.title"]
        assert words[language == "zh-CN"] in body
        lang = driver.execute_script("return document.documentElement.lang")
        assert lang == ("zh-CN" if language == "zh-CN" else "en")
        assert "[object" not in body and "undefined" not in body and "NaN" not in body
        assert driver.execute_script("return document.images.length") == 0
        if name == "one":
            assert HOSTILE in body
            assert ("与计算重叠的比例" if language == "zh-CN" else "54.5 %") in body


def test_the_language_can_be_switched(pages: dict[str, Path], tmp_path: Path) -> None:
    with browser(tmp_path) as driver:
        opened(driver, pages["one"])
        button = driver.find_element("id", "language")
        assert button.text == "中文"
        button.click()
        assert "概览" in driver.find_element("tag name", "main").text
        assert driver.find_element("id", "language").text == "English"
        assert all(count for _, count in driver.execute_script(SHAPES))


@pytest.mark.parametrize("name", ["one", "two", "plan"])
def test_nothing_is_wider_than_a_phone(pages: dict[str, Path], tmp_path: Path, name: str) -> None:
    with browser(tmp_path, width=390) as driver:
        opened(driver, pages[name])
        wide = driver.execute_script(
            "return [document.documentElement.scrollWidth,"
            " ...[...document.querySelectorAll('figure')].map((f) => f.offsetWidth)]"
        )
        assert max(wide) <= 390, wide
        assert all(count for _, count in driver.execute_script(SHAPES))


def test_the_keyboard_reaches_everything(pages: dict[str, Path], tmp_path: Path) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.wait import WebDriverWait

    with browser(tmp_path) as driver:
        opened(driver, pages["one"])
        seen = set()
        for _ in range(120):
            ActionChains(driver).send_keys(Keys.TAB).perform()
            seen.add(
                driver.execute_script(
                    "const e = document.activeElement; return e.className.split(' ')[0]"
                    " || e.tagName.toLowerCase()"
                )
            )
        assert {"skip", "button", "a", "chart", "summary", "scroll"} <= seen
        chart = driver.find_element("css selector", "#loss .chart")
        driver.execute_script("arguments[0].focus()", chart)
        outline = driver.execute_script("return getComputedStyle(arguments[0]).outlineStyle", chart)
        assert outline == "solid"
        ActionChains(driver).send_keys(Keys.ARROW_RIGHT).send_keys(Keys.ARROW_RIGHT).perform()
        assert "loss: 3.5" in chart.text  # of step 2
        details = driver.find_element("css selector", "#loss summary")
        driver.execute_script("arguments[0].focus()", details)
        ActionChains(driver).send_keys(Keys.ENTER).perform()
        filled = WebDriverWait(driver, 20)  # when the browser says that it has opened
        filled.until(lambda d: d.find_elements("css selector", "#loss details table"))
        table = driver.find_element("css selector", "#loss details table").text
        assert "3.5" in table and "1.125" in table


# Of every element with a text of its own: the contrast of its colour with what is behind it.
CONTRAST = """
const channel = (v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
const parse = (text) => text.match(/[\\d.]+/g).map(Number);
const ground = (e) => {
  for (; e; e = e.parentElement) {
    const found = parse(getComputedStyle(e).backgroundColor);
    if (found.length < 4 || found[3] > 0) return found;
  }
  return [255, 255, 255];
};
const found = [];
for (const e of document.querySelectorAll("body *")) {
  const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
  if (!own || e.closest("script, style, noscript, svg")) continue;
  const [a, b] = [light(parse(getComputedStyle(e).color)), light(ground(e))];
  const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (ratio < 4.5) found.push([e.className || e.tagName, e.textContent.slice(0, 40), ratio]);
}
const style = getComputedStyle(document.documentElement), card = document.querySelector("section");
for (const n of [1, 2, 3, 4, 5, 6]) {
  const hex = style.getPropertyValue(`--series-${n}`).trim();
  const own = [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
  const [a, b] = [light(own), light(ground(card))];
  const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (ratio < 3) found.push([`series ${n}`, hex, ratio]);
}
return found;
"""


@pytest.mark.parametrize("dark", [False, True])
def test_contrast(pages: dict[str, Path], tmp_path: Path, dark: bool) -> None:
    """Of WCAG 2: 4.5 for text, 3 for what a chart draws."""
    with browser(tmp_path, dark=dark) as driver:
        opened(driver, pages["one"])
        assert driver.execute_script(CONTRAST) == []
        ground = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert ("15, 19, 24" in ground) == dark
        names = driver.execute_script(
            "return [...document.querySelectorAll('.chart')].map((c) => c.ariaLabel)"
        )
        assert all(names)
