"""The parity gate through a served endpoint: what an artifact's record asks, asked of a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from penjing.core.artifact.decoder import (
    INT8_RUNTIME,
    Answer,
    answers_to_record,
    logprob_difference,
    open_decoder_artifact,
    recorded_answers,
    recorded_prompts,
)
from penjing.core.artifact.onnx import ONNX_RUNTIME, recorded
from penjing.core.artifact.onnx_classifier import (
    logit_difference,
    normalised,
    open_classifier_artifact,
    recorded_images,
)
from penjing.core.artifact.onnx_encoder import cosine_difference, open_encoder_artifact, recorded_texts
from penjing.core.artifact.parity import FAKE_QUANTIZED, SERVED, add_answers, gate
from penjing.core.errors import InputError
from penjing.core.family import family_of
from penjing.serve.client.client import Client

CHUNK = 16  # images of a request: no server that takes batches refuses them


def served_parity(folder: Path, server: str) -> dict[str, Any]:
    """Send the record's inputs to the model at `server`, compare, and add what came to the artifact's record.

    Answers of a classifier or a text encoder are compared with ONNX Runtime here and now, and held to the record's
    bound from the fake-quantized model; a decoder's greedy continuations with those of the INT8 runtime in the record.

    Args:
        server: host:port of the gRPC endpoint.

    Returns:
        `differences`, as of `verify_artifact`, and where ONNX Runtime runs the artifact `same_bits`: whether every
        number is local ONNX Runtime's.

    Raises:
        InputError: the artifact is damaged, or the endpoint exceeds the bound: it runs something else.
        ServerError, RequestError: the server does not answer, or has another kind of model.
    """
    runs = {"classifier": _classifier, "encoder": _encoder, "decoder": _decoder}
    family = family_of(folder)
    if family not in runs:
        raise InputError(
            f"{folder} is of the family {family!r}; only {', '.join(runs)} artifacts are asked of a server"
        )
    with Client(server) as client:
        return runs[family](folder, client)


def _classifier(folder: Path, client: Client) -> dict[str, Any]:
    artifact = open_classifier_artifact(folder)
    pixels = recorded_images(artifact.parity)
    images = normalised(pixels, artifact.config)
    local = artifact.logits(artifact.session(), pixels)
    served = np.concatenate([client.classify(images[at : at + CHUNK]).logits for at in range(0, len(images), CHUNK)])
    if served.shape != local.shape:
        raise InputError(
            f"the endpoint answers with {served.shape[1]} classes, {folder} has {local.shape[1]}: it serves another one"
        )
    differences = (
        logit_difference((FAKE_QUANTIZED, SERVED), recorded(artifact.parity, FAKE_QUANTIZED), served),
        logit_difference((ONNX_RUNTIME, SERVED), local, served),
    )
    gate(differences, artifact.parity.bound.of(SERVED), _hint(folder))
    add_answers(folder, SERVED, served.tolist(), differences)
    return {
        "differences": [difference.model_dump() for difference in differences],
        "same_bits": bool(np.array_equal(local, served)),
    }


def _encoder(folder: Path, client: Client) -> dict[str, Any]:
    artifact = open_encoder_artifact(folder)
    texts = recorded_texts(artifact.parity)
    local = artifact.embed(artifact.session(), texts)
    served = np.concatenate([client.embed(texts[at : at + CHUNK]) for at in range(0, len(texts), CHUNK)])
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
    gate(differences, artifact.parity.bound.of(SERVED), _hint(folder))
    add_answers(folder, SERVED, served.tolist(), differences)
    return {
        "differences": [difference.model_dump() for difference in differences],
        "same_bits": bool(np.array_equal(local, served)),
    }


def _decoder(folder: Path, client: Client) -> dict[str, Any]:
    parity = open_decoder_artifact(folder).parity
    expected, answers = recorded_answers(parity, INT8_RUNTIME), []
    for given, known in zip(recorded_prompts(parity), expected, strict=True):
        length = len(known.token_ids)
        answer = client.generate(given.text, max_tokens=length, temperature=0.0, ignore_eos=True, logprobs=0)
        chosen = [next(iter(entry.items())) for entry in answer.logprobs]
        answers.append(
            Answer(
                token_ids=tuple(int(token) for token, _ in chosen),
                logprobs=tuple(entry["logprob"] for _, entry in chosen),
            )
        )
    difference = logprob_difference((INT8_RUNTIME, SERVED), expected, tuple(answers))
    add_answers(folder, SERVED, answers_to_record(answers), (difference,))
    return {"differences": [difference.model_dump()]}


def _hint(folder: Path) -> str:
    return f"does it serve {folder}, with its options?"
