"""The page in a real Chromium, in front of the real command on tiny bundles."""

import re

import pytest
from PIL import Image

from models import image_bundle, text_bundle
from pages import answer_to, needs_chromium
from serving import KEY, holding, serving
from writers import chat_bundle

LABELS = {"spam", "ham", "sports", "science", "politics", "arts", "negative", "positive"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("page")


@pytest.fixture(scope="module")
def text_url(folder):
    """A service for texts that wants a key and takes small bodies only."""
    (folder / "key").write_text(KEY)
    (folder / "examples.txt").write_text("win a free prize now\nthe team scored a late goal\n")
    options = ["--api-key-file", folder / "key", "--examples", folder / "examples.txt", "--max-body", 20_000]
    with serving(text_bundle(folder), *options) as served:
        yield f"{served.url.rstrip('/')}/"


@pytest.fixture(scope="module")
def image_url(folder):
    (folder / "pictures").mkdir()
    for number in range(2):
        Image.new("RGB", (40, 30), (90 * number, 40, 200)).save(folder / "pictures" / f"{number}.png")
    with serving(image_bundle(folder), "--examples", folder / "pictures", "--max-body", 100_000) as served:
        yield f"{served.url.rstrip('/')}/"


def open_texts(page, url):
    page.goto(url)
    page.get_by_label("API key").fill(KEY)
    page.keyboard.press("Enter")
    page.get_by_role("textbox", name="Text").wait_for()


def open_images(page, url):
    """Listeners are there once the form is: a file that is chosen earlier would be heard by nobody."""
    page.goto(url)
    page.locator("#image-input").wait_for()


def shown_problem(page):
    return page.get_by_role("alert").inner_text()


def scrolls_sideways(page):
    return page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")


# Texts


@needs_chromium
def test_a_text_is_answered_with_its_reasons(tab, text_url):
    open_texts(tab, text_url)
    answer = answer_to(tab, "the team scored a late goal")
    label, said = answer.locator(".label").inner_text(), tab.get_by_role("status").inner_text()
    assert label in LABELS and f"Answer: {label}, task " in said
    task = answer.locator(".of-task strong").inner_text()
    routing = answer.get_by_role("table").nth(0)
    rows = [re.split(r"\s+", row) for row in routing.locator("tbody tr").all_inner_texts()]
    weights = [float(row[-2]) for row in rows]
    assert {row[0] for row in rows} == {"spam", "topic", "mood"}
    assert weights == sorted(weights, reverse=True) and abs(sum(weights) - 1) < 0.02
    assert task in answer.locator(".chip").all_inner_texts()
    assert answer.get_by_role("table").nth(1).locator("tbody tr.chosen th").inner_text() == label
    assert all(
        f"{name} " in answer.locator(".legend").inner_text().replace("\n", " ")
        for name in ("first pass", "second pass")
    )


@needs_chromium
def test_what_is_typed_is_shown_as_text_and_never_run(tab, text_url):
    open_texts(tab, text_url)
    answer_to(tab, "<img src=x onerror=alert(1)>")
    assert tab.locator("#answer img").count() == 0


@needs_chromium
def test_examples_and_past_answers_can_be_chosen(tab, text_url):
    open_texts(tab, text_url)
    tab.get_by_role("button", name="the team scored a late goal").click()
    tab.locator(".asked q", has_text="the team").wait_for()
    first = tab.locator(".label").inner_text()
    answer_to(tab, "win a free prize now")
    past = tab.locator("#history button")
    assert past.count() == 2
    past.nth(1).click()
    assert "the team" in tab.locator(".asked").inner_text() and tab.locator(".label").inner_text() == first
    assert tab.get_by_role("textbox", name="Text").input_value() == "the team scored a late goal"
    assert past.nth(1).get_attribute("aria-current") == "true"


@needs_chromium
def test_a_told_task_is_not_routed(tab, text_url):
    open_texts(tab, text_url)
    tab.get_by_role("combobox", name="Task").select_option("mood")
    answer = answer_to(tab, "win a free prize now")
    assert "routing was skipped" in answer.inner_text()
    assert answer.locator(".label").inner_text() in ("negative", "positive")


@needs_chromium
def test_an_abstention_is_told_as_one(tab, text_url):
    open_texts(tab, text_url)
    seen = {
        "residuals": {"spam": 1.5, "mood": 2.0},
        "weights": {"spam": 0.6, "mood": 0.4},
        "lift": 1.0,
        "agreement": 0.1,
    }
    why = {**seen, "site": "M0.mean", "heads": {}, "timings": {"first pass": 3.0}, "batch_size": 1}
    none = {
        "task": None,
        "label": None,
        "score": None,
        "alternatives": [],
        "selected": [],
        "error": None,
        "explain": why,
    }
    answer = {"request_id": "1", "model": "letters", "predictions": [none]}
    tab.route("**/v1/predict", lambda route: route.fulfill(json=answer))
    shown = answer_to(tab, "lorem ipsum").inner_text()
    assert "No task fits" in shown and "Nothing was selected" in shown and "score" not in shown
    assert tab.get_by_role("status").inner_text() == "No task fits this input."


@needs_chromium
def test_everything_can_be_done_by_keyboard(tab, text_url):
    tab.goto(text_url)
    tab.get_by_label("API key").wait_for()
    tab.keyboard.type(KEY)  # the field has the focus already
    tab.keyboard.press("Enter")
    tab.get_by_role("textbox", name="Text").wait_for()
    tab.reload()  # the key is still known, and the focus at the top
    tab.get_by_role("textbox", name="Text").wait_for()
    reached = []
    for _ in range(9):
        tab.keyboard.press("Tab")
        reached.append(tab.evaluate("document.activeElement.id || document.activeElement.textContent"))
        assert tab.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none", reached[-1]
    assert reached[:3] == ["Skip to content", "Ask", "Bundle"] and reached[3:6] == ["text", "task", "submit"]
    assert reached[6:8] == ["win a free prize now", "the team scored a late goal"]


@needs_chromium
def test_a_wrong_key_is_said_to_be_wrong(tab, text_url):
    tab.goto(text_url)
    assert "needs a key" in shown_problem(tab)
    tab.get_by_label("API key").fill("another-key-of-nobody")
    tab.get_by_role("button", name="Use it").click()
    tab.get_by_text("The key is wrong").wait_for()
    open_texts(tab, text_url)


@needs_chromium
def test_refusals_are_said_in_words_and_can_be_tried_again(tab, text_url):
    open_texts(tab, text_url)
    tab.get_by_role("textbox", name="Text").fill("long " * 5000)
    tab.get_by_role("button", name="Ask").click()
    tab.get_by_role("alert").wait_for()
    assert "more than the service accepts" in shown_problem(tab) and "20,000 bytes" in shown_problem(tab)
    full = {"error": {"code": "full", "message": "there is no room"}}
    tab.route("**/v1/predict", lambda route: route.fulfill(status=429, headers={"Retry-After": "1"}, json=full))
    tab.get_by_role("textbox", name="Text").fill("win a free prize now")
    tab.get_by_role("button", name="Ask").click()
    tab.get_by_role("button", name="Try again in 1 s").wait_for()
    assert "Wait 1 s" in shown_problem(tab)
    tab.unroute("**/v1/predict")
    tab.get_by_role("button", name="Try again", exact=True).click()
    tab.locator(".answer").wait_for()
    assert tab.locator("#answer").evaluate("element => element === document.activeElement")


@needs_chromium
def test_a_server_that_is_gone_is_told_to_a_person(tab, text_url):
    open_texts(tab, text_url)
    tab.context.set_offline(True)
    tab.get_by_role("textbox", name="Text").fill("win a free prize now")
    tab.keyboard.press("Control+Enter")
    tab.get_by_role("alert").wait_for()
    assert "cannot be reached" in shown_problem(tab)
    tab.context.set_offline(False)
    tab.get_by_role("button", name="Try again").click()
    tab.locator(".answer").wait_for()


@needs_chromium
def test_a_second_look_is_explained(tab, text_url):
    open_texts(tab, text_url)
    answer_to(tab, "the team scored a late goal")
    assert tab.locator(".look").count() == 0

    def again(route):
        body = route.fetch().json()
        body["predictions"][0]["explain"] |= {"site": "O0.cls M3.cls", "confidences": {"spam": 0.9, "mood": 0.4}}
        route.fulfill(json=body)

    tab.route("**/v1/predict", again)
    said = answer_to(tab, "win a free prize now").locator(".look").inner_text()
    assert "second look" in said and "spam 90" in said and said.index("spam") < said.index("mood")


# People who use other means than eyes and a mouse


@pytest.fixture(params=["light", "dark"])
def phone(browser, request):
    """A narrow page, and what checks the view that it shows."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed").Axe()
    with browser.new_context(viewport={"width": 390, "height": 800}, color_scheme=request.param) as context:
        page = context.new_page()
        yield page, lambda: faults(axe, page)


@needs_chromium
def test_axe_finds_no_fault_in_any_view_of_texts(phone, text_url):
    page, check = phone
    page.goto(text_url)
    page.get_by_label("API key").wait_for()
    found = check()
    open_texts(page, text_url)
    answer_to(page, "the team scored a late goal").locator("summary").first.click()
    found |= check()
    page.get_by_role("link", name="Bundle").click()
    page.locator(".tasks").wait_for()
    found |= check()
    page.get_by_role("link", name="API").click()
    page.get_by_role("heading", name="POST /v1/predict").wait_for()
    assert found | check() == set()


@needs_chromium
def test_axe_finds_no_fault_in_the_views_of_images(phone, image_url, tmp_path):
    page, check = phone
    Image.new("RGB", (64, 48), (10, 200, 30)).save(tmp_path / "green.png")
    open_images(page, image_url)
    found = check()
    page.locator("#file").set_input_files(tmp_path / "green.png")
    page.locator(".answer").wait_for()
    assert found | check() == set()


@needs_chromium
def test_axe_finds_no_fault_beside_a_text_that_was_written(phone, root, monkeypatch):
    page, check = phone
    with holding(monkeypatch, bundle=chat_bundle(root), max_new_tokens=3) as held:
        page.goto(f"{held.client.base_url}/")
        page.get_by_role("textbox", name="Text").fill("free prize")
        page.keyboard.press("Control+Enter")
        page.locator("summary", has_text="Request and answer").click()
        assert check() == set()


def faults(axe, page):
    """Rules of accessibility that the page breaks, with the places."""
    broken = axe.run(page).response["violations"]
    return {f"{rule['id']}: {node['html'][:120]}" for rule in broken for node in rule["nodes"]}


# Images


@needs_chromium
def test_an_uploaded_a_dropped_a_pasted_and_an_example_image_are_answered(tab, image_url, tmp_path):
    Image.new("RGB", (64, 48), (10, 200, 30)).save(tmp_path / "green.png")
    open_images(tab, image_url)
    tab.locator("#file").set_input_files(tmp_path / "green.png")
    tab.locator(".asked img[alt='green.png']").wait_for()
    assert tab.locator(".label").inner_text().startswith("LABEL_")
    assert tab.locator(".asked img").evaluate("image => image.naturalWidth") == 64
    tab.evaluate("""bytes => {
        const transfer = new DataTransfer();
        transfer.items.add(new File([new Uint8Array(bytes)], "dropped.png", {type: "image/png"}));
        document.body.dispatchEvent(new DragEvent("drop", {dataTransfer: transfer, bubbles: true, cancelable: true}));
    }""", list((tmp_path / "green.png").read_bytes()))  # fmt: skip
    tab.locator(".asked img[alt='dropped.png']").wait_for()
    paste = """(bytes) => {
        const transfer = new DataTransfer();
        if (bytes) transfer.items.add(new File([new Uint8Array(bytes)], "pasted.png", {type: "image/png"}));
        else transfer.setData("text/plain", "no image");
        document.body.dispatchEvent(new ClipboardEvent("paste", {clipboardData: transfer, bubbles: true}));
    }"""
    tab.evaluate(paste, None)
    assert "The clipboard holds no image." in shown_problem(tab)
    tab.evaluate(paste, list((tmp_path / "green.png").read_bytes()))
    tab.locator(".asked img[alt='pasted.png']").wait_for()
    tab.get_by_role("button", name="Example 2").click()
    tab.locator(".asked img[alt='example 2']").wait_for()
    assert tab.locator("#history button").count() == 4


@needs_chromium
def test_a_broken_and_a_huge_image_are_refused_in_words(tab, image_url, tmp_path):
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n but then nothing")
    (tmp_path / "huge.png").write_bytes(b"x" * 100_001)
    open_images(tab, image_url)
    tab.locator("#file").set_input_files(tmp_path / "broken.png")
    tab.get_by_role("alert").wait_for()
    assert "cannot be answered" in shown_problem(tab) and "image" in shown_problem(tab)
    tab.locator("#file").set_input_files(tmp_path / "huge.png")
    tab.get_by_text("too large").wait_for()
    assert "The file huge.png has 100.0 kB; the limit is 100.0 kB" in shown_problem(tab)


# The bundle, and narrow screens


@needs_chromium
def test_the_bundle_shows_tasks_similarity_and_live_traffic(tab, text_url):
    open_texts(tab, text_url)
    answer_to(tab, "win a free prize now")
    task = tab.locator(".of-task strong").inner_text()
    tab.get_by_role("link", name="Bundle").click()
    assert [text.split()[0] for text in tab.locator(".tasks tbody tr").all_inner_texts()] == ["spam", "topic", "mood"]
    heat = tab.get_by_role("region", name="Similarity of the tasks").get_by_role("table")
    cells = [
        [float(cell.replace("−", "-")) for cell in row.split()[1:]]
        for row in heat.locator("tbody tr").all_inner_texts()
    ]
    assert [cells[i][i] for i in range(3)] == [1, 1, 1] and cells[0][1] == cells[1][0] and len(cells[2]) == 3
    row = tab.locator(".traffic tbody tr", has=tab.get_by_role("rowheader", name=task, exact=True))
    row.wait_for()
    before = int(row.locator(".figure").inner_text())
    key = {"Authorization": f"Bearer {KEY}"}
    tab.request.post(text_url + "v1/predict", headers=key, data={"inputs": ["win a free prize now"] * 3})
    row.locator(".figure", has_text=re.compile(rf"^{before + 3}$")).wait_for()
    tab.get_by_role("button", name="Pause").click()
    assert tab.get_by_role("button", name="Pause").get_attribute("aria-pressed") == "true"


@needs_chromium
def test_a_phone_never_scrolls_sideways(tab, text_url, image_url, tmp_path):
    tab.set_viewport_size({"width": 360, "height": 740})
    Image.new("RGB", (3000, 40)).save(tmp_path / ("a_very_long_name_without_a_break" * 4 + ".png"))
    open_texts(tab, text_url)
    answer_to(tab, "word" * 100)
    tab.locator("summary", has_text="Request and answer").click()
    assert not scrolls_sideways(tab)
    tab.get_by_role("link", name="Bundle").click()
    tab.locator(".traffic .minutes").wait_for()
    assert not scrolls_sideways(tab)
    open_images(tab, image_url)
    tab.locator("#file").set_input_files(next(tmp_path.iterdir()))
    tab.locator(".answer").wait_for()
    assert not scrolls_sideways(tab)
    tab.get_by_role("link", name="API").click()
    tab.get_by_role("heading", name="POST /v1/predict").wait_for()
    assert not scrolls_sideways(tab)
