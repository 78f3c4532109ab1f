"""A text encoder becomes an INT8 artifact: absorb biases, smooth, calibrate, write ONNX, check parity."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import Field
from torch import Tensor

from penjing.compress.export.onnx_graph import OPSET, export_network
from penjing.compress.graph.calibrate import calibrate_graph, graph_layer_errors
from penjing.compress.graph.own import encoder_network
from penjing.compress.graph.place import apply_quantization
from penjing.compress.graph.stored import stored
from penjing.compress.quantize.biases import absorb_biases
from penjing.compress.quantize.encoder_parity import measure
from penjing.compress.quantize.smooth import smooth
from penjing.compress.quantize.targets import X64_REASON, EncoderSettings, GraphSettings, resolve
from penjing.compress.samples.data import DataSettings, text_samples
from penjing.compress.samples.retrieval import retrieval_set
from penjing.core.artifact.base import MODEL_FILE, QUANTIZATION_FILE
from penjing.core.artifact.onnx import Quantization
from penjing.core.artifact.parity import write_parity
from penjing.core.checkpoint.encoder import load_encoder, save_encoder_files
from penjing.core.errors import ConfigError
from penjing.core.files import atomic_write_text
from penjing.core.graph.network import Network
from penjing.core.info import versions
from penjing.core.manifest import write_manifest
from penjing.core.models.encoder import Encoder
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
    """Refuse settings that the target cannot express, or that text encoders do not take.

    Raises:
        ConfigError: such settings.
    """
    if resolve(step.target, step)[1] == "fp8":
        raise ConfigError("quantize.activations=fp8: text encoders are quantized to integers; use int8 or uint8")


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
    if step.smooth:
        smooth(model, watched(), step)
    network = calibrated_encoder(model, step, watched())
    quantization = Quantization(
        target=step.target,
        activations=activations,
        weights=weights,
        opset=OPSET,
        session_options=target.session_options,
        session_options_reason=X64_REASON if target.session_options else "",
    )
    export_network(stored(network, step.target), partial / MODEL_FILE, {}, step.target)
    probe = retrieval_set(PARITY_TEXTS)
    texts = probe.queries + probe.documents
    progress.start("checking the artifact", 1)
    parity = measure(network, partial / MODEL_FILE, tokenizer, quantization, texts, step.parity_bound)
    progress.advance()
    write_parity(partial, parity)
    atomic_write_text(partial / QUANTIZATION_FILE, json.dumps(quantization.model_dump(), indent=2) + "\n")
    write_manifest(partial, "artifact", {"command": "penjing compress", "versions": versions()})
    shown = islice(samples.inputs(), ERROR_TEXTS)
    quantized = {
        "target": step.target,
        "formats": {"weights": weights, "activations": activations, "embedding": step.embedding},
        "training_steps": 0,
        "layers": [row for row in graph_layer_errors(network, shown) if row["format"] != "float32"],
        "differences": [each.model_dump() for each in parity.differences],
        "bound": parity.bound.model_dump(),
        "unmeasured": parity.unmeasured,
    }
    return {"kind": "quantize", "quantized": quantized}


def calibrated_encoder(model: Encoder, settings: EncoderSettings, batches: Iterable[tuple[Tensor, ...]]) -> Network:
    """`model` as a graph that rounds as the target will, its ranges found on `batches` of ids and masks.

    Raises:
        ConfigError: the target cannot express the settings.
        InputError: a weight or an activation is not finite.
    """
    shared = settings.model_dump(include=set(GraphSettings.model_fields))
    network = apply_quantization(encoder_network(model), GraphSettings(**shared))
    calibrate_graph(network, batches)
    return network
