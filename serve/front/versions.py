"""Which version of a model answers: each takes its share of the clients, and a client stays with its version."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b

from penjing.serve.gate.config import FrontModel
from penjing.serve.gate.guard import Exchange


def by_name(models: Iterable[FrontModel]) -> dict[str, tuple[FrontModel, ...]]:
    """The versions behind each name that clients may ask for, in the order given; a version's own name has one. A model
    with an adapter has a name of its own."""
    found: dict[str, tuple[FrontModel, ...]] = {}
    models = [each for model in models for each in (model, *model.adapted())]
    for model in models:
        if model.group is not None:
            found[model.group] = (*found.get(model.group, ()), model)
    for model in models:
        found |= dict.fromkeys((model.id, *model.aliases), (model,))
    return found


def sharer(exchange: Exchange, user: str | None) -> str:
    """On whose behalf a request comes: a key's `user`, else the key; without a key the `user`, else the request's id.
    All requests of one go to the same version, so that a conversation does not change its model in the middle."""
    if user:
        return f"{exchange.key}\0{user}"
    return exchange.key or exchange.request_id


def chosen(name: str, versions: Sequence[FrontModel], sharer: str) -> FrontModel:
    """The version of `name` that answers `sharer`: a place in [0, 1) by its hash, where the versions' shares lie side
    by side, the last one's first. So a canary, given last, that gets a larger share keeps everybody it had."""
    if len(versions) == 1:
        return versions[0]
    digest = blake2b(f"{name}\0{sharer}".encode(errors="surrogatepass"), digest_size=8).digest()
    place, end = int.from_bytes(digest) / 2**64, 0.0
    for version in reversed(versions[1:]):
        end += version.share
        if place < end:
            return version
    return versions[0]
