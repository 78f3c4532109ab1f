"""`/metrics`: what the Triton servers behind the front show to Prometheus, as one page."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping

from penjing.serve.client.protocol import DECODER
from penjing.serve.front.backend import Backend
from penjing.serve.front.upstream import Upstream
from penjing.serve.gate.errors import ApiError, starting

FIGURES_SECONDS = 5.0
READY, UP = "penjing:model_ready", "penjing:model_up"
_CONTEXT = re.compile(rb"^penjing:max_model_len(?:\{.*\})? (\S+)$", re.MULTILINE)
_SAMPLE = re.compile(r"(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>[^{}]+)")
_SUFFIX = re.compile(r"_(?:bucket|sum|count)$")


async def figures(backend: Backend) -> bytes:
    """What the server of each model gives, as one page. `penjing:model_up` says of each model whether its server gave
    any, as Prometheus' own `up` does of a page, and `penjing:model_ready` whether it answers."""
    models = backend.models
    pages = await asyncio.gather(*(read_figures(model.metrics) for model in models), return_exceptions=True)
    joined = Joined()
    for model, page in zip(models, pages, strict=True):
        labels = {"model": model.group or (model.name if len(models) == 1 else model.id)}
        if model.version is not None:
            labels["version"] = str(model.version)
        joined.add(
            _gauge(UP, "Whether the model's server gave its figures to this page.", isinstance(page, bytes)), labels
        )
        joined.add(_gauge(READY, "Whether the model has answered lately.", backend.upstream(model).is_ready), labels)
        if isinstance(page, bytes):
            joined.add(page.decode(), labels if len(models) > 1 else {})
        elif not isinstance(page, ApiError):
            raise page
    return joined.page


def _gauge(name: str, text: str, value: bool) -> str:
    return f"# HELP {name} {text}\n# TYPE {name} gauge\n{name} {int(value)}"


async def context(backend: Backend, name: str) -> int | None:
    """How long a prompt and its answer may be, in tokens, for a client who asks for `name`: of several versions the
    least. None for what is no decoder, or does not say it now."""
    models = [model for model in backend.versions(name) if model.kind == DECODER]
    found = await asyncio.gather(*(_context(backend.upstream(model)) for model in models))
    return min((each for each in found if each is not None), default=None)


async def _context(upstream: Upstream) -> int | None:
    if upstream.context is None and upstream.is_ready:
        try:
            page = await read_figures(upstream.model.metrics)
        except ApiError:
            return None
        found = _CONTEXT.search(page)
        upstream.context = None if found is None else int(float(found[1]))
    return upstream.context


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
                braced = f"{{{shown}}}" if shown else ""
                self._samples.setdefault(family, []).append(f"{name}{braced} {found['value']}")

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
