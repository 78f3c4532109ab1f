"""What stands behind the front: our own gRPC clients, and a watch that knows whether each model really answers."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from penjing.core.errors import PenjingError
from penjing.serve.client.client import AsyncClient
from penjing.serve.client.protocol import DECODER, ENCODER
from penjing.serve.front.versions import by_name, chosen, sharer
from penjing.serve.gate.config import FrontJob, FrontModel
from penjing.serve.gate.errors import ApiError, translated
from penjing.serve.gate.guard import Exchange
from penjing.serve.gate.usage import Usage

CANARY_SECONDS = 2.0  # between two looks
CANARY_TIMEOUT = 5.0
FRESH_SECONDS = 10.0
"""For so long an answer proves that the model lives."""

if TYPE_CHECKING:
    from penjing.core.text.chat import ChatTemplate
    from penjing.core.text.text_tokenizer import TextTokenizer
    from penjing.core.text.tokenizer import Tokenizer

_LACKS = {DECODER: "writes no text", ENCODER: "makes no embeddings"}
_PATHS = {DECODER: "at /v1/chat/completions and /v1/completions", ENCODER: "at /v1/embeddings"}

log = logging.getLogger("penjing.front")


class Backend:
    """The models, each on a Triton server; what they answer is timed in `usage`. Made inside the event loop that uses
    it."""

    def __init__(self, job: FrontJob, usage: Usage | None = None) -> None:
        self.usage = usage or Usage()
        self.models = job.models
        self._versions = by_name(job.models)
        self.clients = {model.id: AsyncClient(model.grpc, model=model.name, retries=0) for model in job.models}
        self.started = int(time.time())
        self.timeout, self.max_prompts = job.front.limits.answer_timeout, job.front.limits.max_prompts
        self._tokenizers: dict[str, Tokenizer] = {}
        self._chat_templates: dict[str, ChatTemplate | None] = {}
        self._text_tokenizers: dict[str, TextTokenizer] = {}
        self._answered = {model.id: 0.0 for model in job.models}
        self._failing: dict[str, str] = {}
        self._down: set[str] = set()
        """Models whose last request found none: where there is another version, that one is asked."""
        self._hidden = {str(model.folder): model.id for model in job.models}
        for model in job.models:
            self._hidden |= {f"{model.grpc}: ": "", model.grpc: "server"}

    @property
    def listed(self) -> list[str]:
        """What clients may ask for, without further names."""
        models = [each for model in self.models for each in (model, *model.adapted())]
        names = [name for model in models for name in (model.group, model.id) if name is not None]
        return list(dict.fromkeys(names))

    def model(self, name: str, exchange: Exchange, user: str | None = None) -> FrontModel:
        """The model that a client calls `name`. Of several versions, the one that this client's requests go to (see
        `sharer`); another one while that does not answer.

        Args:
            user: of the request's body.

        Raises:
            ApiError: there is none.
        """
        versions = self._versions.get(name)
        if versions is None:
            known = ", ".join(self.listed)
            raise ApiError(
                404, f"There is no model {name[:80]!r}; there is {known}.", code="model_not_found", param="model"
            )
        found = chosen(name, versions, sharer(exchange, user))
        return next((version for version in (found, *versions) if self._can_answer(version)), found)

    def _can_answer(self, model: FrontModel) -> bool:
        return self.is_ready(model) and model.key not in self._down

    def decoder(self, name: str | None, exchange: Exchange, user: str | None = None) -> FrontModel:
        """The language model that a client calls `name`; None is the first one. See `model`.

        Raises:
            ApiError: there is none, or the model is of another kind; says where that one is asked.
        """
        if name is None:
            first = next((model for model in self.models if model.kind == DECODER), self.models[0])
            name = first.group or first.id
        return self._of_kind(name, DECODER, exchange, user)

    def encoder(self, name: str, exchange: Exchange, user: str | None = None) -> FrontModel:
        """The text encoder that a client calls `name`; see `decoder`."""
        return self._of_kind(name, ENCODER, exchange, user)

    def _of_kind(self, name: str, kind: str, exchange: Exchange, user: str | None) -> FrontModel:
        found = self.model(name, exchange, user)
        if found.kind != kind:
            where = _PATHS.get(found.kind, "by gRPC alone")
            raise ApiError(400, f"{found.id} {_LACKS[kind]}; ask it {where}.", code="wrong_model", param="model")
        return found

    async def tokenizer(self, model: FrontModel) -> Tokenizer:
        """Of a language model; read when it is first asked for."""
        if model.key not in self._tokenizers:
            from penjing.core.text.tokenizer import Tokenizer

            self._tokenizers[model.key] = await asyncio.to_thread(Tokenizer.from_folder, model.folder)
        return self._tokenizers[model.key]

    async def chat_template(self, model: FrontModel) -> ChatTemplate | None:
        """Of a language model, if it has one; read when it is first asked for."""
        if model.key not in self._chat_templates:
            from penjing.core.text.chat import ChatTemplate

            self._chat_templates[model.key] = await asyncio.to_thread(ChatTemplate.from_folder, model.folder)
        return self._chat_templates[model.key]

    async def text_tokenizer(self, model: FrontModel) -> TextTokenizer:
        """Of a text encoder; read when it is first asked for."""
        if model.key not in self._text_tokenizers:
            from penjing.core.text.text_tokenizer import TextTokenizer, encoder_config

            def read() -> TextTokenizer:
                return TextTokenizer(model.folder, encoder_config(model.folder))

            self._text_tokenizers[model.key] = await asyncio.to_thread(read)
        return self._text_tokenizers[model.key]

    def alive(self, model: FrontModel) -> None:
        """Note that the model has just answered."""
        self._answered[model.key] = time.monotonic()
        self._down.discard(model.key)

    def is_ready(self, model: FrontModel) -> bool:
        """Whether the model has answered within `FRESH_SECONDS`."""
        answered = self._answered[model.key]
        return bool(answered) and time.monotonic() - answered < FRESH_SECONDS

    @property
    def ready(self) -> bool:
        """Whether every model is."""
        return all(map(self.is_ready, self.models))

    def error(self, error: PenjingError, model: FrontModel) -> ApiError:
        """What a client is told of a failure of the model's."""
        found = translated(error, self._hidden)
        if found.status == 503:
            self._down.add(model.key)
        if found.status == 500:
            log.error("%s: %s", type(error).__name__, error)
        return found

    async def watch(self) -> None:
        """Ask each model that nobody else has asked lately, for ever; one that does not answer holds no other up."""
        async with asyncio.TaskGroup() as group:
            for model in self.models:
                group.create_task(self._watch(model))

    async def _watch(self, model: FrontModel) -> None:
        while True:
            if time.monotonic() - self._answered[model.id] > CANARY_SECONDS:
                await self._canary(model)
            await asyncio.sleep(CANARY_SECONDS if self.is_ready(model) else CANARY_SECONDS / 8)

    async def _canary(self, model: FrontModel) -> None:
        client = self.clients[model.id]
        try:
            if model.kind == DECODER:
                sampling = {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True}
                await client.generate("a", timeout=CANARY_TIMEOUT, **sampling)
            elif not await client.is_ready(CANARY_TIMEOUT):
                return
        except PenjingError as error:
            if self._failing.get(model.id) != str(error):  # the same words every quarter of a second say no more
                log.warning("%s does not answer: %s", model.id, error)
            self._failing[model.id] = str(error)
            self._down.add(model.id)
            return
        self._failing.pop(model.id, None)
        self.alive(model)

    async def close(self) -> None:
        """End the connections; running answers are cancelled."""
        for client in self.clients.values():
            await client.close()
