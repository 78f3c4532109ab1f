"""A text encoder becomes an INT8 artifact: absorb biases, smooth, calibrate, write ONNX, check parity."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import Field
from torch import Tensor

from penjing.compress.export.onnx_graph import export_network
from penjing.compress.graph.calibrate import calibrate_graph
from penjing.compress.graph.own import encoder_network
from penjing.compress.graph.place import place_quantizers
from penjing.compress.graph.prepare import prepared
from penjing.compress.graph.smooth import smooth
from penjing.compress.graph.stored import stored
from penjing.compress.parity.encoder import EncoderParity
from penjing.compress.quantize.biases import absorb_biases
from penjing.compress.quantize.targets import EncoderSettings, GraphSettings, resolve
from penjing.compress.quantizers.onnx import quantization_for, said_of_network, said_of_parity, write_records
from penjing.compress.samples.data import DataSettings, text_samples
from penjing.compress.samples.retrieval import retrieval_set
from penjing.core.artifact.base import MODEL_FILE
from penjing.core.checkpoint.encoder import load_encoder, save_encoder_files
from penjing.core.errors import ConfigError
from penjing.core.graph.network import Network
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
    quantization = quantization_for(step.target, step)

    samples = text_samples(places.source, data, progress)

    def watched() -> Iterator[tuple[Tensor, ...]]:
        for batch in samples.inputs():
            yield batch
            progress.advance()

    progress.start("calibrating", len(samples.texts) * (1 + step.smooth))
    absorb_biases(model)
    network = calibrated_encoder(model, step, watched)
    export_network(stored(network, step.target), partial / MODEL_FILE, {}, step.target)
    probe = retrieval_set(PARITY_TEXTS)
    progress.start("checking the artifact", 1)
    comparison = EncoderParity(probe.texts(), tokenizer)
    parity = comparison.measure(comparison.embedded(network), partial / MODEL_FILE, quantization, step.parity_bound)
    progress.advance()
    write_records(partial, quantization, parity)
    said = said_of_network(network, quantization, islice(samples.inputs(), ERROR_TEXTS))
    quantized = (
        said
        | said_of_parity(parity)
        | {
            "formats": said["formats"] | {"embedding": step.embedding},
            "training_steps": 0,
            "layers": [row for row in said["layers"] if row["format"] != "float32"],
        }
    )
    return {"kind": "quantize", "quantized": quantized}


def calibrated_encoder(
    model: Encoder, settings: EncoderSettings, batches: Callable[[], Iterable[tuple[Tensor, ...]]]
) -> Network:
    """`model` as a graph that rounds as the target will, smoothed and its ranges found on `batches` of ids and masks.

    Raises:
        ConfigError: the target cannot express the settings.
        InputError: a weight or an activation is not finite.
    """
    shared = GraphSettings(**settings.model_dump(include=set(GraphSettings.model_fields)))
    network = prepared(encoder_network(model))
    if settings.smooth:
        smooth(network, batches(), shared)
    place_quantizers(network, shared)
    calibrate_graph(network, batches())
    return network
