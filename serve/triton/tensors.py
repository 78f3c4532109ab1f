"""A Triton server request → what it asks of the engine; outputs of the engine → tensors of a response.

Names and rules of the tensors are those of Triton server's vLLM backend; `messages`, `chat_template_kwargs`,
`prompt_token_ids`, `key`, `priority` and what counts cached tokens, scores a prompt and tells of stages are ours.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penjing.core.errors import RequestError
from penjing.serve.engine.request import RequestOutput
from penjing.serve.sampling.params import SamplingParams
from penjing.serve.sight.wire import read_images
from penjing.serve.triton.strings import refuse_too_long

RETURNS = (
    "return_finish_reason",
    "return_cumulative_logprob",
    "return_logprobs",
    "return_num_input_tokens",
    "return_num_output_tokens",
    "return_num_cached_tokens",
    "return_prompt_logprobs",
    "return_stage_seconds",
)
MAX_TEXT_BYTES = 4 << 20  # of JSON that is not a prompt: parsing a megabyte takes 10 ms of the lock that all share
ESCAPED = 6  # bytes that JSON may need for one of a text
MAX_KEY_LENGTH = 256


@dataclass(frozen=True)
class Call:
    """What a client asks for: a `prompt` of text or token ids, or the `messages` of a chat (the other is None) with
    further variables of the chat template; `num_bytes` is their length. `key` says on whose behalf a request comes,
    and `priority` how urgent it is (lower first). `images` are files."""

    prompt: str | list[int] | None
    messages: list[dict[str, Any]] | None
    params: SamplingParams
    stream: bool
    prepend_input: bool
    returns: frozenset[str]
    num_bytes: int = 0
    template: dict[str, Any] = field(default_factory=dict)
    key: str = ""
    priority: int = 0
    images: tuple[bytes, ...] = ()

    @property
    def is_quick(self) -> bool:
        """Whether a short one is prepared in a moment: a form is compiled, and images are looked at."""
        return self.params.guided is None and not self.images


def read_call(inputs: Mapping[str, np.ndarray], parameters: str, max_prompt_bytes: int) -> Call:
    """Read a request.

    Args:
        inputs: tensors by name: TYPE_STRING as object arrays of bytes, TYPE_BOOL as bool arrays, each of one element.
        parameters: the request's parameters as JSON; the sampling parameters if there is no such tensor.
        max_prompt_bytes: a longer text, and more token ids than a text of that length may have, are refused unread;
            messages may take more, for their JSON.

    Raises:
        RequestError: names the tensor or field that is wrong, and the rule.
    """
    text = _text(inputs, "text_input", max_prompt_bytes)
    ids = _ids(inputs, "prompt_token_ids", max_prompt_bytes)
    messages = _text(inputs, "messages", most_bytes(max_prompt_bytes))
    given = [name for name in ("text_input", "messages", "prompt_token_ids") if name in inputs]
    if len(given) != 1:
        raise RequestError(f"give one of text_input, messages and prompt_token_ids, got {', '.join(given) or 'none'}")
    stream = _flag(inputs, "stream") or False
    exclude_input = _flag(inputs, "exclude_input_in_output")
    if stream and exclude_input is False:
        raise RequestError(
            "exclude_input_in_output must be true or absent with stream: the prompt is not streamed back"
        )
    returns = frozenset(name for name in RETURNS if _flag(inputs, name))
    sampling = _text(inputs, "sampling_parameters")
    params = SamplingParams.from_json(parameters if sampling is None else sampling)
    images = read_images(inputs["image"]) if "image" in inputs else ()
    if "return_cumulative_logprob" in returns and params.logprobs is None:
        params = params.model_copy(update={"logprobs": 0})  # the chosen token's alone
    if "return_prompt_logprobs" in returns and params.prompt_logprobs is None:
        params = params.model_copy(update={"prompt_logprobs": 0})
    return Call(
        prompt=text if ids is None else ids,
        messages=None if messages is None else _messages(messages),
        params=params,
        stream=stream,
        prepend_input=not stream and (exclude_input is False or (exclude_input is None and messages is None)),
        returns=returns,
        num_bytes=len(text or messages or ()) + len(ids or ()) + sum(map(len, images)),
        template=_template(_text(inputs, "chat_template_kwargs")),
        key=_key(_text(inputs, "key")),
        priority=_integer(inputs, "priority"),
        images=images,
    )


def most_bytes(max_prompt_bytes: int) -> int:
    """Of any text of a request that is read, where a prompt may have `max_prompt_bytes`."""
    return ESCAPED * max_prompt_bytes + MAX_TEXT_BYTES


def _text(inputs: Mapping[str, np.ndarray], name: str, most: int = MAX_TEXT_BYTES) -> str | None:
    if name not in inputs:
        return None
    refuse_too_long(name, inputs[name], most)
    value = _single(inputs, name)
    if not isinstance(value, bytes):
        raise RequestError(f"{name} must be a TYPE_STRING tensor, got {type(value).__name__}")
    if len(value) > most:
        raise RequestError(f"{name} has {len(value)} bytes, at most {most} are read: shorten it")
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{name} is not valid UTF-8: {error.reason} at byte {error.start}") from None


def _flag(inputs: Mapping[str, np.ndarray], name: str) -> bool | None:
    return bool(_single(inputs, name)) if name in inputs else None


def _ids(inputs: Mapping[str, np.ndarray], name: str, most: int) -> list[int] | None:
    if name not in inputs:
        return None
    tensor = inputs[name]
    if not np.issubdtype(tensor.dtype, np.integer):
        raise RequestError(f"{name} must be a TYPE_INT32 tensor, got {tensor.dtype}")
    if tensor.size > most:  # as Python's numbers they take ten times the memory, made under the lock that all share
        raise RequestError(f"{name} has {tensor.size} token ids, at most {most} are read: shorten it")
    return tensor.reshape(-1).tolist()


def _integer(inputs: Mapping[str, np.ndarray], name: str) -> int:
    if name not in inputs:
        return 0
    value = _single(inputs, name)
    if not isinstance(value, np.integer):
        raise RequestError(f"{name} must be a TYPE_INT32 tensor, got {type(value).__name__}")
    return int(value)


def _key(text: str | None) -> str:
    if text is not None and len(text) > MAX_KEY_LENGTH:
        raise RequestError(f"key has {len(text)} characters, at most {MAX_KEY_LENGTH} are allowed")
    return text or ""


def _template(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"chat_template_kwargs is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise RequestError('chat_template_kwargs must be a JSON object such as {"tools": []}')
    return values


def _single(inputs: Mapping[str, np.ndarray], name: str) -> Any:
    tensor = inputs[name]
    if tensor.size != 1:
        raise RequestError(f"{name} must hold one element, got shape {list(tensor.shape)}")
    return tensor.reshape(-1)[0]


def _messages(text: str) -> list[dict[str, Any]]:
    try:
        messages = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"messages is not valid JSON: {error}") from None
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise RequestError('messages must be a JSON list such as [{"role": "user", "content": "Hello"}]')
    return messages


class OutputTensors:
    """Builds the tensors of one call's responses: element `i` belongs to answer `i` of `n`.

    Streaming, each response holds what is new; else the one response holds all, after the prompt if asked for.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        self._cumulative = [0.0] * call.params.n
        self._num_cached_tokens = 0  # of the first answer: the others share its prompt

    def build(self, outputs: Sequence[RequestOutput], prompt: str = "") -> dict[str, np.ndarray]:
        """Tensors for `outputs`, in the order they came; several of one answer are joined. `prompt` begins each text
        where the client asked for that."""
        n, returns = self._call.params.n, self._call.returns
        texts = [prompt if self._call.prepend_input else ""] * n
        reasons = ["None"] * n  # as the vLLM backend writes an answer that goes on
        counts = [0] * n
        logprobs: list[list[dict[int, Any]] | None] = [None] * n
        stages = np.zeros((n, 3), np.float32)
        for output in outputs:
            index = output.index
            texts[index] += output.text
            counts[index] += len(output.token_ids)
            if index == 0:
                self._num_cached_tokens = output.num_cached_tokens
            reasons[index] = output.finish_reason or reasons[index]
            if output.stages is not None:
                stages[index] = output.stages
            if output.logprobs is not None:
                logprobs[index] = (logprobs[index] or []) + [_logprob_json(entry) for entry in output.logprobs]
                chosen = zip(output.token_ids, output.logprobs, strict=True)
                self._cumulative[index] += sum(entry[token].logprob for token, entry in chosen)
        tensors = {"text_output": _strings(texts)}
        if "return_finish_reason" in returns:
            tensors["finish_reason"] = _strings(reasons)
        if "return_cumulative_logprob" in returns:
            tensors["cumulative_logprob"] = np.array(self._cumulative, np.float32)
        if "return_logprobs" in returns:
            tensors["logprobs"] = _strings([json.dumps(entries) for entries in logprobs])
        if "return_num_input_tokens" in returns:
            tensors["num_input_tokens"] = np.array([outputs[-1].num_prompt_tokens], np.uint32)
        if "return_num_output_tokens" in returns:
            tensors["num_output_tokens"] = np.array(counts, np.uint32)
        if "return_num_cached_tokens" in returns:
            tensors["num_cached_tokens"] = np.array([self._num_cached_tokens], np.uint32)
        if "return_prompt_logprobs" in returns:
            scored = next((output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None), None)
            entries = scored and [entry if entry is None else _logprob_json(entry) for entry in scored]
            tensors["prompt_logprobs"] = _strings([json.dumps(entries)])
        if "return_stage_seconds" in returns:
            tensors["stage_seconds"] = stages
        return tensors


def _logprob_json(entry: Mapping[int, Any]) -> dict[int, Any]:
    return {token: logprob._asdict() for token, logprob in entry.items()}


def _strings(texts: list[str]) -> np.ndarray:
    return np.array([text.encode("utf-8") for text in texts], dtype=np.object_)
