"""The parity gate of a text encoder: the fake-quantized model against every way in which ONNX Runtime may run it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penjing.compress.measure.retrieval import embed_with
from penjing.core.artifact.classifier import ONNX_RUNTIME, ONNX_RUNTIME_DEFAULT, ONNX_RUNTIME_FLOAT, Quantization
from penjing.core.artifact.encoder import EncoderArtifact, EncoderParity, embed_texts, open_encoder_session
from penjing.core.errors import InputError
from penjing.core.models.encoder import Encoder
from penjing.core.progress import Silent
from penjing.core.text.text_tokenizer import TextTokenizer


def measure_parity(
    model: Encoder,
    onnx_file: Path,
    tokenizer: TextTokenizer,
    quantization: Quantization,
    texts: list[str],
    bound: float,
) -> EncoderParity:
    """Embed `texts` by the fake-quantized `model` and by `onnx_file`.

    Three runs in ONNX Runtime: with the options that the artifact asks for, with its defaults, and as written, where
    each Q/DQ pair is computed in floating point. The first is what the bound is for.

    Raises:
        InputError: the mean cosine is below `bound` (such an artifact is refused), or there is NaN.
    """
    wanted = embed_with(model, tokenizer, texts, Silent())
    smallest, mean = _cosines(wanted, onnx_file, tokenizer, quantization, texts)
    gate(mean, bound)
    return EncoderParity(
        texts=tuple(texts),
        embeddings=tuple(tuple(row) for row in wanted.tolist()),
        smallest=smallest,
        mean=mean,
        bound=bound,
    )


def rerun_parity(artifact: EncoderArtifact) -> tuple[dict[str, float], dict[str, float]]:
    """Run the record's texts through the artifact's file again, here and now; smallest and mean cosines.

    Raises:
        InputError: ONNX Runtime on this machine is further from the fake-quantized model than the record's bound.
    """
    record = artifact.parity
    wanted = np.array(record.embeddings, np.float32)
    file = artifact.folder / "model.onnx"
    smallest, mean = _cosines(wanted, file, artifact.tokenizer, artifact.quantization, list(record.texts))
    gate(mean, record.bound)
    return smallest, mean


def gate(mean: dict[str, float], bound: float) -> None:
    """Refuse what ONNX Runtime computes too differently.

    Raises:
        InputError: with the figures and what to do.
    """
    if mean[ONNX_RUNTIME] >= bound:
        return
    hint = "lower bounds.parity if that is acceptable"
    if mean[ONNX_RUNTIME_FLOAT] >= bound:
        hint = (
            "as written the file agrees, so its integer kernels on this processor do not (without VNNI, 16-bit sums "
            "saturate): use target 'onnxruntime-avx2'"
        )
    raise InputError(
        f"parity: ONNX Runtime's embeddings have a mean cosine of {mean[ONNX_RUNTIME]:.5f} with the "
        f"fake-quantized model's, the bound is {bound:g}; {hint}"
    )


def _cosines(
    wanted: NDArray[np.float32],
    onnx_file: Path,
    tokenizer: TextTokenizer,
    quantization: Quantization,
    texts: list[str],
) -> tuple[dict[str, float], dict[str, float]]:
    smallest: dict[str, float] = {}
    mean: dict[str, float] = {}
    for name, entries, optimise in (
        (ONNX_RUNTIME, quantization.session_options, True),
        (ONNX_RUNTIME_DEFAULT, {}, True),
        (ONNX_RUNTIME_FLOAT, {}, False),
    ):
        session = open_encoder_session(onnx_file, entries, threads=1, optimise=optimise)
        cosines = (embed_texts(session, tokenizer, texts) * wanted).sum(1)
        if not np.isfinite(cosines).all():
            raise InputError(f"{onnx_file.name}: {name} computes NaN or infinity; compress the model again")
        smallest[name], mean[name] = float(cosines.min()), float(cosines.mean())
    return smallest, mean
