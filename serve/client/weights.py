"""Sending weights to a served decoder that takes them, as the one who trains it does before it is asked."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from penjing.core.errors import RequestError
from penjing.serve.client.protocol import weights_digest

VALUES_AT_ONCE = 1 << 21  # of a request: 8 MiB, a quarter of the shared memory that a server begins with


Ask = Callable[[Any, np.ndarray | None], str]
"""Sends the request about weights that `penjing.serve.client.protocol.WEIGHTS` describes, with the values of a piece,
(N,) float32; the answer."""


def check_weights(ask: Ask, shapes: Mapping[str, Sequence[int]]) -> dict[str, str | None]:
    """The digests of the weights of a server.

    Args:
        shapes: of the weights that it shall have, by their names.

    Raises:
        RequestError: it takes none, or names or shapes are others.
    """
    has: dict[str, Any] = json.loads(ask("list", None))["tensors"]
    if missing := has.keys() ^ shapes.keys():
        raise RequestError(
            f"the served model is another one: {len(missing)} of its weights or of those that it shall have are not "
            f"there in the other, such as {min(missing)}"
        )
    for name, shape in shapes.items():
        if list(shape) != has[name]["shape"]:
            raise RequestError(
                f"the served model is another one: its {name} has shape {has[name]['shape']}, and shall have "
                f"{list(shape)}"
            )
    return {name: entry["digest"] for name, entry in has.items()}


def send_weights(ask: Ask, tensors: Mapping[str, np.ndarray]) -> str:
    """Replace the weights of a server by `tensors`; only those that differ are sent.

    Args:
        tensors: all parameters by their names, float32.

    Returns:
        The digest of all, by which requests ask for these weights.

    Raises:
        RequestError: one is not float32, the server takes no weights, or its names or shapes are others.
    """
    if wrong := [name for name, tensor in tensors.items() if tensor.dtype != np.float32]:
        raise RequestError(f"weights are sent in float32, and {wrong[0]} is {tensors[wrong[0]].dtype}")
    has = check_weights(ask, {name: tensor.shape for name, tensor in tensors.items()})
    digests = dict[str, str]()
    for name, tensor in tensors.items():
        values_N = np.ascontiguousarray(tensor).reshape(-1)
        digests[name] = hashlib.sha256(values_N.data).hexdigest()
        if digests[name] != has[name]:
            for begin in range(0, len(values_N), VALUES_AT_ONCE):
                ask({"name": name, "begin": begin}, values_N[begin : begin + VALUES_AT_ONCE])
    digest = weights_digest(digests)
    ask({"take": digest}, None)
    return digest
