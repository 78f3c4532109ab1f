"""`/metrics`: what the Triton servers behind the front show to Prometheus, as one page."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping

from penjing.serve.front.backend import Backend
from penjing.serve.gate.errors import ApiError, starting

FIGURES_SECONDS = 5.0
READY = "penjing:model_ready"
_SAMPLE = re.compile(r"(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>[^{}]+)")
_SUFFIX = re.compile(r"_(?:bucket|sum|count)$")


async def figures(backend: Backend) -> bytes:
    """Of a single model as its server gives them. Of several they are joined, and `penjing:model_ready` says which
    models answer; a server that gives no figures is left out.

    Raises:
        ApiError: no server gives any.
    """
    models = backend.models
    if len(models) == 1:
        return await read_figures(models[0].metrics)
    pages = await asyncio.gather(*(read_figures(model.metrics) for model in models), return_exceptions=True)
    joined = Joined()
    answered = 0
    for model, page in zip(models, pages, strict=True):
        labels = {"model": model.group or model.id}
        if model.version is not None:
            labels["version"] = str(model.version)
        ready = f"# HELP {READY} Whether the model has answered lately.\n# TYPE {READY} gauge\n{READY} "
        joined.add(ready + str(int(backend.upstream(model).is_ready)), labels)
        if isinstance(page, bytes):
            joined.add(page.decode(), labels)
            answered += 1
        elif not isinstance(page, ApiError):
            raise page
    if not answered:
        raise starting()
    return joined.page


class Joined:
    """Pages of figures in Prometheus' text format as one: each family has its head once and all of its samples behind
    it, as the format asks."""

    def __init__(self) -> None:
        self._heads: dict[str, list[str]] = {}
        self._samples: dict[str, list[str]] = {}

    def add(self, page: str, labels: Mapping[str, str]) -> None:
        """Add a page; a sample that lacks one of `labels` gets it."""
        known: set[str] = set(self._heads)
        for line in page.splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                family = line.split(" ", 3)[2]
                if family not in known:
                    self._heads.setdefault(family, []).append(line)
            elif (found := _SAMPLE.fullmatch(line)) is not None:
                name, own = found["name"], found["labels"] or ""
                missing = [f'{key}="{value}"' for key, value in labels.items() if not _has(own, key)]
                shown = ",".join([*([own] if own else []), *missing])
                family = name if name in self._heads else _SUFFIX.sub("", name)
                self._samples.setdefault(family, []).append(f"{name}{{{shown}}} {found['value']}")

    @property
    def page(self) -> bytes:
        """All of it."""
        return "".join(f"{line}\n" for line in self._lines()).encode()

    def _lines(self) -> Iterable[str]:
        for family in dict.fromkeys([*self._heads, *self._samples]):
            yield from self._heads.get(family, ())
            yield from self._samples.get(family, ())


def _has(labels: str, name: str) -> bool:
    return re.search(rf'(?:^|,){name}="', labels) is not None


async def read_figures(address: str) -> bytes:
    """What Triton server shows to Prometheus at `address`, host:port; that port is on loopback alone.

    Raises:
        ApiError: it does not answer.
    """
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(FIGURES_SECONDS):
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            try:
                writer.write(f"GET /metrics HTTP/1.0\r\nHost: {address}\r\nConnection: close\r\n\r\n".encode())
                answer = await reader.read()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        raise starting() from None
    head, _, body = answer.partition(b"\r\n\r\n")
    if b" 200 " not in head.partition(b"\r\n")[0]:
        raise starting()
    return body
