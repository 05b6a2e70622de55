"""The report in a browser: numbers read back from the page, in light and dark, and no overflow."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from draftsmith.serve.evaluation.report import render
from tests.unit.test_serve import _results

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (Debian's package chromium)")

_QUIET = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_playwright = pytest.importorskip("playwright.sync_api").sync_playwright
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=_QUIET)
        yield launched
        launched.close()


@pytest.mark.parametrize(("scheme", "background"), [("light", "rgb(255, 255, 255)"), ("dark", "rgb(18, 22, 28)")])
@pytest.mark.parametrize("width", [1200, 420])
def test_numbers_are_read_back(browser: Any, tmp_path: Path, scheme: str, background: str, width: int) -> None:
    results = _results()
    (tmp_path / "report.html").write_text(render(results))
    page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 900})
    requested, complaints = [], []
    page.on("request", lambda request: requested.append(request.url))
    page.on("console", lambda message: complaints.append(message.text))
    page.goto(f"file://{tmp_path}/report.html")

    assert float(page.inner_text(".headline").split("\N{MULTIPLICATION SIGN}")[0]) == round(
        results["suites"]["held_out"]["speedup"], 2
    )
    rows = page.locator("h2:text-is('Suites') + .scroll tbody tr").all()
    cells = [[cell.inner_text() for cell in row.locator("td").all()] for row in rows]
    read = {(row[0], row[1]): (float(row[2]), row[9]) for row in cells}
    for name, suite in results["suites"].items():
        for k, at_k in suite["at_k"].items():
            chosen = k == str(results["num_speculative_tokens"])
            shown = f"{suite['speedup']:.3f}" if chosen else ""
            assert read[name, k] == (round(at_k["acceptance_length"], 3), shown)
        for method, other in suite["methods"].items():
            assert read[f"{name}, {method}", "3"] == (other["tokens_per_step"], f"{other['speedup']:.3f}")
    for rate, at in results["rates"].items():
        row = page.locator(
            f"h2:text-is('By request rate') ~ .scroll tbody tr:has(td:text-is('{rate}')) td"
        ).all_inner_texts()
        assert (row[7], row[8]) == (
            f"{at['baseline']['seconds_per_token']:.3f}",
            f"{at['speculative']['seconds_per_token']:.3f}",
        )
    right = page.locator("h2:text-is('Correct answers') + .scroll tbody tr").first.locator("td").all_inner_texts()
    assert right[1:] == ["last number", "5", "40.0%", "20.0%"]
    assert page.locator(".answer b").all_inner_texts() == [" is", " <late>"]
    assert page.inner_text(".answer") == "It is <late>."

    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == background
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "the page scrolls sideways"
    for chart in page.locator("svg").all():
        box = chart.bounding_box()
        for text in chart.locator("text").all():
            inside = text.bounding_box()
            assert box["x"] - 1 <= inside["x"], text.inner_html()
            assert inside["x"] + inside["width"] <= box["x"] + box["width"] + 1, text.inner_html()
    picture = tmp_path / "report.png"
    page.screenshot(path=picture, full_page=True)
    assert picture.stat().st_size > 10_000
    assert requested == [f"file://{tmp_path}/report.html"]
    assert complaints == []
    page.close()
