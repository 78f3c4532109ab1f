"""The parity record of a text encoder: the fake-quantized model against every way in which ONNX Runtime may run it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penjing.compress.samples.retrieval import embed_with
from penjing.core.artifact.base import MODEL_FILE
from penjing.core.artifact.onnx import ONNX_RUNTIME, Quantization, gate_onnx, recorded
from penjing.core.artifact.onnx_encoder import (
    QUANTITY,
    cosine_difference,
    embed_texts,
    open_encoder_artifact,
    open_encoder_session,
    recorded_texts,
)
from penjing.core.artifact.parity import FAKE_QUANTIZED, Bound, Difference, Parity
from penjing.core.graph.network import Network
from penjing.core.progress import Progress, Silent
from penjing.core.text.text_tokenizer import TextTokenizer

HINT = "lower bounds.parity if that is acceptable"


def measure(
    network: Network,
    onnx_file: Path,
    tokenizer: TextTokenizer,
    quantization: Quantization,
    texts: list[str],
    bound: float,
) -> Parity:
    """Embed `texts` by the fake-quantized `network` and by `onnx_file` (`Quantization.ways`).

    Args:
        bound: of the mean cosine distance, in ONNX Runtime with the options that the artifact asks for.

    Raises:
        InputError: the bound is exceeded (an artifact that does so is refused), or there is NaN.
    """
    wanted = embed_with(lambda *inputs: network(*inputs)[0], tokenizer, texts, Silent())
    limit = Bound(between=(FAKE_QUANTIZED, ONNX_RUNTIME), quantity=QUANTITY, statistic="mean", value=bound)
    return Parity(
        family="encoder",
        inputs={"texts": texts},
        outputs={FAKE_QUANTIZED: wanted.tolist()},
        differences=_gated(wanted, onnx_file, tokenizer, quantization, texts, limit),
        bound=limit,
    )


def rerun(folder: Path, progress: Progress) -> tuple[Difference, ...]:
    """Run the record's texts through the artifact in `folder` again, here and now; every hash is checked.

    Raises:
        InputError: damaged, or ONNX Runtime on this machine is further from the fake-quantized model than the record's
            bound.
    """
    artifact = open_encoder_artifact(folder)
    record = artifact.parity
    wanted, texts = recorded(record, FAKE_QUANTIZED).astype(np.float32), recorded_texts(record)
    progress.start("parity", 1)
    differences = _gated(wanted, folder / MODEL_FILE, artifact.tokenizer, artifact.quantization, texts, record.bound)
    progress.advance()
    return differences


def _gated(
    wanted: NDArray[np.float32],
    onnx_file: Path,
    tokenizer: TextTokenizer,
    quantization: Quantization,
    texts: list[str],
    bound: Bound,
) -> tuple[Difference, ...]:
    differences = []
    for name, (entries, optimise) in quantization.ways().items():
        session = open_encoder_session(onnx_file, entries, threads=1, optimise=optimise)
        found = embed_texts(session, tokenizer, texts)
        differences.append(cosine_difference((FAKE_QUANTIZED, name), wanted, found))
    gate_onnx(tuple(differences), bound, HINT)
    return tuple(differences)
