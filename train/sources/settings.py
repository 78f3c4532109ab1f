"""What every `[data]` says about where the user's samples lie."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field, model_validator

from penjing.core.config import Config


class SourceSettings(Config):
    """Where samples come from, and how they are read."""

    OTHERS: ClassVar[tuple[str, ...]] = ("images",)

    source: str | None = Field(
        default=None,
        description="The user's own samples: a folder of images, with a folder for each class or without; a .tar "
        "(WebDataset; also .tar.gz, .tgz, .tar.bz2, .tar.xz and .tar.zst), .parquet, .arrow, .jsonl, .npz, .npy or "
        ".safetensors file, or a folder of such; or FILE.py:FUNCTION, which yields inputs, or pairs of inputs and "
        "labels. `images` is another spelling where they are images.",
    )
    column: str | None = Field(
        default=None, description="Column of a table that holds the images; none given: the one that does."
    )
    text_column: str | None = Field(
        default=None,
        description="Column of a table that holds texts, for a graph that takes tokens and was imported with its "
        'tokenizer; none given: "text", "sentence" or "content", where no column holds images.',
    )
    text_tokens: int = Field(default=128, ge=1, description="Tokens of such a text at most; longer ones are cut.")
    label_column: str | None = Field(
        default=None, description='Column of a table that holds the classes; none given: "label", if there is one.'
    )
    labels: bool = Field(default=True, description="Whether classes are read; false takes the samples without them.")
    max_broken: float = Field(
        default=0.01,
        ge=0,
        le=1,
        description="Share of the samples that may be unreadable; they are named and left out.",
    )
    workers: int = Field(default=4, ge=1, le=256, description="Threads that read and decode.")
    processes: int = Field(
        default=0,
        ge=0,
        le=256,
        description="Processes that decode and scale images for these threads; 0: the threads do it themselves.",
    )

    @model_validator(mode="before")
    @classmethod
    def _images_are_a_source(cls, values: Any) -> Any:
        if not isinstance(values, dict) or not isinstance(values.get("images"), str) or values["images"].isdigit():
            return values
        if values.get("source") not in (None, values["images"]):
            raise ValueError(f"source = {values['source']!r} and images = {values['images']!r}: give one of them")
        rest = {name: value for name, value in values.items() if name != "images"}
        return rest | {"source": values["images"]}

    def source_settings(self) -> dict[str, Any]:
        """The settings of this class, by name."""
        return {name: getattr(self, name) for name in SourceSettings.model_fields}


class TrainingSource(SourceSettings):
    """Samples of which a share is held out."""

    held_out: float = Field(
        default=0.1,
        ge=0,
        lt=1,
        description="Share of the source that is never learnt or calibrated on, chosen by the content of each file, so "
        "that equal files stay together; where the source has folders train and test (or val), those are taken.",
    )


class Augment(Config):
    """How images are changed anew each time that they are learnt from."""

    scale: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Least share of an image that is shown: a part of at least this area, anywhere in it, is scaled to "
        "the size of the whole; 1 shows all of it.",
    )
    colour: float = Field(
        default=0.0, ge=0, lt=1, description="Light, contrast and colours change by this share at most; 0: not at all."
    )

    pad: int = Field(default=0, ge=0, description="Pixels added around an image before it is cropped at random.")
    flip: bool = Field(default=False, description="Half of the images are mirrored, left to right.")
    erase: int = Field(
        default=0, ge=0, description="Side of a square at a random place that gets the mean colour; 0: none."
    )


class Mixed(Config):
    """How a sample and another one become one, each time that it is learnt from."""

    mix: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Each image is mixed with another one, whose share is anything up to this, and learns the classes "
        "of both by their shares; 0: not at all. 0.5 is a start.",
    )
