"""What stands behind the front: our own gRPC client, and a watch that knows whether the model really answers."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from penjing.core.errors import PenjingError
from penjing.serve.client.client import AsyncClient
from penjing.serve.client.protocol import DECODER, ENCODER
from penjing.serve.gate.config import FrontJob, FrontModel
from penjing.serve.gate.errors import ApiError, starting, translated

CANARY_SECONDS = 2.0  # between two looks
CANARY_TIMEOUT = 5.0
FIGURES_SECONDS = 5.0
FRESH_SECONDS = 10.0
"""For so long an answer proves that the model lives."""

if TYPE_CHECKING:
    from penjing.core.text.text_tokenizer import TextTokenizer
    from penjing.core.text.tokenizer import Tokenizer

_LACKS = {DECODER: "writes no text", ENCODER: "makes no embeddings"}
_PATHS = {DECODER: "at /v1/chat/completions and /v1/completions", ENCODER: "at /v1/embeddings"}

log = logging.getLogger("penjing.front")


class Backend:
    """The models behind one Triton server. Made inside the event loop that uses it."""

    def __init__(self, job: FrontJob) -> None:
        self.models = {name: model for model in job.models for name in (model.id, model.name)}
        self.listed = job.models
        self.clients = {model.name: AsyncClient(job.grpc, model=model.name, retries=0) for model in job.models}
        self.started = int(time.time())
        self.timeout, self.max_prompts = job.front.limits.answer_timeout, job.front.limits.max_prompts
        self._tokenizers: dict[str, Tokenizer] = {}
        self._text_tokenizers: dict[str, TextTokenizer] = {}
        self._answered = {model.name: 0.0 for model in job.models}
        self._failing: dict[str, str] = {}
        self._hidden = {str(model.folder): model.id for model in job.models} | {f"{job.grpc}: ": "", job.grpc: "server"}

    def model(self, name: str) -> FrontModel:
        """The model that a client calls `name`.

        Raises:
            ApiError: there is none.
        """
        found = self.models.get(name)
        if found is None:
            known = ", ".join(model.id for model in self.listed)
            raise ApiError(
                404, f"There is no model {name[:80]!r}; there is {known}.", code="model_not_found", param="model"
            )
        return found

    def decoder(self, name: str) -> FrontModel:
        """The language model that a client calls `name`.

        Raises:
            ApiError: there is none, or the model is of another kind; says where that one is asked.
        """
        return self._of_kind(name, DECODER)

    def encoder(self, name: str) -> FrontModel:
        """The text encoder that a client calls `name`; see `decoder`."""
        return self._of_kind(name, ENCODER)

    def _of_kind(self, name: str, kind: str) -> FrontModel:
        found = self.model(name)
        if found.name != kind:
            where = _PATHS.get(found.name, "by gRPC alone")
            raise ApiError(400, f"{found.id} {_LACKS[kind]}; ask it {where}.", code="wrong_model", param="model")
        return found

    async def tokenizer(self, model: FrontModel) -> Tokenizer:
        """Of a language model; read when it is first asked for."""
        if model.name not in self._tokenizers:
            from penjing.core.text.tokenizer import Tokenizer

            self._tokenizers[model.name] = await asyncio.to_thread(Tokenizer.from_folder, model.folder)
        return self._tokenizers[model.name]

    async def text_tokenizer(self, model: FrontModel) -> TextTokenizer:
        """Of a text encoder; read when it is first asked for."""
        if model.name not in self._text_tokenizers:
            from penjing.core.text.text_tokenizer import TextTokenizer, encoder_config

            def read() -> TextTokenizer:
                return TextTokenizer(model.folder, encoder_config(model.folder))

            self._text_tokenizers[model.name] = await asyncio.to_thread(read)
        return self._text_tokenizers[model.name]

    def alive(self, model: FrontModel) -> None:
        """Note that the model has just answered."""
        self._answered[model.name] = time.monotonic()

    @property
    def ready(self) -> bool:
        """Whether every model has answered within `FRESH_SECONDS`."""
        return all(time.monotonic() - at < FRESH_SECONDS and at for at in self._answered.values())

    def error(self, error: PenjingError) -> ApiError:
        """What a client is told of a failure of ours."""
        found = translated(error, self._hidden)
        if found.status == 500:
            log.error("%s: %s", type(error).__name__, error)
        return found

    async def watch(self) -> None:
        """Ask each model that nobody else has asked lately, for ever."""
        while True:
            for model in self.listed:
                if time.monotonic() - self._answered[model.name] > CANARY_SECONDS:
                    await self._canary(model)
            await asyncio.sleep(CANARY_SECONDS if self.ready else CANARY_SECONDS / 8)

    async def _canary(self, model: FrontModel) -> None:
        client = self.clients[model.name]
        try:
            if model.name == DECODER:
                sampling = {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True}
                await client.generate("a", timeout=CANARY_TIMEOUT, **sampling)
            elif not await client.is_ready(CANARY_TIMEOUT):
                return
        except PenjingError as error:
            if self._failing.get(model.name) != str(error):  # the same words every quarter of a second say no more
                log.warning("%s does not answer: %s", model.name, error)
            self._failing[model.name] = str(error)
            return
        self._failing.pop(model.name, None)
        self.alive(model)

    async def close(self) -> None:
        """End the connections; running answers are cancelled."""
        for client in self.clients.values():
            await client.close()


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
