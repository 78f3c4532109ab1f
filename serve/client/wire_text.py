"""The gRPC messages between our clients and a served decoder: requests and responses."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penjing.serve.client.errors import refused
from penjing.serve.client.protocol import OF_WEIGHTS, PING, WEIGHTS

CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1000),  # gRPC's own two minutes would go on long after a server is back
]
_RETURNS = (
    "return_finish_reason",
    "return_num_input_tokens",
    "return_num_output_tokens",
    "return_num_cached_tokens",
)
_REQUEST_FIELDS = ("key", "priority", "chat_template_kwargs", "request_id", "images", "stages", OF_WEIGHTS)
"""Of a request, given beside the sampling parameters."""
_NUMBERS = {"FP32": "f", "UINT32": "I"}


@dataclass(frozen=True)
class Chunk:
    """What one response added to one of a request's answers. The last chunk of an answer has a `finish_reason`."""

    text: str
    finish_reason: str | None = None
    index: int = 0
    num_tokens: int = 0
    num_input_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens that the server still had from earlier requests."""
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    """On the first chunk, when asked for: null for the prompt's first token, then what `logprobs` has."""
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    """An object by token id for each token, when `logprobs` was asked for; the token itself comes first."""
    stages: tuple[float, float, float] | None = None
    """Of an answer's last chunk, when asked for: its seconds in the queue, up to the first token, and from there on."""


@dataclass(frozen=True)
class Result:
    """A whole answer. `str(result)` is its text."""

    text: str
    finish_reason: str | None
    num_input_tokens: int
    num_output_tokens: int
    logprobs: list[dict[str, Any]]
    choices: tuple[str, ...]
    """The texts of all answers, when `n` > 1; `text` is the first."""
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[str, Any] | None] | None = None

    def __str__(self) -> str:
        return self.text

    @classmethod
    def of(cls, chunks: Sequence[Chunk]) -> Result:
        """Join the chunks of one request."""
        num_answers = max((chunk.index for chunk in chunks), default=0) + 1
        texts = tuple("".join(chunk.text for chunk in chunks if chunk.index == index) for index in range(num_answers))
        first = [chunk for chunk in chunks if chunk.index == 0]
        return cls(
            text=texts[0],
            finish_reason=next((chunk.finish_reason for chunk in reversed(first) if chunk.finish_reason), None),
            num_input_tokens=first[-1].num_input_tokens if first else 0,
            num_output_tokens=sum(chunk.num_tokens for chunk in first),
            logprobs=[entry for chunk in first for entry in chunk.logprobs],
            choices=texts,
            num_cached_tokens=first[-1].num_cached_tokens if first else 0,
            prompt_logprobs=next((c.prompt_logprobs for c in chunks if c.prompt_logprobs is not None), None),
        )


def build_request(
    model: str,
    prompt: str | Sequence[int] | None,
    messages: Sequence[Mapping[str, Any]] | None,
    sampling: Mapping[str, Any],
    *,
    stream: bool,
) -> Any:
    """A `ModelInferRequest` for one generation; the server checks what it holds.

    Args:
        model: its name on the server.
        prompt: text or token ids.
        messages: of a chat, instead of a prompt.
        sampling: the sampling parameters, and `key`, `priority`, `chat_template_kwargs`, `images` (JPEG or PNG files),
            `request_id` of the request, by which its log has it, `stages`: whether its last chunk shall tell them, and
            `of_weights`, the digest of the weights that shall answer.
        stream: whether the answer shall come in pieces.

    Raises:
        TypeError: something in it has no JSON form, or an image is no bytes.
        ValueError: a token id or the priority is no 32-bit integer.
    """
    request = _new_request(model)
    request.id = str(sampling.get("request_id") or "")
    if sampling.get(OF_WEIGHTS) is not None:
        request.parameters[OF_WEIGHTS].string_param = str(sampling[OF_WEIGHTS])
    fields = {name: sampling[name] for name in _REQUEST_FIELDS if sampling.get(name) is not None}
    sampling = {name: value for name, value in sampling.items() if name not in _REQUEST_FIELDS}

    def add(name: str, datatype: str, data: bytes, size: int = 1) -> None:
        request.inputs.add(name=name, datatype=datatype, shape=[size])
        request.raw_input_contents.append(data)

    def add_text(name: str, text: str) -> None:
        encoded = text.encode("utf-8", "surrogatepass")
        add(name, "BYTES", struct.pack("<I", len(encoded)) + encoded)

    def add_files(name: str, files: Sequence[bytes]) -> None:
        if wrong := [type(file).__name__ for file in files if not isinstance(file, bytes | bytearray | memoryview)]:
            raise TypeError(f"images must be the bytes of files, as open(path, 'rb').read() gives them, not {wrong[0]}")
        add(name, "BYTES", b"".join(struct.pack("<I", len(file)) + bytes(file) for file in files), len(files))

    def add_integers(name: str, values: Sequence[int]) -> None:
        try:
            add(name, "INT32", struct.pack(f"<{len(values)}i", *values), len(values))
        except struct.error as error:
            raise ValueError(f"{name} must be 32-bit integers: {error}") from None

    if isinstance(prompt, str):
        add_text("text_input", prompt)
    elif isinstance(prompt, bytes | bytearray) or (prompt is not None and not isinstance(prompt, Iterable)):
        raise TypeError(f"the prompt must be a text or a list of token ids, not {type(prompt).__name__}")
    elif prompt is not None:
        add_integers("prompt_token_ids", prompt)
    if messages is not None:
        add_text("messages", json.dumps(list(messages)))
    if "key" in fields:
        add_text("key", fields["key"])
    if "priority" in fields:
        add_integers("priority", [fields["priority"]])
    if "chat_template_kwargs" in fields:
        add_text("chat_template_kwargs", json.dumps(fields["chat_template_kwargs"]))
    if images := fields.get("images"):
        add_files("image", [images] if isinstance(images, bytes) else list(images))
    add_text("sampling_parameters", json.dumps(dict(sampling)))
    add("stream", "BOOL", bytes([stream]))
    add("exclude_input_in_output", "BOOL", b"\1")
    for name in (*_RETURNS, "return_stage_seconds") if fields.get("stages") else _RETURNS:
        add(name, "BOOL", b"\1")
    if sampling.get("logprobs") is not None:
        add("return_logprobs", "BOOL", b"\1")
    if sampling.get("prompt_logprobs") is not None:
        add("return_prompt_logprobs", "BOOL", b"\1")
    return request


