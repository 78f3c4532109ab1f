"""Weights of a served decoder that come from where it is trained, a piece of a tensor in each request.

They are written over the old ones, so the first piece ends that answers are given until all weights are told to be
there, and it is refused while an answer runs. What the model computes with has a name: the digest of all its weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from pydantic import Field, ValidationError
from torch import Tensor

from penjing.core.config import Config
from penjing.core.errors import RequestError
from penjing.core.progress import plural
from penjing.serve.client.protocol import weights_digest
from penjing.serve.engine.loop import EngineLoop

UNFINISHED = "its weights are being replaced"


class WeightPiece(Config):
    """Where the values of a request belong: in the tensor `name`, flattened, from `begin` on."""

    name: str = Field(description="Of the parameter.")
    begin: int = Field(ge=0, description="Values before these.")


class ServedWeights:
    """The parameters of a decoder as others see and write them. Requests come one after the other.

    Args:
        parameters: those that the engine computes with, contiguous and floating.
    """

    def __init__(self, parameters: Mapping[str, Tensor], loop: EngineLoop) -> None:
        self._parameters, self._loop = parameters, loop
        self._digests: dict[str, str | None] = {}  # of each tensor, None while it is not whole; computed when asked for
        self._digest: str | None = None  # of all, while they belong together
        self._piece: tuple[str, int, Any] | None = None  # the tensor that is being written, its values so far, a hash

    def answer(self, asked: Any, values: np.ndarray | None) -> str:
        """Do what a request asks for, see `penjing.serve.client.protocol.WEIGHTS`; its answer.

        Args:
            asked: its parameter, JSON.
            values: its input.

        Raises:
            RequestError: it asks for nothing that there is, or `write` or `take` refuses.
            OverloadedError: answers run.
        """
        try:
            given = json.loads(asked)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"weights is not valid JSON: {error}") from None
        if given == "list":
            return json.dumps(self.listed())
        if isinstance(given, dict) and given.keys() == {"take"}:
            self.take(given["take"])
        elif values is None:
            raise RequestError('weights: an input of this name is missing; without one ask for "list" or {"take": …}')
        else:
            self.write(_piece(given), values)
        return ""

    def listed(self) -> dict[str, Any]:
        """JSON-ready: the shape and the digest of each tensor, and the "digest" of all where they belong together."""
        digests = self._known()
        tensors = {
            name: {"shape": list(tensor.shape), "digest": digests[name]} for name, tensor in self._parameters.items()
        }
        return {"tensors": tensors, "digest": self._digest}

    def check(self, digest: Any) -> None:
        """Refuse a request that is for other weights than these.

        Raises:
            RequestError: it is.
        """
        self._known()
        if digest != self._digest:
            raise RequestError(
                "of_weights: this server has other weights than those that are asked for; it may have started anew, or "
                "somebody else sends it some: send them again"
            )

    def write(self, piece: WeightPiece, values_N: np.ndarray) -> None:
        """Put `values_N`, float32, where `piece` says. Pieces of a tensor come in order, from its first value on.

        Raises:
            RequestError: there is no such tensor, its values are fewer, or others were to come first.
            OverloadedError: answers run.
        """
        tensor = self._parameters.get(piece.name)
        if tensor is None:
            raise RequestError(f"weights: there is no tensor {piece.name!r:.80}; ask for a list of them")
        if values_N.dtype != np.float32 or values_N.ndim != 1:
            raise RequestError(f"weights must be a TYPE_FP32 tensor of one dimension, got {values_N.dtype}")
        new = (piece.name, 0, hashlib.sha256())
        name, before, digest = new if piece.begin == 0 else self._piece or new
        if (name, before) != (piece.name, piece.begin):
            raise RequestError(
                f"weights: value {piece.begin} of {piece.name} does not follow what came before; send each tensor from "
                "its first value to its last"
            )
        if (after := before + len(values_N)) > tensor.numel():
            raise RequestError(f"weights: {name} has {tensor.numel()} values, and {after} came")
        digests = self._known()
        self._loop.pause(UNFINISHED)
        digests[name] = None
        self._digest, self._piece = None, (name, after, digest)
        tensor.view(-1)[before:after] = torch.from_numpy(values_N.copy())
        digest.update(values_N.data)
        if after == tensor.numel():
            self._digests[name], self._piece = digest.hexdigest(), None

    def take(self, digest: Any) -> None:
        """From now on answers are those of these weights.

        Raises:
            RequestError: they are not those of `digest`.
        """
        whole = {name: known for name, known in self._known().items() if known is not None}
        if missing := self._parameters.keys() - whole.keys():
            raise RequestError(
                f"weights: {plural(len(missing), 'tensor')} came in part, such as {min(missing)}; send the rest"
            )
        if (found := weights_digest(whole)) != digest:
            raise RequestError(f"weights: what is there has the digest {found}, not {digest!r:.80}; send them again")
        self._digest = found
        self._loop.resume()

    def _known(self) -> dict[str, str | None]:
        if not self._digests:  # half a second for half a gigabyte, and nobody asks but who trains
            whole = {name: hashlib.sha256(tensor.numpy().data).hexdigest() for name, tensor in self._parameters.items()}
            self._digests, self._digest = dict(whole), weights_digest(whole)
        return self._digests


def _piece(given: Any) -> WeightPiece:
    try:
        return WeightPiece.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        raise RequestError(f"weights: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
