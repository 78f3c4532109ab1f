"""What a request must fulfil before it is queued: its prompt becomes tokens, its parameters fit the model."""

from __future__ import annotations

from dataclasses import dataclass, replace

from penjing.core.errors import RequestError
from penjing.core.text.tokenizer import Tokenizer
from penjing.serve.engine.adapters import Adapters, LoadedAdapter
from penjing.serve.engine.config import EngineConfig
from penjing.serve.engine.request import Request
from penjing.serve.engine.scheduler import RESERVED_PART, Scheduler
from penjing.serve.sampling.constraint import Constraint, Constraints
from penjing.serve.sight.images import Images, Placed


@dataclass(frozen=True)
class PreparedRequest:
    """A request that is valid for an engine, tokenized, with what holds its answers to a form. `starts`: where its
    images begin in the prompt; `images`: they themselves, once `Preparer.see` has looked."""

    request: Request
    prompt_ids: list[int]
    constraint: Constraint | None = None
    adapter: LoadedAdapter | None = None
    starts: tuple[int, ...] = ()
    images: tuple[Placed, ...] = ()


class Preparer:
    """Tokenizes and validates for one model; changes nothing, any thread may use it.

    Attributes:
        max_prompt_bytes: a longer text cannot fit the context.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        max_model_len: int,
        constraints: Constraints,
        adapters: Adapters,
        images: Images,
    ) -> None:
        self._tokenizer, self._vocab_size, self._max_model_len = tokenizer, vocab_size, max_model_len
        self._constraints, self._adapters, self.images = constraints, adapters, images
        self.max_prompt_bytes = tokenizer.most_bytes(max_model_len)

    def prepare(self, request: Request) -> PreparedRequest:
        """Tokenize and validate. Images are counted, and at most their sizes are read: `see` looks at them, which
        takes longest.

        Raises:
            RequestError: an empty, too long or wrongly typed prompt, parameters that do not fit the model, an adapter
                that there is not, too many or too large images, or some that have no place in the prompt.
            SetupError: a form of the answer is asked for, and llguidance is not installed.
        """
        adapter = self._adapters.named(request.params.lora_name)
        prompt = request.prompt
        if isinstance(prompt, str):
            prompt = self.images.expand(prompt, request.images)
        elif request.images:
            raise RequestError("images need a prompt of text, which says where they stand, not token ids")
        prompt_ids = self._tokenize(prompt, request.add_special)
        self._check_length(len(prompt_ids))
        params, last_id = request.params, self._vocab_size - 1
        for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias or ())):
            if any(token_id > last_id for token_id in ids):
                raise RequestError(f"sampling parameter {name} has token id {max(ids)}; ids go from 0 to {last_id}")
        room = self._max_model_len - len(prompt_ids)
        if params.min_tokens > room:
            raise RequestError(
                f"sampling parameter min_tokens must be at most {room}, which the context of {self._max_model_len} "
                f"leaves after a prompt of {len(prompt_ids)} tokens, got {params.min_tokens}"
            )
        constraint = None if params.guided is None else self._constraints.make(params.guided)
        starts = self.images.places(prompt_ids, request.images)
        return PreparedRequest(request, prompt_ids, constraint, adapter, starts)

    def see(self, prepared: PreparedRequest) -> PreparedRequest:
        """`prepared` with what its images became; the same where it has none.

        Raises:
            RequestError: one cannot be read.
        """
        if not prepared.starts:
            return prepared
        return replace(prepared, images=self.images.see(prepared.starts, prepared.request.images))

    def _tokenize(self, prompt: object, add_special: bool) -> list[int]:
        if isinstance(prompt, str):
            try:
                num_bytes = len(prompt.encode("utf-8"))
            except UnicodeEncodeError as error:
                raise RequestError(f"the prompt is not valid Unicode text: {error}") from None
            if num_bytes > self.max_prompt_bytes:  # tokenizing it would take seconds, in vain
                raise RequestError(
                    f"the prompt has {num_bytes} bytes; the context of {self._max_model_len} tokens holds at most "
                    f"{self.max_prompt_bytes}: shorten it"
                )
            prompt_ids = self._tokenizer.encode_beside(prompt, add_special=add_special)
        elif isinstance(prompt, list | tuple):
            self._check_length(len(prompt))
            for token_id in prompt:
                if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < self._vocab_size:
                    raise RequestError(
                        f"the prompt has token id {token_id!r}; ids are integers from 0 to {self._vocab_size - 1}"
                    )
            prompt_ids = list(prompt)
        else:
            raise RequestError(f"the prompt must be text or a list of token ids, got {type(prompt).__name__}")
        if not prompt_ids:
            raise RequestError("the prompt is empty; give at least one token")
        return prompt_ids

    def _check_length(self, num_tokens: int) -> None:
        if num_tokens >= self._max_model_len:
            raise RequestError(
                f"the prompt has {num_tokens} tokens; with a context of {self._max_model_len} at most "
                f"{self._max_model_len - 1} leave room for an answer: shorten it"
            )


def overload_reason(
    scheduler: Scheduler, limits: EngineConfig, prepared: PreparedRequest, pending_requests: int, pending_tokens: int
) -> str | None:
    """Why `prepared` must not wait beside what waits already in `scheduler` and outside of it; None: it may."""
    waiting = scheduler.num_waiting + pending_requests
    tokens = scheduler.num_waiting_tokens + pending_tokens
    if waiting == 0:
        return None
    most = limits.max_waiting_requests
    left = most // RESERVED_PART
    request = prepared.request
    own = scheduler.waiting.num_of(request.key) if request.key else 0
    if waiting + request.params.n > most:
        return f"{waiting} sequences wait and max_waiting_requests={most}"
    if own and own + request.params.n > most - left:
        return f"{own} sequences of this key wait, and {left} places of {most} are left to others"
    if tokens + len(prepared.prompt_ids) > limits.max_waiting_tokens:
        return f"{tokens} tokens wait and max_waiting_tokens={limits.max_waiting_tokens}"
    return None
