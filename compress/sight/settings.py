"""Rows with images as recipes name them, for decoders that see."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from penjing.core.config import Config


class ImageRows(Config):
    """Rows that choose what leaves a network, and calibrate it."""

    rows: tuple[str, ...] = Field(
        default=(),
        description="Of a decoder that sees: rows with images, JSON lines or Parquet as for training, or "
        "builtin:scenes. Those of [data] choose what leaves, in place of text, and calibrate; those of a quantize step "
        "calibrate in their place. Without any, its eyes are rounded to nearest.",
    )
    row_images: Path = Field(default=Path(), description="Folder of the images that these rows name.")
    most_rows: int = Field(default=128, ge=1, description="So many of these rows, at most.")


class ImageQuestions(Config):
    """Rows that a network is asked; what counts is the share that it answers exactly."""

    questions: tuple[str, ...] = Field(
        default=(),
        description="Of a decoder that sees: rows with images that it is asked, JSON lines or Parquet as for training, "
        "or builtin:scenes-test. By those of [evaluate] it is judged, in place of text; those of a quantize step are "
        "asked before and after it.",
    )
    question_images: Path = Field(default=Path(), description="Folder of the images that these rows name.")
    most_questions: int = Field(default=200, ge=1, description="So many of these rows are asked, at most.")
