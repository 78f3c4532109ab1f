"""The page at `/`, without a browser: it asks nobody else, and a browser runs nothing that is not its own."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from penjing.serve.access.keys import add_key
from penjing.serve.site.app import Front
from tests.serve.front.test_openapi import front_job


class Elements(HTMLParser):
    """Names, attributes and texts of a page's elements."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self._open = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._open = tag

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        self.texts[self._open] = self.texts.get(self._open, "") + data


def ask(front: Front, method: str = "GET") -> tuple[int, dict[str, str], str]:
    found: list[Any] = []

    async def send(message: Any) -> None:
        found.append(message)

    async def run() -> None:
        messages = [{"type": "http.request", "body": b"", "more_body": False}]
        left = asyncio.Event()

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await left.wait()

        scope = {"type": "http", "method": method, "path": "/", "headers": [(b"host", b"localhost")]}
        await front.application(scope | {"root_path": "", "query_string": b""}, receive, send)

    asyncio.run(run())
    headers = {name.decode().lower(): value.decode() for name, value in found[0]["headers"]}
    return found[0]["status"], headers, b"".join(message.get("body", b"") for message in found[1:]).decode()


@pytest.fixture
def front(tmp_path: Path) -> Front:
    add_key(tmp_path / "keys.toml", "a", {})
    return Front(front_job(tmp_path, keys=tmp_path / "keys.toml"))


def test_it_needs_no_key_and_says_who_may_do_what(front: Front) -> None:
    status, headers, page = ask(front)
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    policy = dict(rule.split(" ", 1) for rule in headers["content-security-policy"].split("; "))
    texts = Elements(page).texts
    for name in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(texts[name].encode()).digest()).decode()
        assert policy[f"{name}-src"] == f"'sha256-{digest}'"
    assert (policy["default-src"], policy["connect-src"]) == ("'none'", "'self'")
    assert {policy[rule] for rule in ("base-uri", "form-action", "frame-ancestors")} == {"'none'"}
    assert "unsafe" not in headers["content-security-policy"]
    assert (headers["x-content-type-options"], headers["referrer-policy"]) == ("nosniff", "no-referrer")
    assert ask(front, "POST")[0] == 405


def test_it_asks_nobody_else(front: Front) -> None:
    page = ask(front)[2]
    assert not re.search(r"//[a-z0-9]|@import|url\(|\bws:|\bwss:", page.replace("// ", "").replace("  //", ""))
    elements = Elements(page)
    assert [attributes["href"] for _, attributes in elements.found if "href" in attributes] == ["data:,"]
    for _, attributes in elements.found:
        assert not {"src", "srcset", "action", "formaction", "style"} & set(attributes)
        assert not [name for name in attributes if name.startswith("on")], "the policy would not let it run"
    asked = set(re.findall(r'fetch\("([^"]+)"', elements.texts["script"]))
    assert asked == {"v1/models", "health/ready", "v1/chat/completions", "metrics", "reports/"}
    paths = {route.path.partition("{")[0] for route in front.guard.app.routes}  # type: ignore[attr-defined]
    assert {f"/{path}" for path in asked} <= paths


def test_text_never_becomes_markup(front: Front) -> None:
    script = Elements(ask(front)[2]).texts["script"]
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(", "srcdoc"):
        assert way not in script
    assert "localStorage" not in script  # a key is kept in the tab's memory alone


def test_every_element_that_the_script_names_is_there_and_has_a_name(front: Front) -> None:
    elements = Elements(ask(front)[2])
    ids = {attributes["id"] for _, attributes in elements.found if "id" in attributes}
    assert set(re.findall(r'by\("([a-z]+)"\)', elements.texts["script"])) <= ids
    labelled = {attributes.get("for") for name, attributes in elements.found if name == "label"}
    assert "key" in labelled
    (text,) = [attributes for name, attributes in elements.found if attributes.get("id") == "text"]
    assert text["aria-label"]