def build_ping(model: str) -> Any:
    """A request that asks the served model for a sign of life."""
    request = _new_request(model)
    request.parameters[PING].bool_param = True
    request.inputs.add(name="stream", datatype="BOOL", shape=[1])
    request.raw_input_contents.append(b"\0")
    return request


def build_weights(model: str, asked: Any, values_N: np.ndarray | None) -> Any:
    """A request about the weights of a served decoder, see `penjing.serve.client.protocol.WEIGHTS`.

    Args:
        values_N: float32 of a piece.
    """
    request = _new_request(model)
    request.parameters[WEIGHTS].string_param = json.dumps(asked)
    if values_N is None:
        request.inputs.add(name="stream", datatype="BOOL", shape=[1])
        request.raw_input_contents.append(b"\0")
    else:
        request.inputs.add(name=WEIGHTS, datatype="FP32", shape=[len(values_N)])
        request.raw_input_contents.append(values_N.tobytes())
    return request


def _new_request(model: str) -> Any:
    from tritonclient.grpc import service_pb2

    messages: Any = service_pb2  # its classes are made when it is imported: type checkers see none
    return messages.ModelInferRequest(model_name=model)


def read_response(message: Any) -> list[Chunk]:
    """The chunks of one `ModelStreamInferResponse`; answers to which it adds nothing are left out.

    Raises:
        CallFailedError: it carries an error.
    """
    if message.error_message:
        raise refused(message.error_message)
    response = message.infer_response
    tensors = {
        output.name: _read(output.datatype, data)
        for output, data in zip(response.outputs, response.raw_output_contents, strict=True)
    }
    texts = tensors.get("text_output", [])
    count = len(texts)
    reasons = tensors.get("finish_reason", ["None"] * count)
    numbers = tensors.get("num_output_tokens", [0] * count)
    (num_input_tokens,) = tensors.get("num_input_tokens", [0])
    (num_cached_tokens,) = tensors.get("num_cached_tokens", [0])
    (scored,) = tensors.get("prompt_logprobs", ["null"])
    prompt_logprobs = json.loads(scored)
    logprobs = tensors.get("logprobs", ["null"] * count)
    seconds = tensors.get("stage_seconds")
    chunks = []
    for index in range(count):
        reason = None if reasons[index] == "None" else reasons[index]
        if texts[index] or reason or numbers[index]:
            entries = json.loads(logprobs[index]) or []
            chunks.append(
                Chunk(
                    texts[index],
                    reason,
                    index,
                    numbers[index],
                    num_input_tokens,
                    num_cached_tokens,
                    None if index else prompt_logprobs,
                    entries,
                    None if seconds is None or reason is None else tuple(seconds[3 * index : 3 * index + 3]),
                )
            )
    return chunks


def is_last(message: Any) -> bool:
    """Whether the server sends nothing after this `ModelStreamInferResponse`."""
    return bool(message.error_message) or message.infer_response.parameters["triton_final_response"].bool_param


def _read(datatype: str, data: bytes) -> list[Any]:
    if datatype in _NUMBERS:
        return list(struct.unpack(f"<{len(data) // 4}{_NUMBERS[datatype]}", data))
    strings, offset = [], 0
    while offset < len(data):
        (length,) = struct.unpack_from("<I", data, offset)
        offset += 4
        strings.append(data[offset : offset + length].decode("utf-8"))
        offset += length
    return strings
