"""The page at `/` in Debian's Chromium, driven by playwright, before a real server; `make test-page` runs it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serve.front.asking import Fronted

BROWSER = shutil.which("chromium")
api: Any = pytest.importorskip("playwright.sync_api", reason="needs 'penjing[browser]'")
axe: Any = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs 'penjing[browser]'")
pytestmark = [
    pytest.mark.server,
    pytest.mark.xdist_group("front"),
    pytest.mark.skipif(BROWSER is None, reason="needs a chromium"),
]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ab"]}},
    "required": ["name"],
    "additionalProperties": False,
}
LONG = {
    "type": "object",
    "properties": {"names": {"type": "array", "items": {"enum": ["ab"]}, "minItems": 700}},
    "required": ["names"],
    "additionalProperties": False,
}
"""An answer of thousands of tokens: a free one of this small model may draw its end at any token."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with api.sync_playwright() as driver:
        chromium = driver.chromium.launch(
            executable_path=BROWSER, args=["--no-sandbox"]
        )  # tests run as root in containers
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser: Any, front: Fronted, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The page, ready. What the browser complains of fails the test, but for the answers that it asks for."""
    told: list[str] = []
    opened = browser.new_page(color_scheme=getattr(request, "param", "light"))
    opened.on("console", lambda message: told.append(message.text) if message.type == "error" else None)
    opened.on("pageerror", lambda error: told.append(str(error)))
    opened.goto(f"http://localhost:{front.port}/")
    opened.locator("#state", has_text=re.compile("^ready$")).wait_for()
    yield opened
    opened.close()
    assert [text for text in told if "status of 4" not in text] == []


def say(page: Any, text: str, tokens: int = 8, schema: object = None) -> None:
    page.locator("summary").click()
    page.locator("#tokens").fill(str(tokens))
    if schema is not None:
        page.locator("#schema").fill(json.dumps(schema))
    page.locator("#text").fill(text)
    page.locator("#text").press("Enter")


def test_a_chat_streams_and_says_how_fast(page: Any) -> None:
    say(page, "Hello")
    note = page.locator(".assistant small", has_text="tokens")
    note.wait_for()
    assert re.search(r"first token after \d+\.\d\d s · 8 tokens", note.inner_text())
    assert page.locator(".user p").inner_text() == "Hello"
    assert page.locator(".assistant p").inner_text()
    page.get_by_role("button", name="New chat").click()
    assert page.locator(".turn").count() == 0
    assert page.evaluate("document.activeElement.id") == "text"


def test_escape_stops_an_answer(page: Any) -> None:
    say(page, "Hello", tokens=3000, schema=LONG)
    page.locator(".assistant p", has_text=re.compile(".")).wait_for()
    page.keyboard.press("Escape")
    page.locator(".assistant small", has_text="stopped").wait_for()
    assert page.locator("#send").is_enabled()
    assert page.locator("#stop").is_disabled()


def test_what_is_written_is_never_markup(page: Any) -> None:
    say(page, "<img src=x onerror=alert(1)><b>bold</b>")
    page.locator(".assistant small", has_text="tokens").wait_for()
    assert page.locator(".user p").inner_text() == "<img src=x onerror=alert(1)><b>bold</b>"
    assert page.locator("#log img, #log p b").count() == 0


def test_thoughts_stand_above_what_is_said_and_close_when_it_begins(page: Any) -> None:
    deltas = [{"role": "assistant", "content": ""}, {"reasoning_content": "I <b>see</b>."}, {"content": "Hi."}]
    events = [json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}) for delta in deltas]
    body = "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"])
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    say(page, "Hello")
    page.locator(".assistant > p", has_text="Hi.").wait_for()
    box = page.locator(".assistant details")
    assert box.evaluate("box => box.open") is False
    box.locator("summary").click()
    assert box.locator("p").inner_text() == "I <b>see</b>."
    assert page.locator(".assistant > p").inner_text() == "Hi."


def test_an_answer_keeps_to_a_schema(page: Any) -> None:
    say(page, "Who?", tokens=200, schema=SCHEMA)
    page.locator(".assistant small", has_text="tokens").wait_for()
    assert json.loads(page.locator(".assistant p").inner_text()) == {"name": "ab"}


@pytest.mark.parametrize(
    ("field", "text", "told"),
    [
        ("schema", "{", "The JSON schema cannot be read"),
        ("schema", '{"type": "nothing"}', "nothing"),
        ("temperature", "9", "Temperature: "),
        ("nucleus", "", "Top p: "),
    ],
)
def test_a_wrong_setting_is_told_and_nothing_is_lost(page: Any, field: str, text: str, told: str) -> None:
    page.locator("summary").click()
    page.locator(f"#{field}").fill(text)
    page.locator("summary").click()
    say(page, "Hello")
    page.locator(".error p", has_text=told).wait_for()
    assert page.locator("#text").input_value() == "Hello"
    assert page.locator("#send").is_enabled()


def test_the_load_of_the_server_is_shown(page: Any) -> None:
    page.locator("#load", has_text=re.compile(r"^\d+ running · \d+ waiting · \d+ % of the memory")).wait_for()


def test_a_model_without_a_report_says_so(page: Any) -> None:
    page.get_by_role("button", name="Report").click()
    page.locator("#about", has_text="There is no report of").wait_for()
    page.keyboard.press("Escape")
    assert not page.locator("#sheet").is_visible()


@pytest.mark.parametrize("page", ["light", "dark"], indirect=True)
def test_axe_finds_nothing_to_complain_of(page: Any) -> None:
    say(page, "Hello")
    page.locator(".assistant small", has_text="tokens").wait_for()
    found = axe.Axe().run(page)
    assert found.violations_count == 0, found.generate_report()
    page.get_by_role("button", name="Report").click()
    page.locator("#sheet").wait_for()
    found = axe.Axe().run(page)
    assert found.violations_count == 0, found.generate_report()


def test_the_keyboard_reaches_everything_in_reading_order(page: Any) -> None:
    page.locator("#settings").evaluate("element => element.open = true")
    reached = []
    for _ in range(13):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.tagName.toLowerCase()"))
    settings = ["temperature", "nucleus", "tokens", "system", "schema"]
    assert reached[:11] == ["model", "clear", "report", "log", "summary", *settings, "text"]
    assert "send" in reached


def test_a_key_is_asked_for_and_stays_in_the_tab(browser: Any, front: Fronted) -> None:
    opened = browser.new_page()
    paths = ("v1/models", "metrics", "v1/chat/completions")
    for path in paths:  # a front with keys, as the page sees it

        def answer(route: Any) -> None:
            if route.request.headers.get("authorization") == "Bearer secret":
                route.continue_()
            else:
                error = {"error": {"message": "A key is needed.", "type": "", "param": None, "code": None}}
                route.fulfill(status=401, json=error)

        opened.route(f"**/{path}", answer)
    opened.goto(f"http://localhost:{front.port}/")
    opened.locator("#state", has_text="A key is needed.").wait_for()
    opened.locator("#key").fill("secret")
    opened.locator("#key").press("Enter")
    opened.locator("#state", has_text=re.compile("^ready$")).wait_for()
    assert not opened.locator("#enter").is_visible()
    assert opened.evaluate("localStorage.length + sessionStorage.length + document.cookie.length") == 0
    opened.close()
