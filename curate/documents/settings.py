"""What a recipe says of a source."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from penjing.core.config import Config

Form = Literal["auto", "text", "records", "html", "roff", "warc"]


class SourceConfig(Config):
    """Files of one kind: a folder, a file, or packages of Debian."""

    name: str = Field(description="What its documents are called by; unique in the recipe.")
    path: Path | None = Field(
        default=None,
        description="A file or a folder; with `packages`, a folder below their root, such as usr/share/doc.",
    )
    packages: tuple[str, ...] = Field(
        default=(), description="Debian packages, fetched by apt-get and unpacked into the cache, not installed."
    )
    files: tuple[str, ...] = Field(
        default=(), description='Patterns of files below `path`, such as "**/*.html"; by default all that are read.'
    )
    form: Form = Field(
        default="auto",
        description="How files are read: plain text, records (JSON lines, Parquet, Arrow), HTML whose main text is "
        'extracted, roff (manual pages), or the archives of crawlers (WARC, WET); "auto" goes by the suffix.',
    )
    column: str | None = Field(default=None, description="The field of records that holds the text.")
    domain: str = Field(default="", description="The domain of its documents; by default its name.")
    licence: str = Field(default="", description="The licence of its documents, which is noted with each.")

    @model_validator(mode="after")
    def _has_files(self) -> SourceConfig:
        if self.path is None and not self.packages:
            raise ValueError(f"source {self.name!r} needs a path or packages")
        return self
