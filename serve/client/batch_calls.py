"""Unary calls of a batched model, for both clients: tensors there and back, tried again where that can help."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any

import numpy as np

from penjing.serve.client.call_settings import CallSettings, remaining
from penjing.serve.client.wire_tensors import Classification, call_failed, metadata_request, probe, read_infer


def classify(stub: Any, settings: CallSettings, images: Any, timeout: float | None) -> Classification:
    """See `Client.classify`."""
    deadline = settings.deadline(timeout)
    return Classification(_infer(stub, settings, settings.images_request(images, deadline), deadline)["logits"])


def embed(stub: Any, settings: CallSettings, texts: Any, timeout: float | None) -> np.ndarray:
    """See `Client.embed`."""
    deadline = settings.deadline(timeout)
    return _infer(stub, settings, settings.texts_request(texts, deadline), deadline)["embedding"]


def _infer(stub: Any, settings: CallSettings, request: Any, deadline: float | None) -> dict[str, np.ndarray]:
    import grpc

    for attempt in itertools.count():
        try:
            return read_infer(stub.ModelInfer(request, timeout=remaining(deadline)))
        except grpc.RpcError as error:
            failure = call_failed(error, settings.server)
        time.sleep(settings.delay_before_retry(failure, [], attempt, deadline))
    raise AssertionError("itertools.count has no end")


def answers(stub: Any, settings: CallSettings, deadline: float) -> bool:
    """Whether a batched model computes an answer before `deadline`."""
    import grpc

    for name in settings.batched_names():
        try:
            metadata = stub.ModelMetadata(metadata_request(name), timeout=remaining(deadline))
            stub.ModelInfer(probe(metadata), timeout=remaining(deadline))
            return True
        except grpc.RpcError:
            continue
    return False


async def classify_async(stub: Any, settings: CallSettings, images: Any, timeout: float | None) -> Classification:
    """See `AsyncClient.classify`."""
    deadline = settings.deadline(timeout)
    found = await _infer_async(stub, settings, settings.images_request(images, deadline), deadline)
    return Classification(found["logits"])


async def embed_async(stub: Any, settings: CallSettings, texts: Any, timeout: float | None) -> np.ndarray:
    """See `AsyncClient.embed`."""
    deadline = settings.deadline(timeout)
    return (await _infer_async(stub, settings, settings.texts_request(texts, deadline), deadline))["embedding"]


async def _infer_async(
    stub: Any, settings: CallSettings, request: Any, deadline: float | None
) -> dict[str, np.ndarray]:
    import grpc

    for attempt in itertools.count():
        try:
            return read_infer(await stub.ModelInfer(request, timeout=remaining(deadline)))
        except grpc.RpcError as error:
            failure = call_failed(error, settings.server)
        await asyncio.sleep(settings.delay_before_retry(failure, [], attempt, deadline))
    raise AssertionError("itertools.count has no end")


async def answers_async(stub: Any, settings: CallSettings, deadline: float) -> bool:
    """Whether a batched model computes an answer before `deadline`."""
    import grpc

    for name in settings.batched_names():
        try:
            metadata = await stub.ModelMetadata(metadata_request(name), timeout=remaining(deadline))
            await stub.ModelInfer(probe(metadata), timeout=remaining(deadline))
            return True
        except grpc.RpcError:
            continue
    return False
