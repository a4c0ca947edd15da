"""The pages in a real browser, opened as files: `tests/browser/run` builds them and finds the browser."""

import os
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parents[2]
SITE = ROOT / "site"
PAGES = sorted(path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md"))
LAPTOP, TELEPHONE, HEIGHT = 1280, 390, 900
TALLEST = 20_000  # Pixels of a page on a telephone: twenty screens.
BROWSER = Path(os.environ.get("KVTIER_BROWSER", "/nonexistent"))

pytestmark = [
    pytest.mark.outside,
    pytest.mark.skipif(not BROWSER.exists(), reason="KVTIER_BROWSER names no browser: `tests/browser/run` finds one"),
]

LOCAL = ("file", "blob", "data")
BEYOND_THE_WINDOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
CUT_CODE = """
    [...document.querySelectorAll("pre > code")]
        .filter(code => code.scrollWidth > code.clientWidth + 1)
        .map(code => code.innerText.split("\\n").reduce((a, b) => a.length > b.length ? a : b))
"""
DRAWN = 'document.querySelectorAll("pre.mermaid").length === 0'


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser):
    with browser.new_page(viewport={"width": LAPTOP, "height": HEIGHT}) as page:
        yield page


def told(page):
    """Return a list to which the page adds its errors, and whatever it asks of a network."""
    errors = []
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: urlsplit(request.url).scheme in LOCAL or errors.append(request.url))
    page.on("requestfailed", lambda request: errors.append(f"{request.url}: {request.failure}"))
    return errors


@pytest.mark.parametrize("name", PAGES, ids=str)
def test_a_page_fits_its_window_with_its_code_and_diagrams_and_asks_no_network(page, name):
    errors = told(page)
    page.goto((SITE / name).as_uri(), wait_until="load")
    page.wait_for_function(DRAWN)
    assert (page.evaluate(BEYOND_THE_WINDOW), page.evaluate(CUT_CODE)) == (0, [])
    page.set_viewport_size({"width": TELEPHONE, "height": HEIGHT})
    assert (page.evaluate(BEYOND_THE_WINDOW), errors) == (0, [])
    assert page.evaluate("document.documentElement.scrollHeight") <= TALLEST


@pytest.mark.parametrize(
    ("words", "width", "found"),
    [
        ("capacity_bytes", LAPTOP, "reference/configuration.html"),
        ("capacity_bytes", TELEPHONE, "reference/configuration.html"),
        ("upgrade", LAPTOP, "how-to/operate.html"),
        ("rolling", LAPTOP, "how-to/operate.html"),
        ("data parallel", LAPTOP, "how-to/operate.html"),
        ("kvtier prune", LAPTOP, "reference/cli.html"),
    ],
)
def test_search_finds_an_option_a_command_and_a_question(page, words, width, found):
    errors = told(page)
    page.set_viewport_size({"width": width, "height": HEIGHT})
    page.goto((SITE / "index.html").as_uri(), wait_until="load")
    if width == TELEPHONE:
        page.locator("label[for=__search]").first.click()
    page.get_by_placeholder("Search").press_sequentially(words)
    page.locator(f".md-search-result__link[href*='{found}']").first.wait_for()
    assert errors == []


def test_on_a_telephone_a_table_of_options_is_cards(page):
    page.set_viewport_size({"width": TELEPHONE, "height": HEIGHT})
    page.goto((SITE / "reference" / "configuration.html").as_uri(), wait_until="load")
    row = page.locator("tr", has=page.locator("td:first-child code", has_text="cpu_bytes_to_use")).last
    assert row.evaluate("row => getComputedStyle(row).display") == "block"
    assert row.locator("td").nth(1).evaluate("cell => getComputedStyle(cell, '::before').content") == '"default: "'


def test_a_page_leads_to_the_next_one_and_back(page):
    page.goto((SITE / "index.html").as_uri(), wait_until="load")
    page.locator(".md-footer__link--next").click()
    page.wait_for_url("**/tutorial/first-steps.html")
    page.locator(".md-footer__link--prev").click()
    page.wait_for_url("**/index.html")
