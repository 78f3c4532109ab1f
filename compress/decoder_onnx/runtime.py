"""Runs the ONNX file of a decoder in ONNX Runtime, for the parity gate with every layer's hidden state."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper

from penjing.compress.decoder.parity import Computed
from penjing.compress.decoder_onnx.graph import EMBEDDED, MODEL_FILE, cache_names, layer_output
from penjing.core.models.config import DecoderConfig
from penjing.core.runtime.onnx_runtime import open_graph

_PROBE = ".probe.onnx"


class DecoderSession:
    """A decoder in ONNX Runtime with its keys and values.

    Args:
        file: `model.onnx`, its constants beside it.
        outputs: further values to be computed, such as `layer_output(0)`.

    Raises:
        InputError: missing, damaged or not a decoder of ours.
    """

    def __init__(
        self, file: Path, config: DecoderConfig, session_options: dict[str, str], outputs: tuple[str, ...] = ()
    ) -> None:
        self._past, self._present = cache_names(config.num_hidden_layers)
        self._config, self._outputs = config, outputs
        inputs = ["input_ids", "attention_mask", "position_ids", *self._past]
        self._session = open_graph(file, session_options, threads=1, names=(inputs, ["logits", *self._present]))

    def start(self, batch: int) -> dict[str, NDArray[np.float32]]:
        """Empty keys and values."""
        shape = (batch, self._config.num_key_value_heads, 0, self._config.head_dim)
        return dict.fromkeys(self._past, np.zeros(shape, np.float32))

    def step(
        self, ids_BT: NDArray[np.int64], mask_BS: NDArray[np.int64], cache: dict[str, NDArray[np.float32]]
    ) -> tuple[NDArray[np.float32], dict[str, NDArray[np.float32]], list[NDArray[np.float32]]]:
        """Read the next tokens.

        Args:
            ids_BT: (B, T) token ids.
            mask_BS: (B, past + T), 0 for padding on the left.
            cache: of `start` or of the step before.

        Returns:
            Logits (B, T, V), the cache with the tokens added, and the further outputs.
        """
        positions_BS = np.maximum(mask_BS.cumsum(1) - 1, 0)
        feeds: dict[str, Any] = {
            "input_ids": ids_BT,
            "attention_mask": mask_BS,
            "position_ids": positions_BS[:, -ids_BT.shape[1] :],
        }
        logits, *rest = self._session.run(["logits", *self._present, *self._outputs], feeds | cache)
        count = len(self._past)
        return logits, dict(zip(self._past, rest[:count], strict=True)), rest[count:]


def greedy(session: DecoderSession, ids: list[int], count: int) -> list[int]:
    """Continue `ids` by `count` greedy tokens, one step a token after the prompt."""
    cache, made, new = session.start(1), list(ids), list(ids)
    for _ in range(count):
        logits, cache, _ = session.step(np.array([new]), np.ones((1, len(made)), np.int64), cache)
        new = [int(logits[0, -1].argmax())]
        made += new
    return made[len(ids) :]


def read_layers(
    folder: Path, config: DecoderConfig, session_options: dict[str, str], sequences: list[tuple[list[int], int]]
) -> list[Computed]:
    """Read each sequence as it is served: the prompt at once, then token by token from the cache.

    Args:
        folder: holds `model.onnx` and its constants, and is not yet published: a copy of the graph that gives every
            layer's hidden state lies there meanwhile.
        sequences: (token ids, length of the prompt).
    """
    hidden = (EMBEDDED, *(layer_output(layer) for layer in range(config.num_hidden_layers)))
    model = onnx.load(str(folder / MODEL_FILE), load_external_data=False)
    model.graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in hidden)
    probe = folder / _PROBE
    probe.write_bytes(model.SerializeToString())
    try:
        session = DecoderSession(probe, config, session_options, hidden)
        return [_read(session, ids, begin) for ids, begin in sequences]
    finally:
        probe.unlink()


def _read(session: DecoderSession, ids: list[int], begin: int) -> Computed:
    cache, parts, logits = session.start(1), [], []
    cuts = [0, *range(begin, len(ids) + 1)]
    for first, last in pairwise(cuts):
        mask = np.ones((1, last), np.int64)
        row, cache, hidden = session.step(np.array([ids[first:last]]), mask, cache)
        logits.append(torch.from_numpy(row[0]))
        parts.append([torch.from_numpy(state[0]) for state in hidden])
    return Computed([torch.cat(states) for states in zip(*parts, strict=True)], torch.cat(logits))
