"""The report in chromium: drawn and clicked without a complaint, in reach of everybody by axe-core's rules, and inert
whatever its names hold.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, Request, sync_playwright

from planner.render_report.page import page
from tests.unit.planner.render_report.test_page import Make, hostile, report

NAMES = ("chromium", "chromium-browser", "google-chrome")
DESK, PHONE = 1280, 390  # pixels
# Rules of WCAG 2.2, levels A and AA, and what axe-core's authors hold for good practice.
RULES = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("no chromium on this machine: apt-get install chromium")
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


def opened(
    browser: Browser, make: Make, folder: Path, width: int = DESK, theme: Literal["light", "dark"] = "light"
) -> Page:
    """The page as a reader has it. A word on its console, or a file that it asks for, fails the test."""
    file = folder / "report.html"
    file.write_text(page(make()), encoding="utf-8")
    # The page lets no script but its own run, and axe-core is another.
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=theme, offline=True, bypass_csp=True
    )

    def no_request(asked: Request) -> None:
        assert asked.url == file.as_uri() or asked.url.startswith("data:"), asked.url

    view = context.new_page()
    view.on("console", lambda message: pytest.fail(f"console: {message.text}"))
    view.on("pageerror", lambda error: pytest.fail(f"error: {error}"))
    view.on("request", no_request)
    view.goto(file.as_uri())
    if os.environ.get("REPORT_PICTURES"):
        view.screenshot(path=Path(os.environ["REPORT_PICTURES"]) / f"{theme}-{width}.png", full_page=True)
    return view


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [DESK, PHONE])
def test_nothing_is_out_of_reach(browser: Browser, theme: Literal["light", "dark"], width: int, tmp_path: Path) -> None:
    view = opened(browser, report, tmp_path, width, theme)
    found = Axe().run(view, options=RULES)
    assert found.response["passes"], "axe-core looked at nothing"
    assert found.violations_count == 0, found.generate_report()
    assert view.evaluate("document.documentElement.scrollWidth") <= width, "the page has to be pushed sideways"
    view.context.close()


def test_axe_finds_what_is_out_of_reach(browser: Browser, tmp_path: Path) -> None:
    """The same question of a page that has been spoilt is answered otherwise."""
    view = opened(browser, report, tmp_path)
    view.evaluate("document.documentElement.removeAttribute('lang')")
    view.evaluate("document.querySelector('button').textContent = ''")
    found = {each["id"] for each in Axe().run(view, options=RULES).response["violations"]}
    assert {"html-has-lang", "button-name"} <= found
    view.context.close()


def test_buttons_keys_and_the_pointer_move_the_timeline(browser: Browser, tmp_path: Path) -> None:
    view = opened(browser, report, tmp_path)
    told, canvas = view.locator("#timeline-told"), view.locator("#timeline-canvas")
    assert told.text_content() == "Point at an action to see what it is."  # the script ran to its end
    view.click("#timeline-in")
    once = told.text_content()
    assert once is not None
    assert once.startswith("shown: ")
    canvas.press("+")
    assert told.text_content() not in (once, None)
    canvas.press("Home")
    assert "shown: 0.00 µs to" in (told.text_content() or "")
    canvas.hover(position={"x": 100, "y": 10})
    assert (told.text_content() or "").startswith("rank 0: forward, stage 0, micro-batch 0")
    view.context.close()


def test_the_theme_is_changed_by_its_button_and_not_printed(browser: Browser, tmp_path: Path) -> None:
    view = opened(browser, report, tmp_path)
    ground = "getComputedStyle(document.body).backgroundColor"
    light = view.evaluate(ground)
    view.click("#theme")
    dark = view.evaluate(ground)
    assert light != dark
    view.emulate_media(media="print")
    view.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert view.evaluate(ground) not in (dark, None)
    view.context.close()


def test_no_name_is_more_than_text(browser: Browser, tmp_path: Path) -> None:
    view = opened(browser, hostile, tmp_path)
    view.wait_for_timeout(200)
    assert "hacked" not in view.title().partition("<")[0]
    assert view.locator("img").count() == 0
    assert view.locator("script").count() == report_scripts(browser, tmp_path)
    view.context.close()


def report_scripts(browser: Browser, folder: Path) -> int:
    """How many the page has that nobody attacks."""
    view = opened(browser, report, folder)
    number = view.locator("script").count()
    view.context.close()
    return number
