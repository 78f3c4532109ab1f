"""What a recipe says of a source."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from penjing.core.config import Config
from penjing.core.remote.files import is_remote

Form = Literal["auto", "text", "records", "html", "roff", "warc"]


class SourceConfig(Config):
    """Files of one kind: a folder, a file, or packages of Debian."""

    name: str = Field(description="What its documents are called by; unique in the recipe.")
    path: Path | None = Field(
        default=None,
        description="A file or a folder; with `packages`, a folder below their root, such as usr/share/doc.",
    )
    address: str | None = Field(
        default=None,
        description="A file or a folder elsewhere, in place of `path`: s3://bucket/crawl/, https://host/a.warc.gz.",
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
        if self.path is None and not self.packages and self.address is None:
            raise ValueError(f"source {self.name!r} needs a path, packages or an address")
        if self.address is not None and (self.path is not None or self.packages):
            raise ValueError(f"source {self.name!r} has an address beside a path or packages; make two sources of it")
        if self.address is not None and not is_remote(self.address):
            raise ValueError(f"address {self.address!r} is no address such as s3://bucket/a/; a path goes into `path`")
        if self.path is not None and re.match(r"[a-z0-9+]{2,}:/", str(self.path)):
            raise ValueError(f"path {str(self.path)!r} is an address; give it by `address`")
        return self
