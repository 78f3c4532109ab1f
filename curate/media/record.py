"""What is known of an image or a recording, in one form for both."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from penjing.core.config import Config


class MediaRecord(Config):
    """An image or a recording, and the text that belongs to it."""

    key: str = Field(description="Its name in the tar, without an ending.")
    kind: Literal["image", "audio"] = Field(description="What it is.")
    source: str = Field(description="Its path below the folder that was read.")
    text: str = Field(default="", description="What is said of it; empty where nothing is.")
    licence: str = Field(default="", description="Its licence, as the user said.")
    form: str = Field(description="What the source was stored as, such as JPEG or FLAC.")
    bytes: int = Field(description="Of the source.")
    sha256: str = Field(description="Of the source, hexadecimal.")
    width: int = Field(default=0, description="Pixels of an image, as it is seen upright.")
    height: int = Field(default=0, description="Pixels of an image, as it is seen upright.")
    look: str = Field(default="", description="The perceptual hash of an image (pHash, 64 bits), hexadecimal.")
    sample_rate: int = Field(default=0, description="Samples a second of a recording.")
    channels: int = Field(default=0, description="Of a recording.")
    seconds: float = Field(default=0.0, description="How long a recording lasts.")
    alignment: float | None = Field(
        default=None, description="How well the text fits the image, from -1 to 1, where two towers were asked."
    )
    changed: str = Field(default="", description="What was done to it: turned, stored again.")
