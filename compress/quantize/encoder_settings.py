"""What `penjing compress` is told of a text encoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from penjing.compress.quantize.targets import QuantizeSettings, TargetName
from penjing.core.config import Config


class EncoderQuantize(QuantizeSettings):
    """How the encoder is quantized; see `QuantizeSettings`.

    Attributes:
        target: the engine that will run it.
        smooth: divide channels of inputs where that lowers the error; see `smooth.py`.
        embedding: of the word table, which is half of a small encoder: INT8 with a scale for each word, or floating.
    """

    target: TargetName = "onnxruntime-cpu"
    smooth: bool = True
    embedding: Literal["int8", "float32"] = "int8"
    learn_activations: bool = False

    @model_validator(mode="after")
    def _nothing_is_trained(self) -> EncoderQuantize:
        if self.learn_weights or self.learn_activations:
            raise ValueError("learn_weights, learn_activations: text encoders are calibrated, not trained; leave out")
        return self


class EncoderTexts(Config):
    """How many paragraphs of Python's help topics: to calibrate on, and (others) to evaluate on."""

    calibrate: int = Field(default=128, ge=8)
    evaluate: int = Field(default=256, ge=8)


class EncoderBounds(Config):
    """What the artifact must keep, or it is refused.

    Attributes:
        cosine: mean between its embeddings and those of the FP32 model, held-out texts.
        parity: mean between ONNX Runtime's embeddings and the fake-quantized model's. Values near a tie round either
            way and move what follows, so it is never 1.
    """

    cosine: float = Field(default=0.98, ge=-1, le=1)
    parity: float = Field(default=0.99, ge=-1, le=1)


class EncoderRecipe(Config):
    """A whole run."""

    model: Path
    output: Path
    quantize: EncoderQuantize = EncoderQuantize()
    texts: EncoderTexts = EncoderTexts()
    bounds: EncoderBounds = EncoderBounds()

    def settings(self) -> dict[str, Any]:
        """Everything that decides the result: all but where it is read from and written to."""
        return self.model_dump(mode="json", exclude={"model", "output"})
