"""One served model as the front knows it: the connection, whether it answers, and what is read of its folder."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from penjing.core.errors import PenjingError
from penjing.serve.client.client import AsyncClient
from penjing.serve.client.protocol import DECODER, TOWERS
from penjing.serve.front.fullness import Fullness
from penjing.serve.front.thoughts import END, Thinker
from penjing.serve.gate.config import FrontModel

CANARY_SECONDS = 2.0  # between two looks
CANARY_TIMEOUT = 5.0
FRESH_SECONDS = 10.0
"""For so long an answer proves that the model lives."""

if TYPE_CHECKING:
    from penjing.core.text.chat import ChatTemplate
    from penjing.core.text.text_tokenizer import TextTokenizer
    from penjing.core.text.tokenizer import Tokenizer

log = logging.getLogger("penjing.front")


class Upstream:
    """A model on its Triton server. Made inside the event loop that uses it."""

    def __init__(self, model: FrontModel) -> None:
        self.model = model
        self.client = AsyncClient(model.grpc, model=model.name, retries=0)
        self.is_down = False
        """Its last request found none: where there is another version, that one is asked."""
        self.context: int | None = None
        """The longest prompt and answer together, in tokens, once a decoder's server has said it."""
        self.fullness = Fullness()
        self._answered = 0.0
        self._failing = ""
        self._num_running = 0
        self._leaving = False
        self._left = asyncio.Event()
        self._tokenizer: Tokenizer | None = None
        self._chat_template: ChatTemplate | None = None
        self._has_read_template = False
        self._thinking: Thinker | None = None
        self._text_tokenizer: TextTokenizer | None = None
        self.dimension = 0
        """Numbers of a vector, known once there is `text_tokenizer`."""
        self.image_tokens = 0
        """What an image counts as, known with it: a token for each 16 × 16 pixels that the model looks at."""

    @property
    def is_ready(self) -> bool:
        """Whether it has answered within `FRESH_SECONDS`."""
        return bool(self._answered) and time.monotonic() - self._answered < FRESH_SECONDS

    @property
    def can_answer(self) -> bool:
        """Whether it is worth asking while there is another one."""
        return self.is_ready and not self.is_down

    def alive(self) -> None:
        """Note that it has just answered, or gone on with an answer."""
        self._answered = time.monotonic()
        self.is_down = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """A request runs: the connection outlives it, also that of a model that leaves."""
        self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1
            self._check_left()

    def leave(self) -> None:
        """No request will come any more; those that run go on."""
        self._leaving = True
        self._check_left()

    def _check_left(self) -> None:
        if self._leaving and not self._num_running:
            self._left.set()

    async def watch(self) -> None:
        """Ask it when nobody else has lately, until it has left; then the connection ends."""
        while not self._leaving:
            if time.monotonic() - self._answered > CANARY_SECONDS:
                await self._canary()
            try:
                async with asyncio.timeout(CANARY_SECONDS if self.is_ready else CANARY_SECONDS / 8):
                    await self._left.wait()
            except TimeoutError:
                continue
        await self._left.wait()
        await self.client.close()

    async def _canary(self) -> None:
        try:
            if self.model.kind == DECODER:
                sampling = {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True}
                await self.client.generate("a", timeout=CANARY_TIMEOUT, **sampling)
            elif not await self.client.is_ready(CANARY_TIMEOUT):
                return
        except Exception as error:  # also of what another server on that port answers: it ends no watch, of no model
            if self._leaving:
                return
            said = str(error) if isinstance(error, PenjingError) else f"{type(error).__name__}: {error}"
            if self._failing != said:  # the same words every quarter of a second say no more
                log.warning("%s does not answer: %s", self.model.id, said)
            self._failing, self.is_down, self.context = said, True, None  # it may come back with less memory
            return
        self._failing = ""
        self.alive()

    async def tokenizer(self) -> Tokenizer:
        """Of a language model; read when it is first asked for."""
        if self._tokenizer is None:
            from penjing.core.text.tokenizer import Tokenizer

            self._tokenizer = await asyncio.to_thread(Tokenizer.from_folder, self.model.folder)
        return self._tokenizer

    async def chat_template(self) -> ChatTemplate | None:
        """Of a language model, if it has one; read when it is first asked for."""
        if not self._has_read_template:
            from penjing.core.text.chat import ChatTemplate

            self._chat_template = await asyncio.to_thread(ChatTemplate.from_folder, self.model.folder)
            self._has_read_template = True
        return self._chat_template

    async def thinking(self) -> Thinker:
        """How a language model's answers begin; read when it is first asked for."""
        if self._thinking is None:
            try:
                found = Thinker(await self.chat_template())
                if found.thinks:
                    tokenizer = await self.tokenizer()
                    found.special = tokenizer.token_to_id(END) in tokenizer.special_ids
            except PenjingError as error:  # the model has its own copy, and answers
                log.warning("%s: thoughts are not told apart: %s", self.model.id, error)
                found = Thinker(None)
            self._thinking = found
        return self._thinking

    async def text_tokenizer(self) -> TextTokenizer:
        """Of a text encoder or two towers; read when it is first asked for."""
        if self._text_tokenizer is None:
            found = await asyncio.to_thread(_text_tokenizer, self.model)
            self._text_tokenizer, self.dimension, self.image_tokens = found
        return self._text_tokenizer


def _text_tokenizer(model: FrontModel) -> tuple[TextTokenizer, int, int]:
    """What makes tokens of texts, how many numbers a vector has, and as how many tokens an image counts."""
    from penjing.core.text.text_tokenizer import TextTokenizer, encoder_config

    if model.kind == TOWERS:
        from penjing.core.checkpoint.towers_config import towers_config

        towers = towers_config(model.folder)
        return TextTokenizer(model.folder, towers.text), towers.dimension, math.ceil(math.prod(towers.image_size) / 256)
    config = encoder_config(model.folder)
    return TextTokenizer(model.folder, config), config.hidden_size, 0
