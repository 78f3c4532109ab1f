"""The parity gate through a served endpoint: what an artifact's record asks, asked of a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from penjing.core.artifact.classifier import (
    FAKE_QUANTIZED,
    ONNX_RUNTIME,
    add_served_logits,
    is_vision_artifact,
    logit_difference,
    normalised,
    open_vision_artifact,
)
from penjing.core.artifact.decoder import INT8_RUNTIME, SERVED, ParityOutput, add_parity_outputs, open_artifact
from penjing.core.artifact.encoder import is_encoder_artifact, open_encoder_artifact
from penjing.core.errors import InputError
from penjing.serve.client.client import Client

CHUNK = 16  # images of a request: no server that takes batches refuses them


def served_parity(folder: Path, server: str) -> dict[str, Any]:
    """Send the record's inputs to the model at `server`, compare, and add what came to the artifact's record.

    A classifier's answers are compared with ONNX Runtime here and now, and held to the recipe's bound from the
    fake-quantized model; a decoder's greedy continuations with those of the INT8 runtime in the record.

    Args:
        server: host:port of the gRPC endpoint.

    Returns:
        `differences`, as of `verify_artifact`, and for a classifier `same_bits`: whether every logit is local ONNX
        Runtime's.

    Raises:
        InputError: the artifact is damaged, or the endpoint exceeds the bound: it runs something else.
        ServerError, RequestError: the server does not answer, or has another kind of model.
    """
    with Client(server) as client:
        if is_encoder_artifact(folder):
            return _encoder(folder, client)
        return _classifier(folder, client) if is_vision_artifact(folder) else _decoder(folder, client)


def _classifier(folder: Path, client: Client) -> dict[str, Any]:
    artifact = open_vision_artifact(folder)
    pixels = artifact.parity.pixels()
    images = normalised(pixels, artifact.config)
    local = artifact.logits(artifact.session(), pixels)
    served = np.concatenate([client.classify(images[at : at + CHUNK]).logits for at in range(0, len(images), CHUNK)])
    if served.shape != local.shape:
        raise InputError(
            f"the endpoint answers with {served.shape[1]} classes, {folder} has {local.shape[1]}: it serves another one"
        )
    recorded = np.array(artifact.parity.logits[FAKE_QUANTIZED], np.float64)
    written = logit_difference((FAKE_QUANTIZED, SERVED), recorded, served)
    if not written.largest <= artifact.parity.bound:
        raise InputError(
            f"parity: the endpoint's logits differ from the fake-quantized model's by up to {written.largest:.3g} of "
            f"their spread, the bound is {artifact.parity.bound:g}: does it serve {folder}, with its options?"
        )
    differences = (written, logit_difference((ONNX_RUNTIME, SERVED), local, served))
    add_served_logits(artifact, served, differences)
    return {
        "differences": [difference.model_dump() for difference in differences],
        "same_bits": bool(np.array_equal(local, served)),
    }


def _encoder(folder: Path, client: Client) -> dict[str, Any]:
    artifact = open_encoder_artifact(folder)
    texts = list(artifact.parity.texts)
    local = artifact.embed(artifact.session(), texts)
    served = np.concatenate([client.embed(texts[at : at + CHUNK]) for at in range(0, len(texts), CHUNK)])
    if served.shape != local.shape:
        raise InputError(
            f"the endpoint's embeddings have {served.shape[1]} numbers, those of {folder} {local.shape[1]}: it serves "
            "another one"
        )
    recorded = np.array(artifact.parity.embeddings, np.float32)
    differences = []
    for name, known in ((FAKE_QUANTIZED, recorded), (ONNX_RUNTIME, local)):
        cosines = (known * served).sum(1)
        values = {"largest": float(1 - cosines.min()), "mean": float(1 - cosines.mean())}
        differences.append({"between": (name, SERVED), "quantity": "1 - cosine", **values})
    if not 1 - differences[0]["mean"] >= artifact.parity.bound:  # NaN fails too
        raise InputError(
            f"parity: the endpoint's embeddings have a mean cosine of {1 - differences[0]['mean']:.5f} with the "
            f"fake-quantized model's, the bound is {artifact.parity.bound:g}: does it serve {folder}, with its options?"
        )
    return {"differences": differences, "same_bits": bool(np.array_equal(local, served))}


def _decoder(folder: Path, client: Client) -> dict[str, Any]:
    parity = open_artifact(folder).parity
    outputs = []
    for given, known in zip(parity.inputs, parity.outputs[INT8_RUNTIME], strict=True):
        length = len(known.token_ids)
        answer = client.generate(given.text, max_tokens=length, temperature=0.0, ignore_eos=True, logprobs=0)
        chosen = [next(iter(entry.items())) for entry in answer.logprobs]
        outputs.append(
            ParityOutput(
                token_ids=tuple(int(token) for token, _ in chosen),
                logprobs=tuple(entry["logprob"] for _, entry in chosen),
            )
        )
    return {"differences": [add_parity_outputs(folder, SERVED, outputs).model_dump()]}
