"""A Triton server request → what it asks of the engine; outputs of the engine → tensors of a response.

Names and rules of the tensors are those of Triton server's vLLM backend; `messages` is ours.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penjing.core.errors import RequestError
from penjing.serve.engine.request import RequestOutput, SamplingParams

RETURNS = (
    "return_finish_reason",
    "return_cumulative_logprob",
    "return_logprobs",
    "return_num_input_tokens",
    "return_num_output_tokens",
)
MAX_TEXT_BYTES = 64 << 20


@dataclass(frozen=True)
class Call:
    """What a client asks for. `prompt` is text, or `messages` of a chat (the other is None)."""

    prompt: str | None
    messages: list[dict[str, Any]] | None
    params: SamplingParams
    stream: bool
    prepend_input: bool
    returns: frozenset[str]


def read_call(inputs: Mapping[str, np.ndarray], parameters: str) -> Call:
    """Read a request.

    Args:
        inputs: tensors by name: TYPE_STRING as object arrays of bytes, TYPE_BOOL as bool arrays, each of one element.
        parameters: the request's parameters as JSON; the sampling parameters if there is no such tensor.

    Raises:
        RequestError: names the tensor or field that is wrong, and the rule.
    """
    text, messages = _text(inputs, "text_input"), _text(inputs, "messages")
    if (text is None) == (messages is None):
        raise RequestError("give either text_input or messages" + ("" if text is None else ", not both"))
    stream = _flag(inputs, "stream") or False
    exclude_input = _flag(inputs, "exclude_input_in_output")
    if stream and exclude_input is False:
        raise RequestError(
            "exclude_input_in_output must be true or absent with stream: the prompt is not streamed back"
        )
    returns = frozenset(name for name in RETURNS if _flag(inputs, name))
    sampling = _text(inputs, "sampling_parameters")
    params = SamplingParams.from_json(parameters if sampling is None else sampling)
    if "return_cumulative_logprob" in returns and params.logprobs is None:
        params = params.model_copy(update={"logprobs": 0})  # the chosen token's alone
    return Call(
        prompt=text,
        messages=None if messages is None else _messages(messages),
        params=params,
        stream=stream,
        prepend_input=not stream and (exclude_input is False or (exclude_input is None and messages is None)),
        returns=returns,
    )


def _text(inputs: Mapping[str, np.ndarray], name: str) -> str | None:
    if name not in inputs:
        return None
    value = _single(inputs, name)
    if not isinstance(value, bytes):
        raise RequestError(f"{name} must be a TYPE_STRING tensor, got {type(value).__name__}")
    if len(value) > MAX_TEXT_BYTES:
        raise RequestError(f"{name} has {len(value)} bytes, at most {MAX_TEXT_BYTES} are read; shorten it")
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{name} is not valid UTF-8: {error.reason} at byte {error.start}") from None


def _flag(inputs: Mapping[str, np.ndarray], name: str) -> bool | None:
    return bool(_single(inputs, name)) if name in inputs else None


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
    for index, message in enumerate(messages):
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise RequestError(f"messages[{index}].{key} must be a string, got {message.get(key)!r:.80}")
    return messages


class OutputTensors:
    """Builds the tensors of one call's responses: element `i` belongs to answer `i` of `n`.

    Streaming, each response holds what is new; else the one response holds all, after the prompt if asked for.
    """

    def __init__(self, call: Call, prompt: str) -> None:
        self._call = call
        self._prefix = prompt if call.prepend_input else ""
        self._cumulative = [0.0] * call.params.n

    def build(self, outputs: Sequence[RequestOutput]) -> dict[str, np.ndarray]:
        """Tensors for `outputs`, in the order they came; several of one answer are joined."""
        n, returns = self._call.params.n, self._call.returns
        texts = [self._prefix] * n
        reasons = ["None"] * n  # as the vLLM backend writes an answer that goes on
        counts = [0] * n
        logprobs: list[list[dict[int, Any]] | None] = [None] * n
        for output in outputs:
            index = output.index
            texts[index] += output.text
            counts[index] += len(output.token_ids)
            reasons[index] = output.finish_reason or reasons[index]
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
        return tensors


def _logprob_json(entry: Mapping[int, Any]) -> dict[int, Any]:
    return {token: logprob._asdict() for token, logprob in entry.items()}


def _strings(texts: list[str]) -> np.ndarray:
    return np.array([text.encode("utf-8") for text in texts], dtype=np.object_)
