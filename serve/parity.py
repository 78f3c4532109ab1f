"""The parity gate through a served endpoint: what an artifact's record asks, asked of a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penjing.core.artifact.parity import SERVED, add_answers, gate
from penjing.core.errors import InputError
from penjing.core.family import family_of
from penjing.serve.client.client import Client
from penjing.serve.families.base import family_at
from penjing.serve.supervisor.state import served_name


def served_parity(folder: Path, server: str) -> dict[str, Any]:
    """Send the record's inputs to the model at `server`, compare, and add what came to the artifact's record.

    Answers of a classifier or a text encoder are compared with ONNX Runtime here and now, and held to the record's
    bound from the fake-quantized model; a decoder's greedy continuations with those of the INT8 runtime in the record.

    Args:
        server: host:port of the gRPC endpoint; on this machine the model may have a name of its own there.

    Returns:
        `differences`, as of `verify_artifact`, and where the artifact runs in this process `same_bits`: whether every
        number is the same here.

    Raises:
        InputError: the artifact is damaged or of a family that is not asked, or the endpoint exceeds the bound: it runs
            something else.
        ServerError, RequestError: the server does not answer, or has another kind of model.
    """
    ask = family_at(folder).parity
    if ask is None:
        raise InputError(
            f"{folder} is of the family {family_of(folder)!r}, whose table for servers has no entry 'parity'; verify "
            "it without a server"
        )
    with Client(server, model=served_name(server)) as client:
        served = ask(folder, client)
    if served.bound is not None:
        gate(served.differences, served.bound.of(SERVED), f"does it serve {folder}, with its options?")
    add_answers(folder, SERVED, served.answers, served.differences)
    found: dict[str, Any] = {"differences": [difference.model_dump() for difference in served.differences]}
    return found if served.same_bits is None else found | {"same_bits": served.same_bits}
