"""Names and limits on which the served model, its supervisor and its clients agree."""

import hashlib
from collections.abc import Mapping

MODEL_VARIABLE = "PENJING_MODEL"
"""Environment variable: the folder of the checkpoint or artifact."""
ENGINE_VARIABLE = "PENJING_ENGINE"
"""Environment variable: the engine's settings as JSON."""
PULSE_VARIABLE = "PENJING_PULSE"
"""Environment variable: the file of the pulse (pulse.py); absent: the model runs without a supervisor."""
ADAPTERS_VARIABLE = "PENJING_ADAPTERS"
"""Environment variable: the file that lists the adapters which a decoder shall have (adapter_list.py); absent: they do
not change."""

PING = "ping"
"""Request parameter of a call that asks the served model for a sign of life; the rest of the request is not read."""

WEIGHTS = "weights"
"""Request parameter of a call about the weights of a decoder, as JSON: "list" asks for their shapes and digests, and
for the digest of all; {"name": …, "begin": …} says where the values of the input of this name belong, float32; {"take":
digest} ends what was sent. The answer of a list is JSON too."""
OF_WEIGHTS = "of_weights"
"""Request parameter of a generation: the digest of the weights that shall answer. Others refuse it."""

DECODER, CLASSIFIER, ENCODER, GRAPH, TOWERS = "llm", "classifier", "encoder", "graph", "towers"
"""What the models of penjing's own families are called on the server."""

MODEL_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,62}"
"""Pattern of what a model may be called: a folder, and a part of a URL."""

SIGHT = "sight"
"""What a decoder sees with is called on the server where it is a model of its own."""

MAX_TEXT_BYTES = 1 << 20
"""Of one text of an encoder, of which the tokenizer keeps the beginning."""

REQUEST_SECONDS = 120.0
"""Until a request of a benchmark has failed."""


def host_port(host: str, port: int) -> str:
    """An address as clients write it: one of IPv6 stands in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def weights_digest(tensors: Mapping[str, str]) -> str:
    """The digest of weights, whose tensors have these digests by name: SHA-256 of each, of float32 as it lies in
    memory."""
    lines = "".join(f"{name} {digest}\n" for name, digest in sorted(tensors.items()))
    return hashlib.sha256(lines.encode()).hexdigest()
