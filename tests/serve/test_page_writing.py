"""The page in a real Chromium, in front of services that write texts or only route."""

import re
import threading

from massmerge.model.decode import StepDecoder
from models import text_bundle
from pages import answer_to, needs_chromium
from serving import holding, wait_for
from writers import chat_bundle


@needs_chromium
def test_a_text_is_shown_while_it_is_written_and_can_be_stopped(tab, root, monkeypatch):
    steps, step = threading.Semaphore(0), StepDecoder.step
    with holding(monkeypatch, bundle=chat_bundle(root), max_new_tokens=12) as held:
        monkeypatch.setattr(StepDecoder, "step", lambda self: steps.acquire(timeout=30) and step(self))
        tab.goto(f"{held.client.base_url}/")
        tab.get_by_role("textbox", name="Text").fill("free prize")
        tab.keyboard.press("Control+Enter")
        steps.release(3)
        written = tab.locator(".written")
        tab.locator(".written", has_text=re.compile(r"..", re.DOTALL)).wait_for()
        task = tab.locator(".of-task strong").inner_text()
        assert task in "abc" and "%" in tab.locator(".sure").inner_text()
        so_far = written.inner_text()
        tab.get_by_role("button", name="Stop").click()
        tab.locator(".used", has_text="stopped").wait_for()
        steps.release(1000)
        wait_for(lambda: not held.service.writer._running)
        tab.get_by_role("textbox", name="Text").fill("the team")
        tab.keyboard.press("Control+Enter")
        tab.locator(".used", has_text="written").wait_for()
        tab.locator("#history button").nth(1).click()
        assert written.inner_text().startswith(so_far) and "free prize" in tab.locator(".asked").inner_text()
        tab.get_by_role("link", name="Bundle").click()
        assert "text" in tab.get_by_role("region", name="Tasks").get_by_role("row").nth(1).inner_text()
        tab.locator("dd", has_text="16: A0.mean, A0.last, O0.mean, O0.last, …, D1.last").wait_for()


@needs_chromium
def test_a_service_that_only_routes_shows_tasks(tab, root, monkeypatch):
    with holding(monkeypatch, bundle=text_bundle(root), route_only=True) as held:
        tab.goto(f"{held.client.base_url}/")
        answer = answer_to(tab, "win a free prize now")
        assert answer.locator(".label").inner_text() in ("spam", "topic", "mood")
        assert answer.locator("tbody tr").count() == 3 and not tab.locator("#task").is_visible()
