"""Who may ask: the key that a request shows, and whether it may begin now."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from penjing.core.errors import InputError
from penjing.serve.access.keys import KeyRing
from penjing.serve.access.limits import Account, Accounts
from penjing.serve.gate.errors import START_SECONDS, ApiError

METRICS = "/metrics"

log = logging.getLogger("penjing.front")


class Admission:
    """Asks for keys, where a file of them is given.

    Raises:
        InputError: the file cannot be used.
    """

    def __init__(self, keys: Path | None) -> None:
        self._ring = None if keys is None else KeyRing(keys)
        self._accounts = Accounts()
        self._told = ""

    def account(self, headers: Mapping[str, str], path: str) -> Account | None:
        """Of the key that a request shows, as OpenAI's or Anthropic's clients do; None where no keys are asked for.

        Raises:
            ApiError: no key, an unknown or revoked one, or one that may not do this.
        """
        if self._ring is None:
            return None
        scheme, _, secret = headers.get("authorization", "").partition(" ")
        secret = secret.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        try:
            key = self._ring.find(secret) if secret else None
            self._told = ""
        except InputError as error:
            if self._told != str(error):
                log.error("%s", error)
            self._told = str(error)
            text = "Keys cannot be checked now; the server's log says why."
            raise ApiError(503, text, code="keys_unreadable", retry_after=START_SECONDS) from None
        if key is None:
            text = "This server asks for a key: send the header Authorization: Bearer KEY."
            if secret:
                text = "The key is not known, or no longer; ask whoever runs the server for one."
            raise ApiError(401, text, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        if path == METRICS and not key.metrics:
            raise ApiError(403, "This key may not read /metrics.", code="not_allowed")
        return self._accounts.of(key)

    @staticmethod
    def begin(account: Account) -> None:
        """Count a request that begins; `account.end` is to follow.

        Raises:
            ApiError: a limit of the key is reached.
        """
        refusal = account.begin()
        if refusal is not None:
            text = (
                f"The key's limit of {refusal.limit} {refusal.what} is reached; try again in {refusal.retry_after} s."
            )
            raise ApiError(
                429, text, code="rate_limit_exceeded", retry_after=refusal.retry_after, headers=account.headers()
            )
