"""A browser for the tests of the page."""

from urllib.parse import urlsplit

import pytest

from pages import CHROMIUM

ARGUMENTS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install playwright"
    )
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield chromium
        chromium.close()


@pytest.fixture
def tab(browser):
    """A page that notes what it asks for and what it complains of; at the end of a test it may have done neither wrong."""
    context = browser.new_context(viewport={"width": 1200, "height": 900}, reduced_motion="reduce")
    page = context.new_page()
    page.set_default_timeout(15_000)
    asked, complaints = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    yield page
    context.close()
    assert {urlsplit(url).hostname for url in asked} <= {"127.0.0.1", None}  # data: and blob: have no host
    # Chromium itself writes a line for each answer that is an error; the page has shown it.
    assert [text for text in complaints if not text.startswith("Failed to load resource")] == []
