"""Chromium for tests of the page."""

import shutil

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")


def answer_to(page, text):
    """The answer to a text that is typed and sent."""
    page.get_by_role("textbox", name="Text").fill(text)
    page.keyboard.press("Control+Enter")
    page.locator(".asked q", has_text=text[:40]).wait_for()
    return page.locator(".answer")
