"""Pictures that another model of this Triton server computes, by a call of the Python backend from model to model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from penjing.core.errors import UnavailableError
from penjing.serve.client.errors import refused
from penjing.serve.families.graph_model import PIXELS
from penjing.serve.families.sight import ROWS
from penjing.serve.sight.eyes import Picture, Rows

ATTEMPTS, PAUSE_SECONDS = 3, 0.5


class RemoteEyes:
    """What `Eyes` computes, by the model `name`; any thread may call it, and waits.

    Args:
        most: pictures of one call; further ones are sent in a call of their own.
    """

    def __init__(self, pb_utils: Any, name: str, most: int) -> None:
        self._pb_utils, self._name, self._most = pb_utils, name, most

    def __call__(self, pictures: Sequence[Picture]) -> list[Rows]:
        """(height, width, channels) uint8 each → (R, E) float32 each.

        Raises:
            PenjingError: as the other model answers; UnavailableError where it is gone.
        """
        return [
            rows
            for at in range(0, len(pictures), self._most)
            for rows in self._ask(np.stack(pictures[at : at + self._most]))
        ]

    def _ask(self, pictures: np.ndarray) -> list[Rows]:
        for attempt in range(ATTEMPTS):
            try:
                return self._asked(pictures)
            except UnavailableError:  # Triton server calls a process ill that was starved for a second
                if attempt == ATTEMPTS - 1:
                    raise
                time.sleep(PAUSE_SECONDS)
        raise AssertionError("the last attempt returns or raises")

    def _asked(self, pictures: np.ndarray) -> list[Rows]:
        utils = self._pb_utils
        try:
            request = utils.InferenceRequest(
                model_name=self._name, requested_output_names=[ROWS], inputs=[utils.Tensor(PIXELS, pictures)]
            )
            response = request.exec()
        except utils.TritonModelException as error:
            raise UnavailableError(f"images cannot be computed now: {error}; try again later") from None
        if response.has_error():
            raise refused(response.error().message()).error
        (tensor,) = response.output_tensors()
        return [torch.from_numpy(np.array(rows)) for rows in tensor.as_numpy()]
