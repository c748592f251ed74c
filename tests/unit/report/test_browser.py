"""Does a browser show a job's page to everybody: by keyboard, in the dark, on a phone, in print, to a screen reader, and
without a request or an error?

Needs a Chromium of the system, and playwright; without them it is skipped.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.client.job import Job
from orchestrator.report import page as report
from tests.support import folders

from .test_page import HOSTILE, measure

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or ""
playwright = pytest.importorskip("playwright.sync_api")
axe = pytest.importorskip("axe_playwright_python.sync_playwright")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM, reason="there is no Chromium; make deps installs it"),
]

WIDE, PHONE = {"width": 1200, "height": 900}, {"width": 360, "height": 780}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a job that failed, with curves and hostile lines."""
    home = tmp_path_factory.mktemp("home")
    job = folders.failed(home)
    folders.write_log(job, 1, HOSTILE)
    measure(job, 12, 600, 10)
    place = home / "page.html"
    place.write_text(report.page(Job(job)))
    return place


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium."""
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def opened(browser: Any, file: Path) -> Iterator[Any]:
    """A function that opens the page; at its end no request, error or dialog may have been seen."""
    seen: list[str] = []
    pages = []

    def open_page(**settings: Any) -> Any:
        shown = browser.new_page(**{"viewport": WIDE, **settings})
        shown.on("request", lambda request: seen.append(request.url))
        shown.on("console", lambda message: seen.append(message.text))
        shown.on("pageerror", lambda error: seen.append(str(error)))
        shown.on("dialog", lambda dialog: seen.append(dialog.message))
        shown.goto(file.as_uri())
        pages.append(shown)
        return shown

    yield open_page
    for shown in pages:
        shown.close()
    assert seen == [file.as_uri()] * len(pages)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [WIDE, PHONE], ids=["wide", "phone"])
def test_axe_finds_nothing(opened: Any, scheme: str, viewport: dict[str, int]) -> None:
    shown = opened(color_scheme=scheme, viewport=viewport)
    shown.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    found = axe.Axe().run(shown)
    assert [(one["id"], one["nodes"][0]["html"][:200]) for one in found.response["violations"]] == []


def test_nothing_is_wider_than_a_phone(opened: Any) -> None:
    shown = opened(viewport=PHONE)
    assert shown.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


def test_the_dark_page_is_dark(opened: Any) -> None:
    shown = opened(color_scheme="dark")
    assert shown.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 28)"


def test_the_keyboard_zooms_all_plots_and_comes_back(opened: Any) -> None:
    shown = opened()
    widths = (
        "[...document.querySelectorAll('.canvas')].map(one => Math.round(one.offsetWidth / one.parentNode.clientWidth))"
    )
    shown.focus(".scroll")
    for _ in range(2):
        shown.keyboard.press("+")
    assert set(shown.evaluate(widths)) == {4}
    shown.keyboard.press("ArrowRight")
    shown.wait_for_timeout(300)
    places = shown.evaluate("[...document.querySelectorAll('.scroll')].map(one => one.scrollLeft > 0)")
    assert all(places)
    shown.keyboard.press("0")
    assert set(shown.evaluate(widths)) == {1}


def test_every_fold_opens_by_keyboard(opened: Any) -> None:
    shown = opened()
    shown.focus("details:not([open]) > summary")
    count = shown.evaluate("document.querySelectorAll('details[open]').length")
    shown.keyboard.press("Enter")
    assert shown.evaluate("document.querySelectorAll('details[open]').length") == count + 1


def test_page_is_complete_without_script_and_prints(opened: Any, tmp_path: Path) -> None:
    shown = opened(java_script_enabled=False)
    assert shown.locator(".canvas svg").count() > 3
    assert not shown.locator(".tools").first.is_visible()
    shown.pdf(path=str(tmp_path / "page.pdf"), format="A4")
    assert (tmp_path / "page.pdf").stat().st_size > 10_000


def test_hostile_lines_stay_plain_text(opened: Any) -> None:
    shown = opened()
    assert shown.locator("script").count() == 1
    assert shown.locator("img").count() == 0
