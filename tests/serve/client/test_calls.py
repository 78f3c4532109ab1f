"""Requests and answers of both clients, without a server."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from penjing.core.errors import RequestError
from penjing.serve.client import calls
from penjing.serve.client.calls import CallSettings
from penjing.serve.client.wire_text import build_request

SETTINGS = CallSettings("localhost:8001", None, 5.0, 0)
PIXELS_NCHW = np.zeros((1, 3, 4, 4), np.uint8)


def answered(*_: Any, **__: Any) -> Any:
    messages: Any = service_pb2  # its classes are made when it is imported: type checkers see none
    answer = messages.ModelInferResponse()
    answer.outputs.add(name="output", datatype="FP32", shape=[1, 2])
    answer.raw_output_contents.append(np.zeros(2, np.float32).tobytes())
    return answer


async def answered_later(*_: Any, **__: Any) -> Any:
    return answered()


@pytest.mark.parametrize(
    ("kind", "given", "missing"),
    [("classify", PIXELS_NCHW, "logits"), ("embed", "a tree", "embedding"), ("embed_images", b"PNG", "embedding")],
)
def test_an_answer_of_a_model_of_another_kind_is_told_as_one(kind: str, given: Any, missing: str) -> None:
    words = f"answers with output and without '{missing}': it is of another kind; ask it with infer"
    with pytest.raises(RequestError, match=words):
        getattr(calls, kind)(SimpleNamespace(ModelInfer=answered), SETTINGS, given, None, "")
    with pytest.raises(RequestError, match=words):
        asyncio.run(
            getattr(calls, f"{kind}_async")(SimpleNamespace(ModelInfer=answered_later), SETTINGS, given, None, "")
        )


@pytest.mark.parametrize("images", ["scene.png", ["scene.png"], [3]])
def test_images_are_bytes_and_no_paths(images: Any) -> None:
    with pytest.raises(TypeError, match=r"images must be the bytes of files, .* not (str|int)"):
        build_request("llm", "<image>", None, {"images": images}, stream=False)


def test_what_is_no_text_and_no_dictionary_is_told_as_such() -> None:
    for texts in (None, 3, [], ["a", None]):
        with pytest.raises(RequestError, match="texts must be one text or a list of one or more"):
            calls.embed(None, SETTINGS, texts, 1.0, "")
    for inputs in (None, 3, [np.zeros(3)], {}):
        with pytest.raises(RequestError, match="give the model's inputs in a dictionary, by name"):
            calls.infer(None, SETTINGS, inputs, 1.0, "")  # type: ignore[arg-type]
