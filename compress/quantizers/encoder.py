"""A text encoder becomes an INT8 artifact: absorb biases, smooth, calibrate, write ONNX, check parity."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import Field
from torch import Tensor

from penjing.compress.export.graph import OPSET
from penjing.compress.export.onnx_encoder import export_encoder
from penjing.compress.quantize.biases import absorb_biases
from penjing.compress.quantize.encoder_parity import measure
from penjing.compress.quantize.errors import layer_errors
from penjing.compress.quantize.place_bert import apply_quantization
from penjing.compress.quantize.place_resnet import calibrate
from penjing.compress.quantize.smooth import smooth
from penjing.compress.quantize.targets import X64_REASON, EncoderSettings, resolve
from penjing.compress.samples.data import DataSettings, text_samples
from penjing.compress.samples.retrieval import retrieval_set
from penjing.core.artifact.base import MODEL_FILE, QUANTIZATION_FILE
from penjing.core.artifact.onnx import Quantization
from penjing.core.artifact.parity import write_parity
from penjing.core.checkpoint.encoder import load_encoder, save_encoder_files
from penjing.core.files import atomic_write_text
from penjing.core.info import versions
from penjing.core.manifest import write_manifest
from penjing.core.progress import Progress
from penjing.core.text.text_tokenizer import TextTokenizer
from penjing.core.work import Places

PARITY_TEXTS = 16  # queries, and as many documents
ERROR_TEXTS = 8  # on which each layer is compared with its floating self


class EncoderQuantize(EncoderSettings):
    """INT8 for a text encoder."""

    parity_bound: float = Field(
        default=0.01,
        gt=0,
        le=2,
        description="Largest mean cosine distance of ONNX Runtime's embeddings to the fake-quantized model's.",
    )


def check(_: Path, step: EncoderQuantize, __: DataSettings) -> None:
    """Refuse settings that the target cannot express.

    Raises:
        ConfigError: it cannot.
    """
    resolve(step.target, step)


def quantize(places: Places, step: EncoderQuantize, data: DataSettings, _: Path, progress: Progress) -> dict[str, Any]:
    """Fill `places.partial`, not yet published, with the artifact of the text encoder in `places.source`.

    Returns:
        What it decided and measured, JSON-ready.

    Raises:
        ConfigError: the target cannot express the settings.
        InputError: the checkpoint is damaged, there is too little text, or the artifact fails its parity gate.
    """
    partial = places.partial
    model = load_encoder(places.source)
    tokenizer = TextTokenizer(places.source, model.config)
    save_encoder_files(partial, model.config, places.source, tokenizer.max_tokens)
    target, activations, weights = resolve(step.target, step)

    samples = text_samples(places.source, data, progress)

    def watched() -> Iterator[tuple[Tensor, ...]]:
        for batch in samples.inputs():
            yield batch
            progress.advance()

    progress.start("calibrating", len(samples.texts) * (1 + step.smooth))
    absorb_biases(model)
    factors = smooth(model, watched(), step) if step.smooth else {}
    calibrate(apply_quantization(model, step, factors), watched())
    quantization = Quantization(
        target=step.target,
        activations=activations,
        weights=weights,
        opset=OPSET,
        session_options=target.session_options,
        session_options_reason=X64_REASON if target.session_options else "",
    )
    export_encoder(model, step.target, partial / MODEL_FILE)
    probe = retrieval_set(PARITY_TEXTS)
    texts = probe.queries + probe.documents
    progress.start("checking the artifact", 1)
    parity = measure(model, partial / MODEL_FILE, tokenizer, quantization, texts, step.parity_bound)
    progress.advance()
    write_parity(partial, parity)
    atomic_write_text(partial / QUANTIZATION_FILE, json.dumps(quantization.model_dump(), indent=2) + "\n")
    write_manifest(partial, "artifact", {"command": "penjing compress", "versions": versions()})
    quantized = {
        "target": step.target,
        "formats": {"weights": weights, "activations": activations, "embedding": step.embedding},
        "training_steps": 0,
        "layers": layer_errors(model, islice(samples.inputs(), ERROR_TEXTS)),
        "differences": [each.model_dump() for each in parity.differences],
        "bound": parity.bound.model_dump(),
        "unmeasured": parity.unmeasured,
    }
    return {"kind": "quantize", "quantized": quantized}
