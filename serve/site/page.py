"""The page at `/`: a chat in a browser. One file, which asks nobody but this server and runs no script but its own."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

FILE = Path(__file__).with_name("page.html")


@cache
def page_response() -> tuple[bytes, dict[str, str]]:
    """The page, and the headers with which it is sent."""
    page = FILE.read_bytes()
    policy = (
        "default-src 'none'",
        f"script-src {_hash(page, b'script')}",
        f"style-src {_hash(page, b'style')}",
        "connect-src 'self'",
        "img-src data:",  # an empty icon, so that no browser asks for one
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
    headers = {
        "content-security-policy": "; ".join(policy),
        "x-content-type-options": "nosniff",
        "x-frame-options": "DENY",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return page, headers


def _hash(page: bytes, element: bytes) -> str:
    """The source of content that is this element of the page and no other."""
    (text,) = re.findall(b"<%b>(.*?)</%b>" % (element, element), page, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'"


async def show_page(request: Request) -> Response:
    """Answer one request."""
    page, headers = page_response()
    return Response(page, headers=headers, media_type="text/html")
