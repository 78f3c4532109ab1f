"""An INT8 text encoder behind a server: tokenizer, then ONNX Runtime with the options of its artifact."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from penjing.core.artifact.onnx import ONNX_RUNTIME, recorded
from penjing.core.artifact.onnx_encoder import (
    IDS,
    MASK,
    OUTPUT,
    EncoderArtifact,
    cosine_difference,
    open_encoder_artifact,
    recorded_texts,
)
from penjing.core.artifact.parity import FAKE_QUANTIZED, SERVED
from penjing.core.errors import InputError, RequestError, ServerError
from penjing.serve.client.protocol import ENCODER, MAX_TEXT_BYTES, REQUEST_SECONDS
from penjing.serve.families.base import Arrays, Served, Signature, TensorSpec, Workload, in_parts
from penjing.serve.families.batched import batched
from penjing.serve.families.row_threads import RowThreads

if TYPE_CHECKING:
    from penjing.serve.client.client import AsyncClient, Client

TEXT = "text"
PART = 4  # texts of similar length that one thread runs at once: what pads a longer one is computed too
REQUEST_TEXTS = 16  # of a request that is timed
STREAMS = 16  # of them under way at once
SAME = 0.99  # cosine; the server pads otherwise than this process, which turns values near a tie


def signature(artifact: EncoderArtifact) -> Signature:
    """`text`, one a row, gives `embedding`; the ONNX file itself takes token ids and their mask."""
    return Signature(
        name=ENCODER,
        inputs=(TensorSpec(TEXT, "BYTES", (1,)),),
        file_inputs=(TensorSpec(IDS, "INT64", (-1,)), TensorSpec(MASK, "INT64", (-1,))),
        outputs=(TensorSpec(OUTPUT, "FP32", (artifact.config.hidden_size,)),),
    )


class TextEncoder:
    """A `BatchModel`; rows of a batch are padded to the longest, which moves no embedding by more than rounding.

    Args:
        folder: the artifact; every hash is checked.
        threads: of ONNX Runtime; 0 takes one for each core.

    Raises:
        InputError: damaged, or of another kind.
    """

    def __init__(self, folder: Path, threads: int = 0) -> None:
        self._artifact = open_encoder_artifact(folder)
        self._threads = RowThreads(self._artifact.session, threads)

    def prepare(self, inputs: Arrays) -> list[str]:
        """The texts of a request."""
        return read_texts(inputs.get(TEXT))

    def start(
        self, requests: Sequence[list[str]], begun: Callable[[], None]
    ) -> Callable[[], list[dict[str, np.ndarray]]]:
        """`embedding` (N, hidden) float32 for each request; see `BatchModel`."""
        texts = [text for request in requests for text in request]
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]), reverse=True)  # the longest begin

        def embed(session: Any, part: slice) -> NDArray[np.float32]:
            return self._artifact.embed(session, [texts[index] for index in order[part]])

        wait = self._threads.start(embed, self._threads.parts(len(texts), PART), begun)
        ends = np.cumsum([len(request) for request in requests])

        def finish() -> list[dict[str, np.ndarray]]:
            rows = np.empty((len(texts), self._artifact.config.hidden_size), np.float32)
            rows[order] = np.concatenate(wait())
            return [{OUTPUT: part} for part in np.split(rows, ends[:-1])]

        return finish

    def example(self) -> list[str]:
        """One word."""
        return ["word"]


def read_texts(array: NDArray[Any] | None, name: str = TEXT) -> list[str]:
    """The texts of a request's tensor `name`.

    Raises:
        RequestError: none, another shape, a text that is too long or not UTF-8.
    """
    if array is None or array.ndim != 2 or array.shape[1] != 1 or len(array) == 0:
        shape = "nothing" if array is None else f"the shape {array.shape}"
        raise RequestError(f"{name} must have the shape (N, 1) with N ≥ 1, one text a row, got {shape}")
    return [_text(value, f"{name}[{row}]") for row, value in enumerate(array[:, 0])]


def _text(value: bytes | str, where: str) -> str:
    if isinstance(value, str):
        value = value.encode()
    if len(value) > MAX_TEXT_BYTES:
        raise RequestError(f"{where} has {len(value)} bytes, at most {MAX_TEXT_BYTES} are read; shorten it")
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"{where} is not UTF-8 ({error.reason} at byte {error.start})") from None


def workload(folder: Path, client: Client, *, texts: int = 1024, threads: int = 0) -> Workload:
    """Sixteen requests of 16 paragraphs of Python's help are always under way; alone, the same paragraphs are embedded
    in one call of `EncoderArtifact.embed`. Both tokenize.

    Args:
        texts: of one turn, in whole requests; fewer than 256 keep fewer than sixteen requests under way.
        threads: of ONNX Runtime in this process; 0 takes one for each core, as the server does by default.

    Raises:
        InputError: the folder is no text encoder's artifact.
        ServerError: no server answers, or with other embeddings than this process: it serves another model.
    """
    artifact = open_encoder_artifact(folder)
    session = artifact.session(threads)
    requests = max(1, texts // REQUEST_TEXTS)
    given = mixed_texts(requests * REQUEST_TEXTS)
    parts = [given[at : at + REQUEST_TEXTS] for at in range(0, len(given), REQUEST_TEXTS)]
    found = client.embed(parts[0], timeout=REQUEST_SECONDS)
    expected = artifact.embed(session, parts[0])
    if found.shape != expected.shape or not (found * expected).sum(1).mean() >= SAME:
        raise ServerError(f"{client.server} answers with other embeddings than {folder}: does it serve that artifact?")

    def alone() -> int:
        artifact.embed(session, given)
        return len(given)

    async def ask(client: AsyncClient, part: list[str]) -> None:
        await client.embed(part, timeout=REQUEST_SECONDS)

    return Workload(
        unit="texts",
        alone=alone,
        forms={"server": parts},
        request_rows=REQUEST_TEXTS,
        ask=ask,
        num_requests=requests,
        streams=STREAMS,
    )


def mixed_texts(count: int) -> list[str]:
    """`count` paragraphs of Python's help, from a heading to a page, in the order of the text and again from its start
    where there are fewer; each is one line."""
    from penjing.core.text.corpus import TOPIC_GAP, heldout_text  # imports torch, which no server of texts needs

    lines = [" ".join(paragraph.split()) for paragraph in heldout_text().split(TOPIC_GAP)]
    found = [line for line in lines if line]
    return [found[index % len(found)] for index in range(count)]


def parity(folder: Path, client: Client) -> Served:
    """Its embeddings beside those of the fake-quantized model in the record, and of ONNX Runtime here and now.

    Raises:
        InputError: damaged, or the endpoint's embeddings have another size.
    """
    artifact = open_encoder_artifact(folder)
    texts = recorded_texts(artifact.parity)
    local = artifact.embed(artifact.session(), texts)
    served = np.concatenate(in_parts(len(texts), lambda part: client.embed(texts[part])))
    if served.shape != local.shape:
        raise InputError(
            f"the endpoint's embeddings have {served.shape[1]} numbers, those of {folder} {local.shape[1]}: it serves "
            "another one"
        )
    known = recorded(artifact.parity, FAKE_QUANTIZED).astype(np.float32)
    differences = (
        cosine_difference((FAKE_QUANTIZED, SERVED), known, served),
        cosine_difference((ONNX_RUNTIME, SERVED), local, served),
    )
    return Served(served.tolist(), differences, artifact.parity.bound, bool(np.array_equal(local, served)))


FAMILY = batched(
    name=ENCODER,
    open_artifact=open_encoder_artifact,
    signature=signature,
    load=lambda folder, settings: TextEncoder(folder, settings.threads),
    how_to_compress="the checkpoint of a text encoder, and artifacts are served; make one with "
    "'penjing compress recipes/minilm-int8.toml --set model={folder}'",
    workload=workload,
    parity=parity,
)
