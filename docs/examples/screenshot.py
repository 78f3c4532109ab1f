"""Makes docs/figures/page.png of `penjing serve build/smollm2-int8 --openai 8080`.

Needs 'penjing[browser]' and Debian's chromium.

    python docs/examples/screenshot.py [http://localhost:8080/] [docs/figures/page.png]
"""

from __future__ import annotations

import re
import shutil
import sys
from importlib import import_module
from typing import Any

QUESTION = "Why do penjing trees stay small? Answer in three sentences."


def main(address: str = "http://localhost:8080/", path: str = "docs/figures/page.png") -> None:
    """Ask one question, greedily, and keep the picture of the page once the answer is there."""
    try:
        playwright: Any = import_module("playwright.sync_api")
    except ModuleNotFoundError:
        raise SystemExit("error: playwright is missing; pip install 'penjing[browser]'") from None
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 860, "height": 660})
        page.goto(address)
        page.locator("#state", has_text=re.compile("^ready$")).wait_for()
        page.locator("summary").click()
        page.locator("#temperature").fill("0")
        page.locator("#tokens").fill("120")
        page.locator("#text").fill(QUESTION)
        page.locator("#text").press("Enter")
        page.locator(".assistant small", has_text="tokens a second").wait_for()
        page.screenshot(path=path)
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
